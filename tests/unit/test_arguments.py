"""Arguments of all commands: numbers have bounds, options have one spelling, files to write are looked at first."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.__main__ import CommandParser, main, program_parser
from megatron_rl.arguments import FILES, GPU_NAMES, Number, output
from megatron_rl.commands import COMMANDS
from megatron_rl.instruments.plan import GPUS
from tests.support.tiny import REPOSITORY


def test_command_line_names_the_gpus():
    assert tuple(GPUS) == GPU_NAMES


RECIPE = REPOSITORY / "recipes/router_replay/grpo-qwen3-30b-a3b-4n8g-tp4ep8-r3.yaml"


def test_a_name_that_is_neither_a_gpu_nor_a_file(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["plan", str(RECIPE), "--gpu", "b300"])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert "'b300' is neither a GPU (choose from a100-40" in said
    assert "gb200-186" in said


def parsers(parser: CommandParser) -> Iterator[CommandParser]:
    """Every parser below ``parser``, whose arguments are loaded."""
    parser.load()
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for child in action.choices.values():
                yield from parsers(child)


PARSERS = {parser.prog: parser for parser in parsers(program_parser())}
ACTIONS = {f"{prog} {'/'.join(a.option_strings) or a.dest}": (p, a) for prog, p in PARSERS.items() for a in p._actions}
NUMBERS = {name: both for name, both in ACTIONS.items() if isinstance(both[1].type, Number)}
IMPOSSIBLE = ("-1", "-0.5", "nan", "inf", "-inf", "1e400", "1e12", "9" * 30, "", "x", "1.5.2")


def test_the_walk_meets_every_command():
    assert {f"megatron-rl {command}" for command in COMMANDS} <= PARSERS.keys()
    assert len(NUMBERS) > 40


def test_no_number_is_without_bounds():
    assert [name for name, (_, action) in ACTIONS.items() if action.type in (int, float)] == []


@pytest.mark.parametrize("name", NUMBERS)
def test_an_impossible_number_is_answered_with_option_value_and_bounds(name, capsys):
    parser, action = NUMBERS[name]
    option = action.option_strings[0]
    for text in (
        *IMPOSSIBLE,
        *(["0"] if not action.type.allows(0) else []),
        *(["2.5"] if action.type.kind is int else []),
    ):
        with pytest.raises(SystemExit) as ended:
            parser.parse_args([f"{option}={text}"])
        said = capsys.readouterr().err
        assert ended.value.code == 2
        assert all(part in said for part in (option, repr(text), str(action.type))), said
    for value in (0, 1, 1_000_000):
        if action.type.allows(value):
            assert parser._get_value(action, str(value)) == value


@given(st.sampled_from([int, float]), st.integers(-9, 9), st.integers(0, 9), st.booleans(), st.floats())
def test_a_number_is_taken_exactly_within_its_bounds(kind, least, width, above, value):
    number = Number(kind, least, least + width, above)
    text = repr(kind(value)) if math.isfinite(value) else repr(value)
    within = math.isfinite(value) and least <= kind(value) <= least + width and not (above and kind(value) == least)
    if within:
        assert number(text) == kind(value)
    else:
        with pytest.raises(argparse.ArgumentTypeError, match="is not"):
            number(text)


@pytest.mark.parametrize("prog", [prog for prog, parser in PARSERS.items() if not parser._subparsers])
def test_no_option_may_be_shortened_or_misspelled(prog, capsys):
    parser = PARSERS[prog]
    known = {option for option in parser._option_string_actions if option.startswith("--")}
    shorter = {option[:end] for option in known for end in range(3, len(option))} - known
    for typed in [*sorted(shorter), "--smokee", "-n"]:
        for words in ([typed, "1"], [f"{typed}=1"]):
            with pytest.raises(SystemExit) as ended:
                parser.parse_args(words)
            assert ended.value.code == 2
            assert f"no such option: {typed};" in capsys.readouterr().err


READ = {"lab power", "lab report"}  # --out is a folder of runs that are there


def test_what_is_written_is_looked_at_first():
    names = {"--out", "--output", "--page", "--json", "--report", "--figure", "--to", "--measure"}
    bare = [
        name
        for name, (_, action) in ACTIONS.items()
        if names & {*action.option_strings}
        and action.nargs != 0
        and not isinstance(action, argparse._AppendAction)
        and action.type not in (*FILES, output)
        and " ".join(name.split()[1:3]) not in READ
    ]
    assert bare == []


def test_places_that_cannot_be_written(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    for place, said in (
        (tmp_path, "is a folder; name a file"),
        (tmp_path / "file" / "x.jsonl", "is not a folder"),
        (f"{tmp_path}/new/", "is a folder; name a file"),
        ("", "is a folder; name a file"),
    ):
        with pytest.raises(SystemExit):
            main(["prepare-data", "none.jsonl", "--out", str(place)])
        assert said in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_command_that_fails_leaves_no_folder(tmp_path, capsys):
    assert main(["prepare-data", "none.jsonl", "--out", str(tmp_path / "a" / "b" / "out.jsonl")]) == 2
    assert "none.jsonl: no such file" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_the_folder_of_a_file_is_made(tmp_path, capsys):
    (tmp_path / "raw.jsonl").write_text('{"problem": "What is 2+3?", "answer": "5"}\n')
    out = tmp_path / "data" / "of" / "train.jsonl"
    assert main(["prepare-data", str(tmp_path / "raw.jsonl"), "--out", str(out)]) == 0
    assert Path(out).is_file()
