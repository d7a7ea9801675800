"""Files of a run folder that something else wrote: passed over or refused in a sentence, never followed."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.config.sections import RecorderConfig
from megatron_rl.errors import InputError
from megatron_rl.monitor.run_directory import JsonlSink, RunDirectory, append_whole, drop_from
from megatron_rl.monitor.samples import SampleFile
from megatron_rl.process.host import write_whole
from megatron_rl.process.run_files import check_kinds, read_json, settled
from megatron_rl.run.recorded_batches import recorded_steps
from megatron_rl.run.saving import Evidence, Rollbacks

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
STATE = {"step": 1, "names": ["a"], "parts": [{"file": "x"}], "deep": {"rate": 0.5, "text": "t"}}


def used(state: dict) -> tuple:
    """What code does with a state that it trusts."""
    deep = state["deep"]
    return state["step"] + 1, *state["names"], *(part["file"] for part in state["parts"]), deep["rate"], deep["text"]


@given(st.dictionaries(st.sampled_from([*STATE]), values).map(lambda other: STATE | other))
def test_any_state_is_used_or_refused_with_file_and_key(state):
    try:
        settled(Path("trainer.json"), {"monitor": state}, "monitor", used, STATE)
    except InputError as error:
        assert str(error).startswith("trainer.json: monitor")  # noqa: PT017


@pytest.mark.parametrize("found", [STATE, STATE | {"more": []}, {}, STATE | {"step": None}, STATE | {"step": "NaN"}])
def test_what_a_run_may_write(found):
    check_kinds(found, STATE, "file")


def test_the_key_is_named_down_to_the_value():
    with pytest.raises(InputError, match=r"f: 'deep': 'rate': \[1\] is a list, a run writes a number there"):
        check_kinds(STATE | {"deep": {"rate": [1]}}, STATE, "f")
    with pytest.raises(InputError, match=r"trainer\.json: monitor: missing"):
        settled(Path("trainer.json"), {}, "monitor", used, STATE)


@given(st.binary(max_size=40))
def test_any_bytes_are_json_or_refused(tmp_path_factory, data):
    file = tmp_path_factory.mktemp("files") / "rollbacks.json"
    file.write_bytes(data)
    try:
        read_json(file)
    except InputError as error:
        assert str(file) in str(error)  # noqa: PT017


class Saving:
    pinned = None

    def pin(self, before: int) -> None:
        return None


STRAYS = {
    "step_00000001 (copy).json": "{}",
    "step_1.json": "{}",
    "step_.json": "",
    "step_00000000.json": '{"kept": fal',
    "step_00000001.json": "[]",
    "step_00000002.json": '{"kept": "yes", "parts": 3}',
    "step_00000003.json": '{"kept": false, "parts": [{"file": "../../other"}]}',
    "step_00000004.json": '{"kept": false, "parts": [{"file": "step_00000009.safetensors"}]}',
}


def test_strays_among_batches_do_no_harm(tmp_path):
    said: list[str] = []
    folder = tmp_path / "run" / "batches"
    folder.mkdir(parents=True)
    other, newer = tmp_path / "other", folder / "step_00000009.safetensors"
    for step in range(9):
        (folder / f"step_{step:08d}.json").write_text(json.dumps({"kept": False, "parts": []}))
    for name, text in STRAYS.items():
        (folder / name).write_text(text)
    other.write_text("precious")
    newer.write_text("newer")
    evidence = Evidence(RecorderConfig(evidence={"batches": 2}), folder, Saving(), said.append)
    for _ in range(2):
        evidence.after_step(8, [])
    assert recorded_steps(folder) == [0, 1, 2, 3, 4, 7, 8]
    assert (other.read_text(), newer.read_text()) == ("precious", "newer")
    assert len(said) == 5, said
    assert all("it stays" in line for line in said)


FILES = ("metrics.jsonl", "samples.jsonl", "log.txt", "rollbacks.json", "environment.json", "recipe.resolved.yaml")


@pytest.mark.parametrize("target", ["file", "nothing"])
@pytest.mark.parametrize("name", FILES)
def test_a_link_in_place_of_a_file_is_refused_at_the_start(name, target, tmp_path):
    directory = RunDirectory(tmp_path / "run").create()
    precious = tmp_path / "precious"
    if target == "file":
        precious.write_text("precious")
    (directory.root / name).symlink_to(precious)
    with pytest.raises(InputError, match=f"{name}.*link"):
        directory.check()
    assert not precious.exists() or precious.read_text() == "precious"


WRITERS = {
    "append": lambda path: append_whole(path, b"x\n"),
    "drop": lambda path: drop_from(path, 0),
    "metrics": lambda path: JsonlSink(path).write(1, {"a": 1.0}),
    "resume": lambda path: JsonlSink(path).resume_at(0),
    "samples": lambda path: SampleFile(path, 1.0).resume_at(0),
    "whole": lambda path: write_whole(path, "x"),
    "rollbacks": lambda path: Rollbacks(path, 3).add(["a"], 2, 1),
}


@pytest.mark.parametrize("content", ['{"step": 1}\n', "[]", "precious\nlines\n"])
@pytest.mark.parametrize("writer", WRITERS)
def test_no_writer_changes_what_a_link_leads_to(writer, content, tmp_path):
    precious, path = tmp_path / "precious", tmp_path / "metrics.jsonl"
    precious.write_text(content)
    path.symlink_to(precious)
    for partial in (f".partial-{path.name}", f".partial-{path.name}.{os.getpid()}"):
        (tmp_path / partial).symlink_to(precious)
    with contextlib.suppress(OSError, InputError):
        WRITERS[writer](path)
    assert precious.read_text() == content


def test_a_file_without_any_record_is_not_emptied(tmp_path):
    file = tmp_path / "metrics.jsonl"
    file.write_text("a diary\nof another\n")
    with pytest.raises(InputError, match="none of its 2 lines is a record"):
        drop_from(file, 0)
    assert file.read_text() == "a diary\nof another\n"
    file.write_text('{"step": 0}\n{"step": 1}\n{"ste')
    drop_from(file, 1)
    assert file.read_text() == '{"step": 0}\n'
