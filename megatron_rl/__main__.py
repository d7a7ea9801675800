"""Command line: ``megatron-rl COMMAND …`` or ``python -m megatron_rl COMMAND …``. Exit status: `megatron_rl.errors`."""

from __future__ import annotations

import argparse
import importlib
import os
import select
import sys
import traceback
import warnings
from collections.abc import Sequence
from typing import Any, NoReturn

from megatron_rl import __version__
from megatron_rl.commands import COMMANDS
from megatron_rl.errors import (
    EXIT_BAD_INPUT,
    EXIT_ENDED_BY_LIMIT,
    EXIT_FAULT,
    EXIT_INTERRUPTED,
    EXIT_PIPE_CLOSED,
    Fault,
    InputError,
    RunEnded,
)

DESCRIPTION = """Reinforcement learning of Mixture-of-Experts language models: Megatron-Core learns, vLLM generates.

Exit status: 0 done, 2 bad recipe or input, 3 the run was ended by an alarm or a limit, anything else is a fault."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit status. ``arguments``: default those of the process."""
    # PyTorch's C++ side prints a NUMA notice per rank when an engine starts; it must be told before the first import.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    # Megatron says at every import that TransformerEngine and Apex are absent; where that matters, `check` says it.
    warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.")
    for module in (r"torch\.distributed", r"megatron\."):  # Megatron's calls, not ours
        warnings.filterwarnings("ignore", category=FutureWarning, module=module)
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    try:
        options = _parser().parse_args(arguments)
        options.arguments = arguments
        status = options.execute(options)
        sys.stdout.flush()
        return status
    except InputError as error:
        # Every rank found the same problem: one message is enough.
        if int(os.environ.get("RANK", 0)) == 0:
            print(f"error: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT
    except RunEnded as reason:
        print(f"run ended: {reason}", file=sys.stderr)
        return EXIT_ENDED_BY_LIMIT
    except KeyboardInterrupt:
        hint = "; the same command continues from the last checkpoint" if arguments[:1] == ["train"] else ""
        print(f"interrupted{hint}", file=sys.stderr)
        return EXIT_INTERRUPTED
    except Fault as error:
        traceback.print_exc()
        print(f"run failed: {error}", file=sys.stderr)  # the last line says it all
        return EXIT_FAULT
    except BrokenPipeError:
        if not _reader_has_left():
            raise
        return EXIT_PIPE_CLOSED


def script() -> int:
    """The installed ``megatron-rl``. It finds modules (a reward) in the working directory, as ``python -m`` does."""
    if not sys.flags.safe_path:
        sys.path.insert(0, os.getcwd())
    return main()


class _Command(argparse.ArgumentParser):
    """A parser that learns the arguments of its command, if it is one's, from ``module`` when they are asked for."""

    def __init__(self, *arguments: Any, module: str | None = None, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._module = module

    def parse_known_args(self, *arguments: Any, **options: Any) -> tuple[argparse.Namespace, list[str]]:
        if self._module is not None:
            module = importlib.import_module(self._module)
            self._module = None
            self.description = module.__doc__
            self.formatter_class = argparse.RawDescriptionHelpFormatter
            self.set_defaults(execute=module.run)
            module.add_arguments(self)
        return super().parse_known_args(*arguments, **options)

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        sys.stdout.flush()  # a pipe without a reader is found here, not when Python ends
        super().exit(status, message)


def _parser() -> argparse.ArgumentParser:
    parser = _Command(prog="megatron-rl", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--version", action="version", version=f"megatron-rl {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, text in COMMANDS.items():
        commands.add_parser(name, help=text, module=f"megatron_rl.commands.{name.replace('-', '_')}")
    return parser


def _reader_has_left() -> bool:
    """Whether standard output is a pipe without a reader (`… | head`). What is left to be written is then dropped."""
    try:
        output = sys.stdout.fileno()
    except (OSError, ValueError):  # no file: a test's
        return False
    pipe = select.poll()
    pipe.register(output, 0)  # errors are reported unasked
    if not pipe.poll(0):
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), output)  # Python flushes once more when it ends
    return True


if __name__ == "__main__":
    sys.exit(main())
