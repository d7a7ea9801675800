"""The command line as a user types it: commands and their help, old names of programs, a pipe that is closed early."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_rl import __version__
from megatron_rl.__main__ import main
from megatron_rl.commands import COMMANDS
from tests.support.patience import PATIENCE_S

REPOSITORY = Path(__file__).resolve().parents[3]
OLD_PROGRAMS = {
    "attribute_mismatch": "attribute",
    "convert_checkpoint": "convert",
    "explain_schedule": "explain-schedule",
    "lab": "lab",
    "make_sanity_set": "sanity-set",
    "mismatch_report": "mismatch",
    "patches": "patch",
    "plot_runs": "plot",
    "prepare_data": "prepare-data",
    "replay_batch": "replay",
    "sanity_verdict": "sanity-verdict",
    "score_alarms": "score-alarms",
    "softmax_study": "softmax-study",
}


def python(*arguments: str, cwd: Path = REPOSITORY, path: str | None = str(REPOSITORY)) -> subprocess.CompletedProcess:
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    environment |= {"PYTHONPATH": path} if path else {}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=PATIENCE_S)


ALL_COMMANDS = """
import argparse, contextlib, importlib, io, json
from megatron_rl.__main__ import main
from megatron_rl.commands import COMMANDS

def without_help(parser):
    for action in parser._actions:
        if action.help is None and not isinstance(action, argparse._SubParsersAction):
            yield f"{parser.prog} {action.dest}"
        for below in action.choices.values() if isinstance(action, argparse._SubParsersAction) else ():
            yield from without_help(below)

helps, silent = {}, []
for name in COMMANDS:
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.suppress(SystemExit):
        main([name, "--help"])
    helps[name] = out.getvalue()
    parser = argparse.ArgumentParser(prog=name)
    importlib.import_module("megatron_rl.commands." + name.replace("-", "_")).add_arguments(parser)
    silent += without_help(parser)
print(json.dumps([helps, silent]))
"""


@pytest.fixture(scope="module")
def told() -> tuple[dict[str, str], list[str]]:
    """What each command says to --help, and the arguments that have no line of their own there."""
    done = python("-c", ALL_COMMANDS)
    assert done.returncode == 0, done.stderr
    return tuple(json.loads(done.stdout))


@pytest.fixture
def helps(told) -> dict[str, str]:
    return told[0]


def test_every_argument_has_a_help(told):
    assert told[1] == []


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_a_command_is_its_modules_docstring(helps, name):
    module = importlib.util.find_spec(f"megatron_rl.commands.{name.replace('-', '_')}")
    docstring = ast.get_docstring(ast.parse(Path(module.origin).read_text()))
    assert f"megatron-rl {name} " in docstring
    assert docstring in helps[name]
    assert "``" not in helps[name]


def test_every_module_with_arguments_is_a_command():
    folder = REPOSITORY / "megatron_rl" / "commands"
    found = {path.stem.replace("_", "-") for path in folder.glob("*.py") if "def add_arguments(" in path.read_text()}
    assert found == set(COMMANDS)


def test_the_list_of_commands_imports_none_of_them():
    program = (
        "import contextlib, io, sys\n"
        "from megatron_rl.__main__ import main\n"
        "with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.suppress(SystemExit):\n"
        "    main(['--help'])\n"
        "ours = {name for name in sys.modules if name.startswith('megatron_rl')}\n"
        "print(sorted(ours), sorted({'pydantic', 'yaml', 'numpy', 'torch'} & set(sys.modules)))\n"
        "print(out.getvalue())"
    )
    done = python("-c", program)
    imported, _, told = done.stdout.partition("\n")
    assert imported == "['megatron_rl', 'megatron_rl.__main__', 'megatron_rl.commands', 'megatron_rl.errors'] []"
    for name in COMMANDS:
        assert re.search(rf"^    {name}\s", told, re.MULTILINE)


def test_version_and_unknown_commands(capsys):
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert (end.value.code, capsys.readouterr().out) == (0, f"megatron-rl {__version__}\n")
    with pytest.raises(SystemExit) as end:
        main(["trian"])
    assert end.value.code == 2
    assert "'train', 'check'" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["schema"], ["--help"], ["check", "--help"]])
def test_a_reader_that_leaves_early_is_no_fault(arguments):
    """As in `megatron-rl schema | head`; the status is that of other programs which SIGPIPE ends."""
    command = [sys.executable, "-m", "megatron_rl", *arguments]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"}
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, cwd=REPOSITORY, env=environment, stdout=pipe, stderr=pipe, text=True)
    process.stdout.close()
    assert process.stderr.read() == ""
    assert process.wait(timeout=PATIENCE_S) == 128 + 13


def test_a_pipe_that_breaks_elsewhere_is_a_fault(monkeypatch):
    def run(options):
        raise BrokenPipeError("a worker's")

    monkeypatch.setattr("megatron_rl.commands.schema.run", run)
    with pytest.raises(BrokenPipeError):
        main(["schema"])


@pytest.mark.parametrize("old", OLD_PROGRAMS)
def test_every_old_program_names_its_command(old):
    text = (REPOSITORY / "tools" / f"{old}.py").read_text()
    assert text.splitlines()[-3:] == ["import _moved", "", f'_moved.start("{OLD_PROGRAMS[old]}")']


@pytest.mark.parametrize("old", ["patches", "lab"])
def test_an_old_program_starts_its_command_from_anywhere_without_an_installed_package(tmp_path, helps, old):
    done = python(str(REPOSITORY / "tools" / f"{old}.py"), "--help", cwd=tmp_path, path=None)
    assert done.returncode == 0, done.stderr
    assert done.stdout == helps[OLD_PROGRAMS[old]]
    assert done.stderr == f"note: tools/{old}.py is an old name of `megatron-rl {OLD_PROGRAMS[old]}`\n"


def test_old_programs_hand_over_arguments_and_status(tmp_path):
    done = python(str(REPOSITORY / "tools" / "patches.py"), "status", "no such series", cwd=tmp_path, path=None)
    assert done.returncode == 2
    assert "error: no such upstream: no such series; there are: megatron-core-0.16" in done.stderr


def test_tools_and_tests_need_no_search_path_of_their_own():
    """`python -m tools.…` from the root of the repository; imports stand at the top of every file."""
    files = [path for folder in ("tools", "tests", "megatron_rl") for path in (REPOSITORY / folder).rglob("*.py")]
    assert files
    for path in files:
        text = path.read_text()
        assert "noqa: " + "E402" not in text, path
        if path.relative_to(REPOSITORY).parts[0] != "megatron_rl":
            assert "sys.path." + "insert" not in text, path
