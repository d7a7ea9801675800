"""A `PromptSet` is the list of its prompts. On disk: tokenized once, made again when damaged, never in the way."""

from __future__ import annotations

import datetime
import json
import os
import threading
import time
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.config.data import DataConfig, DataSourceConfig, PromptConfig
from megatron_rl.config.sections import ValidationConfig
from megatron_rl.data import PromptSet, load_prompts, load_tokenizer, load_train, load_validation, prompts, table
from megatron_rl.errors import InputError
from megatron_rl.types import Prompt

TEXT = st.text(st.characters(codec="utf-8"), max_size=5)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda values: st.lists(values, max_size=2) | st.dictionaries(st.text(max_size=2), values, max_size=2),
    max_leaves=4,
)
EXTRA = st.dictionaries(st.text(max_size=3), JSON | st.tuples(st.integers()) | st.binary(max_size=2), max_size=2)
TOKENS = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=4)
PROMPTS = st.lists(st.builds(Prompt, TEXT, TOKENS, TEXT, TEXT, st.sampled_from("abc"), EXTRA), max_size=9)
TINY = Path(__file__).resolve().parents[3] / "recipes" / "tiny" / "model"
ROWS = [
    {"problem": f"^{i % 5}=", "answer": i % 5, "data_source": "even" if i % 2 else "odd", "extra_info": {"n": [i, 0.1]}}
    for i in range(20)
]


@given(PROMPTS, st.integers(1, 4), st.data())
@settings(max_examples=60)
def test_a_set_is_the_list_of_its_prompts(prompts, rows_of_a_batch, data):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(table, "ROWS_OF_A_BATCH", rows_of_a_batch)
        whole = PromptSet.of(prompts)
    rows = data.draw(st.lists(st.integers(0, len(prompts) - 1), max_size=5)) if prompts else []
    chosen = whole.choose(np.array(rows, dtype=np.int64), "some")
    for prompt_set, expected in ((whole, prompts), (chosen, [prompts[row] for row in rows])):
        assert repr(list(prompt_set)) == repr(expected)  # NaN is not equal to itself
        assert repr(prompt_set[1:]) == repr(expected[1:])
        assert prompt_set.lengths.tolist() == [len(p.tokens) for p in expected]
        assert prompt_set.num_different == len({(tuple(p.tokens), p.answer, p.data_source) for p in expected})
        assert prompt_set.data_sources == sorted({p.data_source for p in expected})
        limit = data.draw(st.integers(0, 2**31))
        assert repr(prompt_set.beyond(limit)) == repr(next((p for p in expected if max(p.tokens) >= limit), None))
        names = [p.id for p in expected[::2]]
        assert prompt_set.named([*names, "nowhere" * 3]).keys() == set(names)
        assert (prompt_set.fingerprint, prompt_set.digest) == (
            PromptSet.of(expected).fingerprint,
            PromptSet.of(expected).digest,
        )


def test_places_outside_are_refused():
    prompts = PromptSet.of([Prompt("a", [1], "1")])
    assert prompts[-1].id == "a"
    for place in (1, -2):
        with pytest.raises(IndexError):
            prompts[place]


@pytest.fixture
def tokenizer():
    return load_tokenizer(str(TINY))


@pytest.fixture(autouse=True)
def _small_files_too(monkeypatch):
    monkeypatch.setattr(prompts, "CACHED_BYTES", 0)


@pytest.fixture
def source(tmp_path):
    return write_rows(tmp_path / "x.jsonl", ROWS)


def write_rows(path: Path, rows: list[dict]) -> DataSourceConfig:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    an_hour_ago = time.time() - 3600  # the hash of a file that has just changed is not kept
    os.utime(path, (an_hour_ago, an_hour_ago))
    return DataSourceConfig(path=str(path))


@pytest.fixture
def built(monkeypatch):
    """How often problems were tokenized."""
    calls, tokenized = [], prompts._tokenized

    def count(*arguments):
        calls.append(arguments)
        return tokenized(*arguments)

    monkeypatch.setattr(prompts, "_tokenized", count)
    return calls


def entries(folder: Path) -> list[Path]:
    return [path for path in (folder / "prompts").iterdir() if path.is_dir()]


def test_a_later_start_maps_what_the_first_one_wrote(tokenizer, source, tmp_path, built, caplog):
    expected = load_prompts(source, tokenizer)
    first = load_prompts(source, tokenizer, cache=tmp_path / "cache")
    assert "tokenized once, into" in caplog.text
    later = load_prompts(source, tokenizer, cache=tmp_path / "cache")
    assert len(built) == 2  # in memory, and into the file
    for loaded in (first, later):
        assert list(loaded) == list(expected)
        assert (loaded.fingerprint, loaded.digest) == (expected.fingerprint, expected.digest)
        assert (loaded.num_dropped, loaded.num_different, loaded.data_sources) == (0, 10, ["even", "odd"])


