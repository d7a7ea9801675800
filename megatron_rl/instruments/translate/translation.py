"""A translation under way: the values of a configuration of theirs, the recipe that grows from it, and the account."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from megatron_rl.config import Recipe
from megatron_rl.config.explain import expand, explain
from megatron_rl.config.foreign_keys import READ_FROM, Row, rows, without
from megatron_rl.config.yaml12 import parse
from megatron_rl.errors import InputError
from megatron_rl.instruments.translate.shell import readable, unresolved_names


def number(value: Any) -> float | int | None:
    """A number, also one written as text; None for anything else."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int | float):
        return value
    try:
        parsed = float(value)
    except (TypeError, ValueError):
        return None
    return int(parsed) if re.fullmatch(r"[-+]?\d+", str(value).strip()) else parsed


def whole(value: Any) -> int | None:
    return None if (parsed := number(value)) is None else int(parsed)


def real(value: Any) -> float | None:
    return None if (parsed := number(value)) is None else float(parsed)


def _item(value: Any, place: int) -> float | None:
    return real(value[place] if isinstance(value, list) and len(value) > place else value)


def _if_true(result: Any) -> Callable[[Any], Any]:
    return lambda value: result if value is True else None


CONVERSIONS: dict[str, Callable[[Any], Any]] = {
    "int": whole,
    "float": real,
    "count": lambda value: max(0, whole(value) or 0),
    "first": lambda value: _item(value, 0),
    "second": lambda value: _item(value, 1),
    "same": lambda value: value,
    "text": lambda value: readable(str(value)),
    "true": _if_true(True),
    "fp16": _if_true("fp16"),
    "r2": _if_true("r2"),
    "r3": _if_true("r3"),
    "fp8": lambda value: "fp8" if str(value).startswith("fp8") else None,
    "replay": {"R2": "r2", "R3": "r3"}.get,
}
"""How a value of theirs becomes ours, by the name in the table; None: our key is not set."""


@dataclass
class Source:
    """What a file of theirs sets: ``values`` by key, ``off``: keys without effect as it stands, and ``notes``."""

    project: str
    path: Path
    values: dict[str, Any]
    is_megatron: bool
    off: set[str] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)


