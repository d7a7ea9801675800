"""Files of problems: both layouts, both formats, and a clear message for each way a file can be wrong."""

import json
import tracemalloc
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from megatron_rl.config.data import DataConfig, DataSourceConfig, PromptConfig
from megatron_rl.data import check_source, files, read_problems
from megatron_rl.data.source import answer_text
from megatron_rl.errors import InputError

VERL_ROW = {
    "data_source": "math_dapo",
    "prompt": [{"role": "user", "content": "What is 1+1?"}],
    "ability": "MATH",
    "reward_model": {"ground_truth": "2", "style": "rule"},
    "extra_info": {"index": "a-b-c"},
}


def write(path: Path, rows: list) -> str:
    path.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows))
    return str(path)


def read(path: str | Path, **config):
    return list(read_problems(DataSourceConfig(path=str(path), **config)))


def test_the_plain_layout(tmp_path):
    path = write(
        tmp_path / "sums.jsonl",
        [{"id": 7, "problem": "1+1?", "answer": 2}, "\n", {"id": 9, "problem": "x", "answer": "y"}],
    )
    first, second = read(path)
    assert (first.id, first.question, first.answer, first.data_source) == ("sums:7", "1+1?", "2", "sums")
    assert second.where.endswith("line 3")  # the blank line counts, the row is skipped


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_verls_layout(tmp_path, kind):
    path = tmp_path / f"dapo.{kind}"
    if kind == "jsonl":
        write(path, [VERL_ROW] * 3)
    else:
        pq.write_table(pa.Table.from_pylist([VERL_ROW] * 3), path)
    problems = read(path, name="train")
    assert [problem.id for problem in problems] == ["train:0", "train:1", "train:2"]  # no `id` column: row numbers
    assert problems[0].question == VERL_ROW["prompt"]
    assert problems[0].answer == "2"
    assert problems[0].data_source == "math_dapo"
    assert problems[0].extra == {"index": "a-b-c"}


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_configured_columns_and_limit(tmp_path, kind):
    rows = [
        {"id": f"u{i}", "task": {"text": f"q{i}"}, "a.b": i / 2, "prompt": "other", "answer": "other"} for i in range(5)
    ]
    path = tmp_path / f"x.{kind}"
    write(path, rows) if kind == "jsonl" else pq.write_table(pa.Table.from_pylist(rows), path)
    problems = read(path, prompt_key="task.text", answer_key="a.b", limit=3)
    assert [(p.id, p.question, p.answer) for p in problems] == [
        ("x:u0", "q0", "0"),
        ("x:u1", "q1", "0.5"),
        ("x:u2", "q2", "1"),
    ]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (142.0, "142"),
        (0.5, "0.5"),
        (-3.0, "-3"),
        (7, "7"),
        (" x ", "x"),
        (["2"], "2"),
        (-0.0, "0"),
        (0.00001, "0.00001"),
        (6.3e-7, "0.00000063"),
        (1e16, "1" + "0" * 16),
        (1e300, "1" + "0" * 300),
        (2.5e-9, "0.0000000025"),
        (1234567.125, "1234567.125"),
        (-2.5e-7, "-0.00000025"),
        (Decimal("3.50"), "3.5"),
    ],
)
def test_gold_answers_that_are_not_text(value, text):
    assert answer_text(value) == text


@pytest.mark.parametrize("value", [None, True, "", "  ", float("nan"), float("inf"), [], ["1", "2"], {"a": 1}])
def test_what_is_no_answer(value):
    assert answer_text(value) is None


GOOD = {"id": 1, "problem": "q", "answer": "a"}
HALF = "column '{}' holds .* half of a UTF-16 pair"


