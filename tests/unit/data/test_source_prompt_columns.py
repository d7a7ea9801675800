"""What belongs to the prompt is read, or refused by name: chats in any form, system texts, tools, pictures."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_rl.config.data import DataSourceConfig
from megatron_rl.data import check_source, read_problems
from megatron_rl.errors import InputError

SAME_FOLDER = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60)
MESSAGES = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["system", "user", "assistant"]), "content": st.text()}), min_size=1
)
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"a": {"type": "number"}}}}]


def read(path, rows: list) -> list:
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return list(read_problems(DataSourceConfig(path=str(path))))


@SAME_FOLDER
@given(MESSAGES, st.booleans(), st.sampled_from([None, 1]), st.sampled_from(["list", "object"]))
def test_messages_as_json_text_are_the_messages(tmp_path, messages, ascii_only, indent, form):
    value = messages if form == "list" else {"messages": messages}
    text = json.dumps(value, ensure_ascii=ascii_only, indent=indent)
    plain, written = read(tmp_path / "x.jsonl", [{"prompt": p, "answer": "1"} for p in (messages, text)])
    assert written.question == plain.question == messages


@SAME_FOLDER
@given(st.text(min_size=1).filter(str.strip) | st.lists(st.integers() | st.text()).map(json.dumps))
def test_any_other_text_is_the_question(tmp_path, text):
    (problem,) = read(tmp_path / "x.jsonl", [{"prompt": text, "answer": "1"}])
    assert problem.question == text


@SAME_FOLDER
@given(MESSAGES, st.data())
def test_text_in_parts_is_joined(tmp_path, messages, data):
    parts = []
    for message in messages:
        cut = data.draw(st.integers(0, len(message["content"])))
        texts = [message["content"][:cut], message["content"][cut:]]
        parts.append(message | {"content": [{"type": "text", "text": text} for text in texts]})
    (problem,) = read(tmp_path / "x.jsonl", [{"prompt": parts, "answer": "1"}])
    assert problem.question == messages


ROW = {"prompt": "2+3?", "answer": "5"}
CHAT = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "2+3?"}]


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
@pytest.mark.parametrize("tools", [TOOLS, json.dumps(TOOLS)], ids=["list", "text"])
def test_system_and_tools_of_a_row(tmp_path, kind, tools):
    # The second row has no tools, and another key beside it, which parquet fills in with null.
    rows = [ROW | {"system": "be brief", "tools": tools}, ROW | {"system": "", "tools": type(tools)()}]
    first, second = read(tmp_path / f"x.{kind}", rows)
    assert (first.question, first.tools) == (CHAT, TOOLS)
    assert (second.question, second.tools) == ("2+3?", None)


def test_null_keys_that_parquet_fills_in_are_no_part_of_a_tool(tmp_path):
    tools = [[{"name": "add", "a": {"type": "number"}}], [{"name": "see", "b": {"type": "text"}}]]
    problems = read(tmp_path / "x.parquet", [ROW | {"tools": one} for one in tools])
    assert [problem.tools for problem in problems] == tools


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"images": ["a.png"]}, "column 'images' is not read: the model sees text alone"),
        ({"image": {"bytes": "x"}}, "column 'image' is not read"),
        ({"videos": "a.mp4"}, "column 'videos' is not read"),
        ({"audio": [1.0]}, "column 'audio' is not read"),
        ({"system": ["x"]}, r"column 'system' must hold text, found \['x'\]"),
        ({"system": "x", "prompt": CHAT}, "the chat begins with a system message"),
        ({"tools": "calculator"}, "column 'tools' is text and not JSON"),
        ({"tools": ["calculator"]}, "column 'tools' must hold a list of objects"),
        ({"tools": {"name": "x"}}, "column 'tools' must hold a list of objects"),
        ({"prompt": "[{'role': 'user', 'content': 'x'}]"}, "looks like chat messages as JSON text and is none"),
        ({"prompt": '[{"role": "user", "content": "cut'}, "looks like chat messages as JSON text and is none"),
        ({"prompt": [{"role": "user", "content": [{"type": "image"}]}]}, "a part of type 'image', which is not read"),
        ({"prompt": [{"role": "user", "content": ["x"]}]}, "a part of type 'x', which is not read"),
        (
            {"prompt": [{"role": "assistant", "content": None, "tool_calls": [1]}]},
            "has 'tool_calls', which is not read",
        ),
        ({"prompt": [{"role": "user", "content": None}]}, "role and content must be text"),
    ],
)
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_what_the_prompt_would_lack_is_refused_by_name(tmp_path, kind, change, message):
    with pytest.raises(InputError, match=message):
        read(tmp_path / f"x.{kind}", [ROW | change])


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_columns_that_are_not_used_are_named(tmp_path, kind):
    verl = {"data_source": "m", "prompt": CHAT, "ability": "MATH", "extra_info": {"index": 1}}
    rows = [verl | {"reward_model": {"style": "rule", "ground_truth": "5"}, "images": None}]
    read(tmp_path / f"x.{kind}", rows)
    unused = check_source(DataSourceConfig(path=str(tmp_path / f"x.{kind}"))).unused
    assert set(unused) == {"ability", "reward_model.style", "images"}


def test_pictures_that_no_row_has(tmp_path):
    nothing = pa.array([[], None, []], pa.list_(pa.struct([("bytes", pa.binary()), ("path", pa.string())])))
    rows = {"prompt": ["1=", "2=", "3="], "answer": ["1", "2", "3"], "images": nothing}
    pq.write_table(pa.table(rows), tmp_path / "x.parquet")
    assert len(list(read_problems(DataSourceConfig(path=str(tmp_path / "x.parquet"))))) == 3