def test_the_same_file_elsewhere_is_the_same_entry(tokenizer, source, tmp_path, built):
    load_prompts(source, tokenizer, cache=tmp_path / "cache")
    (tmp_path / "there").mkdir()
    load_prompts(write_rows(tmp_path / "there" / "x.jsonl", ROWS), tokenizer, cache=tmp_path / "cache")
    assert len(built) == 1


@pytest.mark.parametrize(
    "change",
    [
        {"template": "a{problem}"},
        {"max_length": 9},
        {"overlong": "drop"},
        {"add_special_tokens": False},
        {"chat_template": "chat.jinja"},
    ],
)
def test_other_settings_make_another_entry(tokenizer, source, tmp_path, change):
    if "chat_template" in change:
        (tmp_path / "chat.jinja").write_text("{{ messages[0].content }}")
        change = {"chat_template": str(tmp_path / "chat.jinja")}
    load_prompts(source, tokenizer, cache=tmp_path / "cache")
    loaded = load_prompts(source, tokenizer, PromptConfig(**change), cache=tmp_path / "cache")
    assert list(loaded) == list(load_prompts(source, tokenizer, PromptConfig(**change)))
    assert len(entries(tmp_path / "cache")) == 2


def test_another_tokenizer_makes_another_entry(tokenizer, source, tmp_path):
    load_prompts(source, tokenizer, cache=tmp_path / "cache")
    tokenizer.add_tokens(["^1"])
    loaded = load_prompts(source, tokenizer, cache=tmp_path / "cache")
    assert list(loaded) == list(load_prompts(source, tokenizer))
    assert len(entries(tmp_path / "cache")) == 2


@pytest.mark.parametrize("change", [{"limit": 3}, {"name": "other"}, {"answer_key": "problem"}])
def test_other_settings_of_a_source_make_another_entry(tokenizer, source, tmp_path, change):
    load_prompts(source, tokenizer, cache=tmp_path / "cache")
    other = source.model_copy(update=change)
    assert list(load_prompts(other, tokenizer, cache=tmp_path / "cache")) == list(load_prompts(other, tokenizer))


