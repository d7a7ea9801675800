"""The command line as a user types it: commands and their help, old names of programs, a pipe that is closed early."""

from __future__ import annotations

import ast
import contextlib
import json
import os
import re
import subprocess
import sys
import warnings
from importlib.util import find_spec
from pathlib import Path

import pytest

from megatron_rl import __version__
from megatron_rl.__main__ import CommandParser, main
from megatron_rl.checkpoint.save import SaveError
from megatron_rl.commands import COMMANDS, GROUPS, full_name, function_name, module_of
from megatron_rl.errors import OwnWarning
from megatron_rl.monitor.monitor import LostSteps
from megatron_rl.rollout import RolloutError
from tests.support.patience import PATIENCE_S

REPOSITORY = Path(__file__).resolve().parents[2]
OLD_PROGRAMS = {"patches": "patch", "replay_batch": "batch replay"}


def python(*arguments: str, cwd: Path = REPOSITORY, path: str | None = str(REPOSITORY)) -> subprocess.CompletedProcess:
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    environment |= {"PYTHONPATH": path} if path else {}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=PATIENCE_S)


ALL_COMMANDS = """
import argparse, contextlib, importlib, io, json
from megatron_rl.__main__ import main
from megatron_rl.commands import COMMANDS, function_name, module_of

def is_sentence(text):
    return text == argparse.SUPPRESS or bool(text) and text[0].isupper() and text.endswith(".")

def without_help(parser):
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            yield from (listed.dest for listed in action._choices_actions if not is_sentence(listed.help))
            for below in action.choices.values():
                yield from without_help(below)
        elif not isinstance(action, argparse._HelpAction) and not is_sentence(action.help):
            yield f"{parser.prog} {action.dest}"

helps, silent = {}, []
for name in COMMANDS:
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.suppress(SystemExit):
        main([*name.split(), "--help"])
    helps[name] = out.getvalue()
    parser = argparse.ArgumentParser(prog=name)
    getattr(importlib.import_module(module_of(name)), f"add_{function_name(name)}")(parser)
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


def test_the_help_of_every_argument_is_a_sentence(told):
    assert told[1] == []


@pytest.mark.parametrize("name", COMMANDS)
def test_help_says_first_what_the_command_does(helps, name):
    """A verb, as in the list of commands: "Measure …"."""
    told = helps[name].partition("\n\n")[2]
    assert told.split()[0] in {text.split()[0] for text in COMMANDS.values()}


def functions(file: Path) -> list[ast.FunctionDef]:
    """Functions that a module defines."""
    return [node for node in ast.parse(file.read_text()).body if isinstance(node, ast.FunctionDef)]


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_a_command_is_its_docstring(helps, name):
    module = find_spec(module_of(name))
    defined = {node.name: node for node in functions(Path(module.origin))}
    docstring = ast.get_docstring(defined[f"run_{function_name(name)}"])
    assert f"megatron-rl {name} " in docstring
    assert docstring in helps[name]
    assert "``" not in helps[name]


def test_every_function_that_runs_a_command_is_a_command():
    """A module with a function `add_NAME` for the arguments has the function `run_NAME` of that command."""
    defined = {path: {node.name for node in functions(path)} for path in (REPOSITORY / "megatron_rl").rglob("*.py")}
    found = {
        (path, name.removeprefix("add_"))
        for path, names in defined.items()
        for name in names
        if name.startswith("add_") and name.replace("add_", "run_", 1) in names
    }
    assert found == {(Path(find_spec(module_of(name)).origin), function_name(name)) for name in COMMANDS}


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
    ours = ["", ".__main__", ".arguments", ".commands", ".errors", ".process", ".process.fp32_products"]
    assert imported == f"{['megatron_rl' + name for name in ours]} []"
    listed = re.findall(r"^    ([a-z][\w-]*)", told, re.MULTILINE)
    assert listed == [*(name for name in COMMANDS if " " not in name), *GROUPS]


def test_version_and_unknown_commands(capsys):
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert (end.value.code, capsys.readouterr().out) == (0, f"megatron-rl {__version__}\n")
    with pytest.raises(SystemExit) as end:
        main(["trian"])
    assert end.value.code == 2
    assert "no such command: 'trian'; did you mean 'train'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("repaly", "did you mean 'batch replay'"),
        ("batch plot", "megatron-rl batch: error: no such command: 'plot'; did you mean 'run plot'?"),
        ("convert to-hff", "did you mean 'convert to-hf'? `megatron-rl convert --help` lists them"),
        ("zzz", "megatron-rl: error: no such command: 'zzz'; `megatron-rl --help` lists them"),
    ],
)
def test_an_unknown_command_is_told_the_nearest(typed, message, capsys):
    with pytest.raises(SystemExit) as end:
        main(typed.split())
    assert end.value.code == 2
    assert message in capsys.readouterr().err


FLAT = """
train check doctor plan eval serve servers schema watch samples plot replay attribute
gradient-bias mismatch explain-schedule score-alarms convert prepare-data lab sanity-set sanity-verdict
patch
"""
NEW = {
    "run why",
    "run branch",
    "parity",
    "recipe from-verl",
    "recipe from-slime",
    "recipe from-nemo-rl",
}


def test_every_command_from_before_there_were_groups_still_starts(capsys, monkeypatch):
    """`megatron-rl replay …` is `megatron-rl batch replay …`, and nothing is said of it."""
    assert {full_name(name) for name in FLAT.split()} == set(COMMANDS) - NEW
    with monkeypatch.context() as patched:
        patched.setattr("megatron_rl.commands.recipe.run_schema", lambda options: 7)
        assert [main(["schema"]), main(["recipe", "schema"])] == [7, 7]
    assert capsys.readouterr() == ("", "")
    for name in FLAT.split():
        with pytest.raises(SystemExit) as end:
            main([name, "--help"])
        assert end.value.code == 0, name
        assert f"megatron-rl {full_name(name)} " in capsys.readouterr().out


COMPLETIONS = """
eval "$(megatron-rl() { %s -m megatron_rl "$@"; }; megatron-rl --print-completion bash)"
asked() { COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _shtab_megatron_rl; echo "${COMPREPLY[@]}"; }
asked megatron-rl ''
asked megatron-rl batch re
asked megatron-rl plan recipes/tiny/grpo.yaml --gpu h1
"""


def test_bash_completes_commands_groups_and_values():
    done = subprocess.run(
        ["bash", "-c", COMPLETIONS % sys.executable], cwd=REPOSITORY, capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.stderr == ""
    commands, batch, gpu = done.stdout.splitlines()
    assert commands.split() == [*(name for name in COMMANDS if " " not in name), *GROUPS]
    assert (batch, gpu) == ("replay", "h100-80")


def test_completion_for_zsh_is_a_script_of_its_own_with_what_commands_do(capsys):
    with pytest.raises(SystemExit) as end:
        main(["--print-completion", "zsh"])
    out = capsys.readouterr().out
    assert end.value.code == 0
    assert out.startswith("#compdef megatron-rl\n")
    assert COMMANDS["batch replay"] in out


def test_completion_without_the_engines_has_the_commands_that_work_without(monkeypatch, capsys):
    load = CommandParser.load

    def fails(parser):
        if parser.prog == "megatron-rl train":
            raise ModuleNotFoundError("No module named 'torch'", name="torch")
        load(parser)

    monkeypatch.setattr(CommandParser, "load", fails)
    with pytest.raises(SystemExit) as end:
        main(["--print-completion", "bash"])
    assert end.value.code == 0
    script = capsys.readouterr().out
    assert "_shtab_megatron_rl_plan_option_strings" in script
    assert "--resume" not in script.partition("_shtab_megatron_rl_train_option_strings=")[2].partition("\n")[0]


def test_completion_without_shtab_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert main(["--print-completion", "bash"]) == 2
    assert (
        capsys.readouterr().err == "error: --print-completion needs the package shtab; install it: pip install shtab\n"
    )


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

    monkeypatch.setattr("megatron_rl.commands.recipe.run_schema", run)
    with pytest.raises(BrokenPipeError):
        main(["schema"])


@pytest.mark.parametrize(
    ("fault", "cause", "is_traced"),
    [
        (SaveError, OSError(28, "No space left on device"), False),
        (SaveError, KeyError("a tensor's name"), True),
        (LostSteps, None, False),
        (RolloutError, OSError(28, "No space left on device"), True),
    ],
)
def test_a_fault_is_traced_unless_its_message_says_all(fault, cause, is_traced, monkeypatch, capsys):
    def run(options):
        raise fault("it broke") from cause

    monkeypatch.setattr("megatron_rl.commands.recipe.run_schema", run)
    assert main(["schema"]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1] == "run failed: it broke"
    assert (len(lines) > 1) == is_traced


def test_a_warning_of_the_package_is_one_line():
    with contextlib.suppress(SystemExit):
        main(["--version"])
    assert warnings.formatwarning("too much", OwnWarning, "where.py", 3) == "warning: too much\n"
    assert "where.py:3" in warnings.formatwarning("too much", UserWarning, "where.py", 3)


@pytest.mark.parametrize("old", OLD_PROGRAMS)
def test_every_old_program_names_its_command(old):
    text = (REPOSITORY / "tools" / f"{old}.py").read_text()
    assert text.splitlines()[-3:] == ["import _moved", "", f'_moved.start("{OLD_PROGRAMS[old]}")']


@pytest.mark.parametrize("old", OLD_PROGRAMS)
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
        if path.name == "training_loop.py":  # imports the checkout of Megatron that its argument names
            continue
        text = path.read_text()
        assert "noqa: " + "E402" not in text, path
        if path.relative_to(REPOSITORY).parts[0] != "megatron_rl":
            assert "sys.path." + "insert" not in text, path
