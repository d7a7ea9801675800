"""A `PromptSet` is the list of its prompts."""

import datetime
import json
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.config.data import DataConfig, DataSourceConfig
from megatron_rl.config.sections import ValidationConfig
from megatron_rl.data import PromptSet, load_prompts, load_tokenizer, load_train, load_validation, table
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
    chosen = whole.choose(np.array(rows, dtype=np.int64))
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


def write_rows(path: Path, rows: list[dict]) -> DataSourceConfig:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return DataSourceConfig(path=str(path))


def test_rows_that_json_does_not_hold_are_kept(tmp_path):
    extra = [{"day": datetime.date(2026, 1, day)} for day in (1, 2)]
    table = pyarrow.table({"problem": ["^1=", "^2="], "answer": ["1", "2"], "extra_info": extra})
    pyarrow.parquet.write_table(table, tmp_path / "x.parquet")
    loaded = load_prompts(DataSourceConfig(path=str(tmp_path / "x.parquet")), load_tokenizer(str(TINY)))
    assert [prompt.extra for prompt in loaded] == extra


def test_a_share_and_unrepeated_rows(tmp_path):
    source, tokenizer = write_rows(tmp_path / "x.jsonl", ROWS), load_tokenizer(str(TINY))
    data = DataConfig(train=[source], validation=[source], train_fraction=0.5, seed=3)
    train, validation = load_train(data, tokenizer), load_validation(data, ValidationConfig(), tokenizer)
    everything = {prompt.id: prompt for prompt in load_prompts(source, tokenizer)}
    assert (len(train), len(validation)) == (10, 10)
    assert [everything[prompt.id] for prompt in train] == list(train)
    assert [prompt.id for prompt in validation] == list(everything)[:10]