@pytest.mark.parametrize(
    ("rows", "config", "message"),
    [
        ([], {}, "the dataset is empty"),
        (["\n\n"], {}, "the dataset is empty"),
        ([{"problme": "q", "answer": "a"}], {}, "no column for the prompt: .* found answer, problme; .* 'problme'"),
        ([GOOD], {"answer_key": "anwser"}, "expected 'anwser', found answer, id, problem; did you mean 'answer'"),
        ([{"prompt": "q", "reward_model": {"x": "a"}}], {}, "no column for the answer.*found prompt, reward_model.x"),
        ([GOOD, '{"id": 2, "problem": \n'], {}, "line 2: not a JSON object"),
        ([GOOD, "[1, 2]\n"], {}, "line 2: expected a JSON object"),
        ([GOOD, {"id": 2, "problem": "q"}], {}, "line 2: column 'answer' must hold text or a number, found None"),
        (
            [GOOD, GOOD | {"id": 2, "answer": True}],
            {},
            "line 2: column 'answer' must hold text or a number, found True",
        ),
        ([GOOD, GOOD | {"id": 2, "problem": " "}], {}, "line 2: column 'problem' must hold text or a list"),
        (
            [GOOD, GOOD | {"id": 2, "problem": [{"role": "user"}]}],
            {},
            "line 2: message 0 of column 'problem': role and content",
        ),
        ([GOOD, GOOD | {"id": 2}, GOOD], {}, "line 3: id '1' occurs twice, first in .*line 1"),
        # What Python does not read, half of a character, nulls, and rows that would mean something else.
        (
            ['{"problem": "x", "answer": 1, "id": ' + "9" * 4301 + "}\n"],
            {},
            "line 1: not a JSON object: Exceeds the limit",
        ),
        ([GOOD, {"id": 2, "problem": "a\ud800b", "answer": "1"}], {}, f"line 2: {HALF.format('problem')}"),
        ([GOOD, {"id": 2, "problem": "a", "answer": "\ud800"}], {}, f"line 2: {HALF.format('answer')}"),
        ([GOOD, {"id": "\ud83d", "problem": "a", "answer": "1"}], {}, f"line 2: {HALF.format('id')}"),
        ([GOOD, GOOD | {"id": 2, "data_source": "\ud83d"}], {}, f"line 2: {HALF.format('data_source')}"),
        ([{"prompt": [{"role": "user", "content": "\udfff"}], "answer": "1"}], {}, f"line 1: {HALF.format('prompt')}"),
        ([{"problem": "a", "answer": None}], {}, "column 'answer', taken for the answer, is null in the first row"),
        ([{"problem": "a", "reward_model": {"ground_truth": None}}], {}, "'reward_model.ground_truth', taken for"),
        (['{"problem": "q", "answer": "1", "answer": "2"}'], {}, "the key 'answer' occurs twice"),
        (['{"problem": "q", "answer": 12345678901234567890.0}'], {}, "a number that a file keeps only to 16 digits"),
        ([GOOD | {"extra_info": '{"a": 1}'}], {}, "'extra_info' must hold an object, found "),
        ([GOOD | {"data_source": ["a"]}], {}, r"'data_source' must hold text, found \['a'\]"),
        (
            [{"problem": [{"role": "user", "content": "q", "tool_calls": [1]}], "answer": "1"}],
            {},
            "message 0 of column 'problem' has 'tool_calls', which is not read",
        ),
        (['{"problem": "q", "answer": "1", "extra_info": ' + '{"a":' * 200 + "1" + "}" * 201], {}, "deeper than 100"),
        (['{"problem": "q", "answer": ' + "[" * 5000], {}, "line 1: not a JSON object"),
        ([GOOD | {"id": None}, GOOD], {}, "line 2: column 'id'"),
    ],
)
def test_a_wrong_file_is_refused_with_one_clear_message(tmp_path, rows, config, message):
    path = write(tmp_path / "data.jsonl", rows)
    with pytest.raises(InputError, match=message) as refused:
        read(path, **config)
    assert str(tmp_path / "data.jsonl") in str(refused.value)
    with pytest.raises(InputError, match=message):
        check_source(DataSourceConfig(path=path, **config))


def test_missing_and_unknown_files(tmp_path):
    write(tmp_path / "train.jsonl", [GOOD])
    with pytest.raises(InputError, match=r"no such file.*did you mean .*train\.jsonl"):
        read(tmp_path / "trian.jsonl")
    with pytest.raises(InputError, match=r"unknown kind of dataset '\.csv'; allowed is \.jsonl or \.parquet"):
        read(tmp_path / "train.csv")
    (tmp_path / "fake.parquet").write_text("not parquet")
    with pytest.raises(InputError, match="not a parquet file"):
        read(tmp_path / "fake.parquet")
    (tmp_path / "latin.jsonl").write_bytes(b'{"problem": "\xe9", "answer": "1"}\n')
    with pytest.raises(InputError, match="line 1: not a JSON object"):
        read(tmp_path / "latin.jsonl")


