"""Every command line that README, docs and the headers of recipes print is one that the program takes."""

from __future__ import annotations

import argparse
import importlib
import re
from collections.abc import Iterator
from pathlib import Path

from megatron_rl.commands import COMMANDS, GROUPS, function_name, module_of

ROOT = Path(__file__).parents[3]
DOCUMENTS = [ROOT / "README.md", ROOT / "slurm" / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
HEADERS = sorted((ROOT / "recipes").rglob("*.yaml"))
STARTED = re.compile(
    r"(?:megatron-rl|python -m megatron_rl|torchrun [^`\n]*-m megatron_rl)[ \n]+([a-z][a-z-]+)([^`\n|#]*)"
)


def command_lines() -> Iterator[tuple[str, str, str]]:
    """File, command by its full name, and what follows on its line, lines that end in a backslash joined."""
    for file in [*DOCUMENTS, *HEADERS]:
        text = file.read_text(encoding="utf-8")
        if file.suffix == ".yaml":
            text = "\n".join(line for line in text.splitlines() if line.startswith("#"))
        for match in STARTED.finditer(text.replace("\\\n", " ")):
            name, rest = match[1], match[2]
            if name in GROUPS:
                own, _, rest = rest.strip().partition(" ")
                name = f"{name} {own}"
            yield str(file.relative_to(ROOT)), name, rest


def parser_of(command: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    getattr(importlib.import_module(module_of(command)), f"add_{function_name(command)}")(parser)
    return parser


def options(parser: argparse.ArgumentParser) -> set[str]:
    """Options of a command and of its own subcommands."""
    names = set(parser._option_string_actions)
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            names = names.union(*(options(child) for child in action.choices.values()))
    return names


def test_commands_exist_and_stand_behind_their_groups():
    """`megatron-rl replay` works, but is written `megatron-rl batch replay`."""
    named = {(name, file) for file, name, _ in command_lines()}
    assert {"train", "check", "plan", "lab", "batch replay", "patch"} <= {name for name, _ in named}
    assert not {(name, file) for name, file in named if name not in COMMANDS}


def test_options_exist():
    known = {name: options(parser_of(name)) for name in COMMANDS}
    named = {
        (name, option, file)
        for file, name, rest in command_lines()
        for option in re.findall(r"(?<![\w=-])(--[a-z][a-z-]+)", rest)
    }
    assert len(named) > 10, "nothing was looked at"
    assert not {(name, option, file) for name, option, file in named if option not in known[name]}


def test_no_document_names_a_program_by_an_old_name():
    for file in [*DOCUMENTS, *HEADERS]:
        assert not re.findall(r"(?<![\w/])tools/[a-z_]+\.py\b", file.read_text(encoding="utf-8")), file
