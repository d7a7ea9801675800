"""Completion scripts for bash and zsh, for `megatron-rl --print-completion`."""

from __future__ import annotations

import argparse
from pathlib import Path

from megatron_rl.errors import InputError


def script_for(parser: argparse.ArgumentParser, shell: str) -> str:
    """Return a script for ``shell`` (bash or zsh) that completes commands, options, values and file names."""
    try:
        import shtab
    except ImportError:
        raise InputError("--print-completion needs the package shtab; install it: pip install shtab") from None
    _prepare(parser, shtab.FILE)
    return shtab.complete(parser, shell=shell)


def _prepare(parser: argparse.ArgumentParser, file: dict[str, str]) -> None:
    """Load the arguments of all commands and mark those that are file names."""
    if hasattr(parser, "load"):
        parser.load()
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for listed in action._choices_actions:
                command = action.choices[listed.dest]
                _prepare(command, file)
                command.description = listed.help  # a menu shows this one line instead of the whole docstring
        elif action.type is Path or action.dest in ("recipe", "runs"):
            action.complete = file