def test_a_changed_file_of_the_same_size_and_time_is_seen(tokenizer, source, tmp_path):
    before = os.stat(source.path)
    load_prompts(source, tokenizer, cache=tmp_path / "cache")
    text = Path(source.path).read_text()
    Path(source.path).write_text(text.replace('"answer": 4', '"answer": 7'))
    os.utime(source.path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert load_prompts(source, tokenizer, cache=tmp_path / "cache")[4].answer == "7"


def cut(path: Path) -> None:
    os.truncate(path / "prompts.arrow", 100)


def flip(path: Path) -> None:
    data = bytearray((path / "prompts.arrow").read_bytes())
    data[len(data) // 2] ^= 1
    (path / "prompts.arrow").write_bytes(data)


def lose(path: Path) -> None:
    (path / "prompts.arrow").unlink()


def garble(path: Path) -> None:
    (path / "meta.json").write_text('{"size": ')


@pytest.mark.parametrize("damage", [cut, flip, lose, garble])
def test_a_damaged_entry_is_made_again_and_that_is_said(tokenizer, source, tmp_path, damage, caplog):
    expected = list(load_prompts(source, tokenizer, cache=tmp_path / "cache"))
    damage(entries(tmp_path / "cache")[0])
    assert list(load_prompts(source, tokenizer, cache=tmp_path / "cache")) == expected
    assert "is damaged" in caplog.text
    caplog.clear()
    assert list(load_prompts(source, tokenizer, cache=tmp_path / "cache")) == expected
    assert caplog.text == ""


def test_what_a_killed_writer_left_is_replaced(tokenizer, source, tmp_path):
    load_prompts(source, tokenizer, cache=tmp_path / "cache")
    (entry,) = entries(tmp_path / "cache")
    entry.rename(entry.with_name(f".partial-{entry.name}"))
    assert len(load_prompts(source, tokenizer, cache=tmp_path / "cache")) == 20
    assert entries(tmp_path / "cache") == [entry]


def test_one_process_writes_while_the_others_wait_and_say_so(tokenizer, source, tmp_path, monkeypatch, caplog):
    """Threads: each opens the lock file by itself, as processes do."""
    calls, tokenized = [], prompts._tokenized

    def wait_for_the_other(*arguments):
        calls.append(arguments)
        while "waiting for the process that tokenizes it" not in caplog.text:
            time.sleep(0.01)
        return tokenized(*arguments)

    monkeypatch.setattr(prompts, "_tokenized", wait_for_the_other)
    monkeypatch.setattr(table, "_SAID_AFTER_S", 0.0)
    tables = {}
    threads = [
        threading.Thread(
            target=lambda i=i: tables.update({i: list(load_prompts(source, tokenizer, cache=tmp_path / "cache"))})
        )
        for i in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls) == 1
    assert len(tables[0]) == 20
    assert tables[0] == tables[1]


def test_a_folder_that_cannot_be_used_leaves_prompts_in_memory_and_says_why(tokenizer, source, tmp_path, caplog):
    (tmp_path / "file").write_text("")
    loaded = load_prompts(source, tokenizer, cache=tmp_path / "file")
    assert list(loaded) == list(load_prompts(source, tokenizer))
    assert "in its memory" in caplog.text
    assert "Not a directory" in caplog.text


def test_rows_that_json_does_not_hold_stay_in_memory(tokenizer, tmp_path, caplog):
    extra = [{"day": datetime.date(2026, 1, day)} for day in (1, 2)]
    table = pyarrow.table({"problem": ["^1=", "^2="], "answer": ["1", "2"], "extra_info": extra})
    pyarrow.parquet.write_table(table, tmp_path / "x.parquet")
    loaded = load_prompts(DataSourceConfig(path=str(tmp_path / "x.parquet")), tokenizer, cache=tmp_path / "cache")
    assert [prompt.extra for prompt in loaded] == extra
    assert "extra_info that JSON does not hold" in caplog.text
    assert entries(tmp_path / "cache") == []


def test_a_template_that_writes_the_date_is_not_kept(tokenizer, source, tmp_path, caplog):
    (tmp_path / "chat.jinja").write_text("{{ strftime_now('%Y') }}{{ messages[0].content }}")
    config = PromptConfig(chat_template=str(tmp_path / "chat.jinja"))
    load_prompts(source, tokenizer, config, cache=tmp_path / "cache")
    assert "writes today's date" in caplog.text
    assert not (tmp_path / "cache" / "prompts").exists()


def test_a_row_that_is_refused_is_named_and_nothing_is_kept(tokenizer, tmp_path):
    source = write_rows(tmp_path / "x.jsonl", [*ROWS, {"problem": "^1="}])
    with pytest.raises(InputError, match="line 21: column 'answer' must hold text or a number"):
        load_prompts(source, tokenizer, cache=tmp_path / "cache")
    assert entries(tmp_path / "cache") == []


def test_a_share_and_unrepeated_rows_are_the_same_from_a_file(tokenizer, source, tmp_path, built):
    def both(setting: str):
        data = DataConfig(train=[source], validation=[source], train_fraction=0.5, seed=3, cache=setting)
        return load_train(data, tokenizer), load_validation(data, ValidationConfig(), tokenizer)

    expected, written, mapped = both("none"), both(str(tmp_path / "cache")), both(str(tmp_path / "cache"))
    assert [len(loaded) for loaded in expected] == [10, 10]
    for loaded in (written, mapped):
        assert [list(part) for part in loaded] == [list(part) for part in expected]
        assert [(p.fingerprint, p.digest) for p in loaded] == [(p.fingerprint, p.digest) for p in expected]
    assert len(built) == 3
    kept = sorted(path.name for path in entries(tmp_path / "cache")[0].glob("chosen-*"))
    assert kept == ["chosen-0.5-3.json", "chosen-different.json"]


def test_where_entries_are(monkeypatch, tmp_path):
    monkeypatch.delenv("MEGATRON_RL_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert table.cache_folder("none") is None
    assert table.cache_folder("auto") == tmp_path / ".cache" / "megatron_rl"
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert table.cache_folder("auto") == Path("/x/megatron_rl")
    monkeypatch.setenv("MEGATRON_RL_CACHE", "/scratch")
    assert table.cache_folder("auto") == Path("/scratch")
    assert table.cache_folder("/mine") == Path("/mine")


def test_small_files_are_not_kept(tokenizer, source, tmp_path, monkeypatch):
    monkeypatch.setattr(prompts, "CACHED_BYTES", 1 << 20)
    load_prompts(source, tokenizer, cache=tmp_path / "cache")
    assert not (tmp_path / "cache").exists()
