"""YAML files that inherit from others (`defaults`) and refer to their own values (`${policy.model_name}`).

Read as NeMo-RL reads its configurations: a file's parents first, each from the folder of the file that names it, then
the file over them; `_override_: true` in a section drops what its parents have there. References are filled in last.
Known are keys, relative keys (`${.temperature}`), and the functions add, mul, div and max. What depends on the machine,
such as `${oc.env:NAME}`, is taken from ``variables``, and stays in the text as `shell.unresolved_names` finds it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

from megatron_rl.config.yaml12 import parse
from megatron_rl.errors import InputError

DEEPEST = 16  # files that inherit from each other, and references that lead to references
_FUNCTIONS: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda a, b: a + b,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b,
    "max": max,
}


def load_inherited(path: Path) -> tuple[dict[str, Any], dict[str, Any], list[Path]]:
    """The values of ``path`` over those of its parents, its own alone, and the files read; references as written.

    Raises InputError where a file is missing, is no mapping, or inherits from itself.
    """
    return _load(path, ())


def _load(path: Path, children: tuple[Path, ...]) -> tuple[dict[str, Any], dict[str, Any], list[Path]]:
    if path.resolve() in children or len(children) >= DEEPEST:
        raise InputError(f"{path}: defaults: it inherits from itself, by way of {children[-1]}")
    try:
        values, _ = parse(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        by = f"; {children[-1]} names it under `defaults`: give the file in its own folder" if children else ""
        raise InputError(f"{path}: cannot be read as YAML: {error}{by}") from error
    if not isinstance(values, dict):
        raise InputError(f"{path}: expected a mapping of sections, found {type(values).__name__}")
    parents = values.pop("defaults", None) or []
    merged: dict[str, Any] = {}
    files: list[Path] = []
    for parent in [parents] if isinstance(parents, str) else parents:
        inherited, _, read = _load(path.parent / str(parent), (*children, path.resolve()))
        merged, files = _merged(merged, inherited), [*files, *read]
    return _merged(merged, values), values, [*files, path]


def _merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(base)
    for key, value in over.items():
        if isinstance(value, Mapping):
            below = {} if value.get("_override_") is True else result.get(key)
            rest = {name: inner for name, inner in value.items() if name != "_override_"}
            result[key] = _merged(below if isinstance(below, Mapping) else {}, rest)
        else:
            result[key] = value
    return result


def resolved(values: Mapping[str, Any], variables: Mapping[str, str]) -> dict[str, Any]:
    """``values`` with their references filled in."""
    return _Resolver(values, variables).section(values, ())


class _Resolver:
    def __init__(self, values: Mapping[str, Any], variables: Mapping[str, str]) -> None:
        self.values, self.variables = values, variables

    def section(self, value: Any, place: tuple[str, ...], depth: int = 0) -> Any:
        """``value``, which stands at the keys ``place``, without references."""
        if isinstance(value, Mapping):
            return {key: self.section(inner, (*place, str(key)), depth) for key, inner in value.items()}
        if isinstance(value, list):
            return [self.section(inner, place, depth) for inner in value]
        return self._text(value, place, depth) if isinstance(value, str) else value

    def _text(self, text: str, place: tuple[str, ...], depth: int) -> Any:
        parts, at = [], 0
        while (start := text.find("${", at)) >= 0:
            end = _closing(text, start)
            if end < 0:
                break
            value = self._reference(text[start + 2 : end], place, depth)
            if start == 0 and end == len(text) - 1:
                return value
            parts += [text[at:start], str(value)]
            at = end + 1
        return "".join([*parts, text[at:]])

    def _reference(self, inside: str, place: tuple[str, ...], depth: int) -> Any:
        unknown = f"\ue000${{{inside}}}\ue001"
        if depth >= DEEPEST:
            return unknown
        inside = str(self._text(inside, place, depth + 1)) if "${" in inside else inside
        name, is_call, rest = inside.partition(":")
        if is_call:
            return self._call(name.strip(), [part.strip() for part in rest.split(",")], unknown)
        dots = len(name) - len(name.lstrip("."))
        path = name.lstrip(".").split(".")
        keys = [*place[: len(place) - dots], *path] if dots else path
        found: Any = self.values
        for key in keys:
            if not isinstance(found, Mapping) or key not in found:
                return unknown
            found = found[key]
        return self.section(found, tuple(keys), depth + 1)

    def _call(self, name: str, arguments: list[str], unknown: str) -> Any:
        if name == "oc.env":
            default = arguments[1] if len(arguments) > 1 else unknown
            return self.variables.get(arguments[0], default)
        try:
            result = _FUNCTIONS[name](*(float(argument) for argument in arguments))
        except (KeyError, ValueError, TypeError, ZeroDivisionError):
            return unknown
        return int(result) if math.isfinite(result) and result == int(result) else result


def _closing(text: str, start: int) -> int:
    depth = 0
    for match in re.compile(r"\$\{|\}").finditer(text, start):
        depth += 1 if match[0] == "${" else -1
        if depth == 0:
            return match.start()
    return -1