def test_a_parquet_file_without_the_column_lists_what_it_has(tmp_path):
    path = tmp_path / "x.parquet"
    pq.write_table(pa.table({"instruction": ["q"], "answer": ["a"], "level": [1]}), path)
    with pytest.raises(InputError, match=r"no column for the prompt.*found answer, instruction, level"):
        read(path)
    pq.write_table(pa.table({"problem": ["q"], "label": ["a"], "level": [1]}), path)
    with pytest.raises(InputError, match=r"no column for the answer.*label, level, problem"):
        read(path)
    pq.write_table(pa.table({"problem": pa.array([], pa.string()), "answer": pa.array([], pa.string())}), path)
    with pytest.raises(InputError, match="the dataset is empty"):
        read(path)


def test_checking_reads_only_the_beginning(tmp_path):
    path = write(tmp_path / "x.jsonl", [{"problem": "q", "answer": i} for i in range(500)] + ["broken\n"])
    columns = check_source(DataSourceConfig(path=path))
    assert (columns.prompt, columns.answer, columns.id) == ("problem", "answer", None)
    with pytest.raises(InputError, match="line 501"):
        read(path)


JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
KEYS = st.sampled_from(
    ["prompt", "problem", "answer", "reward_model", "id", "extra_info", "data_source", "question", "x"]
)
ROWS = st.lists(st.dictionaries(KEYS, JSON, max_size=6) | JSON, max_size=5)


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(rows=ROWS, tail=st.binary(max_size=12))
def test_any_file_is_read_or_refused(tmp_path, rows, tail):
    path = tmp_path / "fuzz.jsonl"
    path.write_bytes(b"".join(json.dumps(row).encode() + b"\n" for row in rows) + tail)
    try:
        problems = read(path)
    except InputError as error:
        assert str(path) in str(error)  # noqa: PT017  either outcome is right, each with its own claim
    else:
        assert problems
        assert len({problem.id for problem in problems}) == len(problems)
        assert all(problem.answer and problem.question for problem in problems)


def test_the_section_takes_a_bare_path_and_refuses_what_cannot_be():
    config = DataConfig.model_validate(
        {"train": "a.jsonl", "validation": ["b.jsonl", {"path": "c.parquet", "limit": 5}]}
    )
    assert [source.path for source in config.train + config.validation] == ["a.jsonl", "b.jsonl", "c.parquet"]
    for section, message in [
        ({"train": []}, "at least 1 item"),
        ({"train": "a.jsonl", "prompt": {"template": "no place"}}, r"\{problem\} exactly once"),
        ({"train": "a.jsonl", "prompt": {"system": "s", "chat_template": "none"}}, "needs a chat template"),
        ({"train": "a.jsonl", "prompt": {"overlong": "truncate"}}, "overlong"),
        ({"train": {"path": "a.jsonl", "answr_key": "x"}}, "answr_key"),
        ({"train": "a.jsonl", "shufle": True}, "shufle"),
    ]:
        with pytest.raises(ValidationError, match=message):
            DataConfig.model_validate(section)
    assert PromptConfig().overlong == "error"


def test_a_parquet_file_with_damaged_pages(tmp_path):
    path, names = tmp_path / "x.parquet", [f"problem {number}" for number in range(3000)]
    pq.write_table(pa.table({"problem": names, "answer": names}), path, row_group_size=1000, compression="snappy")
    content = path.read_bytes()
    start = pq.ParquetFile(path).metadata.row_group(1).column(0).dictionary_page_offset
    path.write_bytes(content[:start] + b"\xff" * 2000 + content[start + 2000 :])
    with pytest.raises(InputError, match=r"x\.parquet: cannot be read after row \d+: .*; write or copy it again"):
        read(path)


