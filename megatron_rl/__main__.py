"""Command line: ``megatron-rl COMMAND …`` or ``python -m megatron_rl COMMAND …``. Exit status: `megatron_rl.errors`."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import importlib
import inspect
import itertools
import os
import select
import sys
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from megatron_rl import __version__
from megatron_rl.arguments import FILES, make_folder, of_job
from megatron_rl.commands import COMMANDS, GROUPS, full_name, function_name, module_of
from megatron_rl.errors import (
    EXIT_BAD_INPUT,
    EXIT_ENDED_BY_LIMIT,
    EXIT_FAULT,
    EXIT_INTERRUPTED,
    EXIT_PIPE_CLOSED,
    Fault,
    InputError,
    OwnWarning,
    RunEnded,
    message_text,
)
from megatron_rl.process.fp32_products import set_environment

ENGINE_PACKAGES = (
    "torch",
    "vllm",
    "transformers",
    "megatron",
    "math_verify",
)  # not among the dependencies of the package

DESCRIPTION = """Reinforcement learning of Mixture-of-Experts language models: Megatron-Core learns, vLLM generates.

Exit status: 0 done, 2 bad recipe or input, 3 the run was ended by an alarm or a limit, anything else is a fault."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status. ``arguments``: default those of the process."""
    # PyTorch's C++ code prints a NUMA notice per rank when an engine starts; set this before the first import.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    set_environment()  # fp32 without TF32; engines of a recipe with tf32 set it at their start
    # Megatron warns at every import if TransformerEngine or Apex is absent; `check` reports it if it matters.
    warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.")
    for module in (r"torch\.distributed", r"megatron\."):  # warnings about Megatron's own calls
        warnings.filterwarnings("ignore", category=FutureWarning, module=module)
    warnings.formatwarning = _own_warnings_as_lines
    open_missing()
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    options, rank = None, 0
    try:
        for name in ("WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
            of_job(name)
        rank = of_job("RANK") or 0
        options = program_parser().parse_args(arguments)
        options.arguments = arguments
        status = options.execute(options)
        sys.stdout.flush()
        return status
    except InputError as error:
        # Every rank has the same problem, so one message is enough.
        if rank == 0:
            print(f"error: {message_text(error)}", file=sys.stderr)
        return EXIT_BAD_INPUT
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in ENGINE_PACKAGES:
            raise
        print(f"error: {how_to_install(package, arguments)}", file=sys.stderr)
        return EXIT_BAD_INPUT
    except RunEnded as reason:
        print(f"run ended: {message_text(reason)}", file=sys.stderr)
        return EXIT_ENDED_BY_LIMIT
    except KeyboardInterrupt:
        hint = "; the same command continues from the last checkpoint" if arguments[:1] == ["train"] else ""
        print(f"interrupted{hint}", file=sys.stderr)
        return EXIT_INTERRUPTED
    except Fault as error:
        if not error.explains_itself:
            print(message_text(traceback.format_exc().rstrip()), file=sys.stderr)
        print(f"run failed: {message_text(error)}", file=sys.stderr)  # the last line is the summary
        return EXIT_FAULT
    except BrokenPipeError:
        if not _reader_has_left():
            raise
        return EXIT_PIPE_CLOSED
    finally:
        for folder in reversed(getattr(options, "made_folders", ())):
            with contextlib.suppress(OSError):  # it has files, as it should
                folder.rmdir()


_PLAIN_WARNING = warnings.formatwarning


def _own_warnings_as_lines(message: Warning | str, category: type[Warning], *place: Any, **more: Any) -> str:
    """Return the text of a warning. Of this package's own the place in the code would say nothing."""
    if issubclass(category, OwnWarning):
        return f"warning: {message_text(message)}\n"
    return _PLAIN_WARNING(message, category, *place, **more)


def how_to_install(package: str, arguments: Sequence[str]) -> str:
    """The message for a command that lacks one of `ENGINE_PACKAGES`: what is missing, and the line to install it."""
    from megatron_rl.shipped import shipped

    command = " ".join(["megatron-rl", *arguments[: 2 if arguments[:1] and arguments[0] in GROUPS else 1]])
    return (
        f"{command}: the package {package} is not installed; install the engines: pip install -r "
        f"{shipped('requirements.txt')} (its head says what follows), without a GPU {shipped('requirements-cpu.txt')}"
    )


def open_missing() -> None:
    """Open /dev/null for descriptors 0, 1 and 2 if they are closed (`train >&-`).

    Otherwise the next opened file would get the number, and output would be written into it.
    """
    for descriptor, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(descriptor)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != descriptor:
                os.dup2(opened, descriptor)
                os.close(opened)
        if getattr(sys, name) is None:
            setattr(sys, name, open(descriptor, mode, closefd=False))  # noqa: SIM115 - open for as long as the process


def script() -> int:
    """Run the installed ``megatron-rl``. Modules (a reward) are found in the working directory, as by ``python -m``."""
    if not sys.flags.safe_path:
        sys.path.insert(0, os.getcwd())
    return main()


class CommandParser(argparse.ArgumentParser):
    """Parser of the program, a group or a command, whose arguments are added when they are needed."""

    def __init__(self, *arguments: Any, command: str | None = None, **options: Any) -> None:
        settings = {"formatter_class": argparse.RawDescriptionHelpFormatter, "allow_abbrev": False}
        super().__init__(*arguments, **settings, **options)
        self._command = command

    def load(self) -> None:
        """Import the command's module and add its arguments, unless that is done."""
        if self._command is not None:
            module, name = importlib.import_module(module_of(self._command)), function_name(self._command)
            self._command = None
            run = getattr(module, f"run_{name}")
            self.description = inspect.getdoc(run)
            self.set_defaults(execute=run)
            getattr(module, f"add_{name}")(self)

    def parse_known_args(self, *arguments: Any, **options: Any) -> tuple[argparse.Namespace, list[str]]:
        self.load()
        if not self._subparsers:
            self._refuse_unknown(arguments[0] if arguments else options["args"])
        parsed, unknown = super().parse_known_args(*arguments, **options)
        for action in self._actions:
            if action.type in FILES and (path := getattr(parsed, action.dest, None)) is not None:
                parsed.made_folders = [*getattr(parsed, "made_folders", ()), *make_folder(Path(path))]
        return parsed, unknown

    def _refuse_unknown(self, words: Sequence[str]) -> None:
        """End with a message at an option that the command does not have, before one that is missing is named."""
        for word in itertools.takewhile(lambda word: word != "--", words):
            name = word.partition("=")[0]
            if not word.startswith("-") or word == "-" or " " in word or name in self._option_string_actions:
                continue
            with contextlib.suppress(ValueError):
                float(word)
                continue
            known = [other for other in self._option_string_actions if other.startswith("--")]
            near = [other for other in known if other.startswith(name)] + difflib.get_close_matches(name, known)
            hint = f"did you mean {' or '.join(dict.fromkeys(near))}? " if near else ""
            self.error(f"no such option: {name}; {hint}`{self.prog} --help` lists them")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if not isinstance(action, argparse._SubParsersAction) or value in action.choices:
            super()._check_value(action, value)
            return
        group = self.prog.partition(" ")[2]
        allowed = [f"{group} {name}".strip() for name in action.choices]
        near = nearest_commands(value, allowed, everywhere=group in GROUPS)
        hint = f"did you mean {near}? " if near else ""
        raise argparse.ArgumentError(None, f"no such command: {value!r}; {hint}`{self.prog} --help` lists them")

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        sys.stdout.flush()  # so that a pipe without a reader raises here, not when Python ends
        super().exit(status, message)


def nearest_commands(typed: str, here: list[str], everywhere: bool) -> str:
    """Return commands spelled like ``typed``, in quotes, from the full names ``here`` or from all (``everywhere``)."""
    spelled = {name.split()[-1]: full_name(name) or name for name in here}
    if everywhere:
        spelled = {name.split()[-1]: name for name in COMMANDS} | spelled
    near = [spelled[word] for word in difflib.get_close_matches(typed, spelled)]
    return " or ".join(f"'{name}'" for name in dict.fromkeys(near))


def program_parser() -> CommandParser:
    """Return the parser of `megatron-rl`. Commands of groups can also be called, unlisted, without the group."""
    parser = CommandParser(prog="megatron-rl", description=DESCRIPTION)
    parser.add_argument("--version", action="version", version=f"megatron-rl {__version__}", help="Print the version.")
    parser.add_argument(
        "--print-completion", action=_PrintCompletion, choices=("bash", "zsh"), help="Print a completion script."
    )
    commands = _subparsers(parser)
    groups: dict[str, Any] = {}
    for name, text in COMMANDS.items():
        group, _, last_word = name.rpartition(" ")
        if group:
            if group not in groups:
                members = [other.split()[1] for other in COMMANDS if other.startswith(f"{group} ")]
                line = f"{GROUPS[group]}: {', '.join(members)}."
                groups[group] = _subparsers(commands.add_parser(group, help=line, description=line))
            groups[group].add_parser(last_word, help=text, command=name)
            commands.add_parser(last_word, command=name)  # unlisted: for old command lines
        else:
            commands.add_parser(last_word, help=text, command=name)
    return parser


def _subparsers(parser: argparse.ArgumentParser) -> Any:
    return parser.add_subparsers(title="commands", dest="command", required=True, metavar="COMMAND")


class _PrintCompletion(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *arguments: Any) -> None:
        print(completion_script(parser, shell=arguments[1]))
        parser.exit()


def completion_script(parser: argparse.ArgumentParser, shell: str) -> str:
    """Return a script for ``shell`` (bash or zsh) that completes commands, options, values and file names."""
    try:
        import shtab
    except ImportError:
        raise InputError("--print-completion needs the package shtab; install it: pip install shtab") from None
    _prepare_completion(parser, shtab.FILE)
    return shtab.complete(parser, shell=shell)


def _prepare_completion(parser: argparse.ArgumentParser, file: dict[str, str]) -> None:
    """Load the arguments of all commands and mark those that are file names.

    A command whose engine is not installed completes without its arguments.
    """
    if hasattr(parser, "load"):
        try:
            parser.load()
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] not in ENGINE_PACKAGES:
                raise
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for listed in action._choices_actions:
                command = action.choices[listed.dest]
                _prepare_completion(command, file)
                command.description = listed.help  # a menu shows this one line instead of the whole docstring
        elif action.type is Path or action.dest in ("recipe", "runs"):
            action.complete = file


def _reader_has_left() -> bool:
    """Return whether standard output is a pipe without a reader (`… | head`); if so, drop further output."""
    try:
        output = sys.stdout.fileno()
    except (OSError, ValueError):  # standard output is not a file, as in a test
        return False
    pipe = select.poll()
    pipe.register(output, 0)  # errors are always reported
    if not pipe.poll(0):
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), output)  # Python flushes again when it ends
    return True


if __name__ == "__main__":
    sys.exit(main())