class Translation:
    """A recipe made of another project's keys, with a report."""

    def __init__(self, source: Source) -> None:
        self.project, self.path, self.values = source.project, source.path, source.values
        self.off, self.notes, self.is_megatron = source.off, source.notes, source.is_megatron
        self.recipe: dict[str, Any] = {}
        self.placed: dict[str, str] = {}
        self.guesses: dict[str, str] = {}
        self.losses: dict[str, str] = {}
        self.rules: dict[str, Row] = {row.how[1:]: row for row in rows() if row.how.startswith("@")}

    def key(self, row: Row) -> tuple[str, Any]:
        """The key of ``row`` that counts, and its default: the first that is set, else the first."""
        cells = row.keys[self.project] or (("", None),)
        defaults = [default for _, default in cells if default is not None]
        return next(
            (key for key, _ in cells if self.values.get(key) is not None and key not in self.off), cells[0][0]
        ), (defaults[0] if defaults else None)

    def of(self, row: Row) -> Any:
        """Their value for ``row``: as set, else their default, also where the set one is not known, which is said."""
        key, default = self.key(row)
        value = self.values.get(key) if key not in self.off else None
        if not isinstance(value, str) or not (names := unresolved_names(value)):
            return default if value is None else value
        name = re.sub(r"\W", "", names[0]) if re.fullmatch(r"\$\{?\w+\}?", names[0]) else ""
        remedy = f"; --variable {name}=VALUE says it" if name else ""
        taken = "it is left out" if default is None else f"{self.project}'s default {shown(default)} was taken"
        self.note(f"{key}: {readable(value)} is known only where the script runs: {taken}{remedy}")
        return default

    def __getitem__(self, rule: str) -> Any:
        """Their value for the row that the table calls @``rule``."""
        return self.of(self.rules[rule])

    def is_set(self, rule: str) -> bool:
        key, _ = self.key(self.rules[rule])
        return self.values.get(key) is not None and key not in self.off

    def path_of(self, rule: str, fallback: str) -> Any:
        """Their path, ``fallback`` where it is known only where the script runs; None where none is set."""
        key, default = self.key(self.rules[rule])
        value = self.values.get(key, default)
        if isinstance(value, str) and unresolved_names(value):
            self.note(f"{key}: {readable(value)} is known only where the script runs; put the path in by hand")
            value = re.sub(r"\ue000.*?\ue001", "", value).strip("/") or fallback
        return value

    def take_rows(self) -> None:
        """Translate the keys whose value does not depend on others."""
        for row in rows():
            if row.how.startswith("@") or not row.keys[self.project] or (value := self.of(row)) is None:
                continue
            if (ours := CONVERSIONS[row.how](value)) is not None:
                self.put(row.ours, ours)
            elif row.how in ("fp8", "replay") and value not in ("auto", "bfloat16", "disabled", False):
                self.losses[self.key(row)[0]] = f"{row.ours} has no such value"

    def put(self, ours: str, value: Any, remark: str = "") -> None:
        """Set our key to what follows from theirs."""
        at = self.recipe
        *path, last = ours.split(".")
        for part in path:
            at = at.setdefault(part, {})
        at[last] = value
        self.placed[ours] = remark

    def drop(self, section: str) -> None:
        """Leave ``section`` out of the recipe."""
        self.recipe.pop(section, None)
        self.placed = {ours: remark for ours, remark in self.placed.items() if not ours.startswith(f"{section}.")}

    def guess(self, ours: str, value: Any, why: str) -> None:
        """Set our key to what does not follow from theirs."""
        self.put(ours, value)
        self.guesses[ours] = why

    def lose(self, rule: str, effect: str) -> None:
        """Say what becomes other because our recipes have nothing of that kind."""
        self.losses[self.key(self.rules[rule])[0]] = effect

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def ours(self, key: str) -> Any:
        """The recipe's value at the dotted ``key``; None where it has none."""
        at: Any = self.recipe
        for part in key.split("."):
            at = at.get(part) if isinstance(at, Mapping) else None
        return at

    def check(self) -> None:
        """Raise InputError where the recipe would not load."""
        from megatron_rl.config.objective import with_max_response_length

        values = expand(parse(yaml.safe_dump(self.recipe))[0], Recipe)
        longest = values.get("rollout", {}).get("max_response_length", 1024)
        try:
            Recipe.model_validate({**values, "objective": with_max_response_length(values.get("objective"), longest)})
        except ValidationError as error:
            raise InputError(
                f"{self.path}: its translation is not a valid recipe:\n{explain(error, Recipe)}\n\n{self.report()}"
            ) from error

    def report(self) -> str:
        """What became of each key: translated, without counterpart, guessed, not known, unknown, or without effect."""
        theirs, told = self._keys_by_ours()
        default = f"{self.project}'s default"
        lost = [f"{key}: {shown(self.values.get(key, default))}: {effect}" for key, effect in self.losses.items()]
        idle, unknown, by_effect = [], [], {}
        known = {key for row in rows() for key, _ in row.keys[self.project]}
        for key in sorted(set(self.values) - told - set(self.losses)):
            value, effect = self.values[key], self._effect(key)
            if key in self.off or key in known or value in (None, False, "", []) or effect == "":
                idle.append(key)
            elif effect is None:
                unknown.append(f"{key}: {shown(value)}")
            else:
                by_effect.setdefault(effect, []).append(f"{key}: {shown(value)}")
        done = {ours: self._line(ours, remark) for ours, remark in self.placed.items() if ours not in self.guesses}
        sections = {
            "Translated": [f"{', '.join(theirs[ours])} → {line}" for ours, line in done.items() if theirs[ours]],
            f"{self.project}'s defaults": [", ".join(line for ours, line in done.items() if not theirs[ours])],
            "Without counterpart": [*lost, *(f"{', '.join(keys)}: {effect}" for effect, keys in by_effect.items())],
            "Guessed": [
                f"{ours}: {shown(self.ours(ours))}: {why}" + (f" ({', '.join(theirs[ours])})" if theirs[ours] else "")
                for ours, why in self.guesses.items()
            ],
            "Not known from the file": self.notes,
            "No rule here knows": [", ".join(unknown)],
            "Without effect here": [", ".join(idle)],
        }
        parts = [f"{self.project} (rules read from {', '.join(READ_FROM[self.project])}): {self.path.name}"]
        for title, lines in sections.items():
            parts += [f"{title}:"] if any(lines) else []
            parts += [textwrap.fill(line, **_WRAPPED) for line in lines if line]
        return "\n".join(parts)

    def _line(self, ours: str, remark: str) -> str:
        return f"{ours}: {shown(self.ours(ours))}" + (f" ({remark})" if remark else "")

    def _effect(self, key: str) -> str | None:
        """What changes without ``key``, which no rule read: "" for nothing, None where the table does not know it."""
        for pattern, neutral, effect in without(self.project):
            if fnmatchcase(key, pattern):
                return "" if self.values[key] == neutral else effect
        return None

    def _keys_by_ours(self) -> tuple[dict[str, list[str]], set[str]]:
        """Their set keys that each of our keys was made of, with values, and all of these keys."""
        theirs: dict[str, list[str]] = {ours: [] for ours in self.placed}
        told = set()
        for row in rows():
            key, _ = self.key(row)
            homes = [
                ours for ours in theirs if row.ours == ours or {row.ours, ours} & {*_above(ours), *_above(row.ours)}
            ]
            value = self.values.get(key)
            is_used = row.how.startswith("@") or CONVERSIONS[row.how](value) is not None
            if value is None or key in self.off or key in self.losses or not is_used:
                continue
            for ours in homes:
                text = f"{key}: {shown(value)}"
                theirs[ours] += [text] if text not in theirs[ours] else []
                told.add(key)
        return theirs, told

    def text(self) -> str:
        """The recipe as a file, with the report as its header."""
        header = "".join(f"# {line}".rstrip() + "\n" for line in self.report().splitlines())
        return header + yaml.safe_dump(self.recipe, sort_keys=False, allow_unicode=True, width=110)


_WRAPPED: dict[str, Any] = {
    "width": 118,
    "initial_indent": "  ",
    "subsequent_indent": "    ",
    "break_long_words": False,
    "break_on_hyphens": False,
}


def _above(key: str) -> list[str]:
    """The sections that ``key`` stands in, dotted."""
    parts = key.split(".")
    return [".".join(parts[:i]) for i in range(1, len(parts))]


def shown(value: Any) -> str:
    """A value on one line, shortened."""
    text = readable(value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False))
    text = " ".join(text.split())
    return text if len(text) <= 100 else f"{text[:97]}..."