def test_a_path_with_a_nul():
    with pytest.raises(InputError, match="cannot hold a NUL"):
        read("a\0b.jsonl")


def test_a_parquet_file_keeps_the_digits_of_narrow_numbers(tmp_path):
    path, numbers = tmp_path / "x.parquet", pa.array([0.1, 2.5, None], pa.float32())
    pq.write_table(pa.table({"problem": ["a", "b"], "answer": numbers[:2]}), path)
    assert [problem.answer for problem in read(path)] == ["0.1", "2.5"]
    nested = pa.StructArray.from_arrays([numbers[:2]], names=["ground_truth"])
    pq.write_table(pa.table({"problem": ["a", "b"], "reward_model": nested}), path)
    assert [problem.answer for problem in read(path)] == ["0.1", "2.5"]


ODD_COLUMNS = {
    "stamps past 9999": pa.array([2**62] * 2, pa.timestamp("us")),
    "an unknown zone": pa.array([0] * 2, pa.timestamp("us", tz="Mars/Base")),
    "days past 9999": pa.array([2**30] * 2, pa.int32()).cast(pa.date32()),
}


@pytest.mark.parametrize("column", ODD_COLUMNS.values(), ids=ODD_COLUMNS)
def test_a_column_that_python_cannot_hold_counts_only_where_it_is_read(tmp_path, column):
    path, good = tmp_path / "x.parquet", pa.array(["1", "2"])
    pq.write_table(pa.table({"problem": good, "answer": good, "created_at": column}), path)
    assert len(read(path)) == 2
    rewards = pa.StructArray.from_arrays([good, column], names=["ground_truth", "created_at"])
    pq.write_table(pa.table({"problem": good, "reward_model": rewards}), path)
    assert [problem.answer for problem in read(path)] == ["1", "2"]
    pq.write_table(pa.table({"problem": good, "answer": column}), path)
    with pytest.raises(InputError, match=r"x\.parquet.*answer"):
        read(path)


def test_text_that_a_small_file_repeats_is_not_unpacked(tmp_path, monkeypatch):
    """1,000 rows of one text of 100 kB are 100 MB; the file takes a thousandth."""
    monkeypatch.setattr(files, "MAX_ROW_BYTES", 1 << 20)
    path, text = tmp_path / "x.parquet", "x" * 100_000
    chat = [[{"role": "user", "content": text}]]
    pq.write_table(pa.table({"prompt": chat * 1000, "answer": ["1"] * 1000}), path, compression="zstd")
    assert path.stat().st_size < 100_000
    seen = read_problems(DataSourceConfig(path=str(path)))
    tracemalloc.start()
    assert sum(len(problem.question[0]["content"]) for problem in seen) == 1000 * len(text)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 20 * len(text)  # Python's objects: rows are read one by one
    monkeypatch.setattr(files, "MAX_ROW_BYTES", 99_999)
    with pytest.raises(InputError, match=r"x\.parquet, row 0: 0 MiB; at most 0 are allowed"):
        read(path)
    monkeypatch.setattr(files, "_MAX_CHUNK_BYTES", 1000)
    with pytest.raises(InputError, match="not plausible for text"):
        read(path)


def test_a_line_is_read_up_to_a_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "MAX_ROW_BYTES", 50)
    path = write(tmp_path / "x.jsonl", [{"problem": "q", "answer": "a"}, {"problem": "q" * 60, "answer": "a"}])
    with pytest.raises(InputError, match="line 2: longer than 0 MiB"):
        read(path)


def test_names_of_columns_are_shown_on_one_line_of_some_length(tmp_path):
    names = ["\x1b]0;title\x07", "x" * 10_000, *map(str, range(500))]
    with pytest.raises(InputError) as refused:
        read(write(tmp_path / "x.jsonl", [dict.fromkeys(names, 1)]))
    assert len(str(refused.value)) < 5000
    assert "\x1b" not in str(refused.value)
    path = tmp_path / "x.parquet"
    pq.write_table(pa.table({name: ["1"] for name in names}), path)
    with pytest.raises(InputError, match=r"no column for the prompt.* and 45\d more") as refused:
        read(path)
    assert "\x1b" not in str(refused.value)
