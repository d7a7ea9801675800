"""YAML 1.2: its scalars, bounds on what a file may expand to, and the line that each value stands on.

YAML 1.1, PyYAML's default, reads `off` as false, `010` as 8, `1:30` as 90 and `1e-6` as text.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Hashable, Iterator
from functools import lru_cache
from typing import Any

import yaml
from yaml.constructor import ConstructorError

MAX_CHARS = 2**20  # of a file; a long recipe has some thousand
MAX_VALUES = 100_000  # in a file, aliases written out: ten aliases of ten aliases of … make any number
MAX_INTEGER = 2**63 - 1  # what other programs can read, and products of two can be shown

Where = tuple[str | int, ...]
"""Keys and list indices from the top of a file."""

_TAG = "tag:yaml.org,2002:"


class _Loader(yaml.SafeLoader):
    """The core schema of YAML 1.2; a key given twice is an error."""

    yaml_implicit_resolvers: dict = {}
    yaml_constructors: dict = {
        tag: yaml.SafeLoader.yaml_constructors[tag]
        for tag in (None, *(_TAG + t for t in ("str", "seq", "map", "null")))
    }

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=deep)
            if not isinstance(key, Hashable):
                raise ConstructorError(None, None, f"{key!r} cannot be a key", key_node.start_mark)
            if key in seen:
                raise ConstructorError(None, None, f"key {key!r} is given twice", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


_BOOLS = {"true": True, "false": False}
_SCALARS = {
    "null": (r"~|null|Null|NULL|", [*"~nN", ""]),
    "bool": (r"true|True|TRUE|false|False|FALSE", "tTfF"),
    "int": (r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", "-+0123456789"),
    "float": (
        r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        "-+0123456789.",
    ),
}
for _name, (_pattern, _first) in _SCALARS.items():
    _Loader.add_implicit_resolver(_TAG + _name, re.compile(f"^(?:{_pattern})$"), list(_first))


def _scalar(node: yaml.Node, name: str) -> str:
    if not isinstance(node, yaml.ScalarNode) or not re.fullmatch(_SCALARS[name][0], node.value):
        raise ConstructorError(None, None, f"not a {name}", node.start_mark)
    return node.value


def _integer(loader: yaml.Loader, node: yaml.Node) -> int:
    text = _scalar(node, "int")
    base = {"0o": 8, "0x": 16}.get(text[:2], 10)
    if len(text) > 25 or abs(value := int(text[2:] if base != 10 else text, base)) > MAX_INTEGER:
        raise ConstructorError(None, None, f"a number of {len(text)} characters is beyond 64 bits", node.start_mark)
    return value


def _float(loader: yaml.Loader, node: yaml.Node) -> float | int:
    """``1e3``, written without a point, is the whole number that it says."""
    text = _scalar(node, "float")
    value = float(re.sub(r"\.(?=inf|nan)", "", text.lower()))
    is_whole = "." not in text and abs(value) <= MAX_INTEGER and value.is_integer()
    return int(value) if is_whole else value


_Loader.add_constructor(_TAG + "bool", lambda loader, node: _BOOLS[_scalar(node, "bool").lower()])
_Loader.add_constructor(_TAG + "int", _integer)
_Loader.add_constructor(_TAG + "float", _float)


def parse(text: str) -> tuple[Any, dict[Where, int]]:
    """The value that ``text`` says, and the line of each value in it, counted from 1. Raises `yaml.YAMLError`."""
    value, lines = _parsed(text)
    return copy.deepcopy(value), dict(lines)


@lru_cache(maxsize=128)
def _parsed(text: str) -> tuple[Any, dict[Where, int]]:
    """`parse`, once for each text: recipes have their bases in common."""
    if len(text) > MAX_CHARS:
        raise yaml.YAMLError(f"{len(text)} characters; at most {MAX_CHARS} are read")
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None, {}
        if (size := _size(node, {})) > MAX_VALUES:
            raise yaml.YAMLError(f"its aliases stand for {size} values; at most {MAX_VALUES} are read")
        value = loader.construct_document(node)
        return value, {where: line + 1 for where, line in _lines(node, ())}
    except (ValueError, RecursionError) as error:  # brackets without end
        raise yaml.YAMLError(str(error)) from error
    finally:
        loader.dispose()


def _size(node: yaml.Node, known: dict[int, int | None]) -> int:
    """Values in ``node`` with aliases written out, in time linear in its text."""
    if id(node) in known:
        if (size := known[id(node)]) is None:
            raise ConstructorError(None, None, "a value that contains itself", node.start_mark)
        return size
    known[id(node)] = None
    if isinstance(node, yaml.MappingNode):
        size = sum(_size(key, known) + _size(value, known) for key, value in node.value)
    elif isinstance(node, yaml.SequenceNode):
        size = sum(_size(item, known) for item in node.value)
    else:
        size = 0
        if "\0" in node.value or any("\ud800" <= char <= "\udfff" for char in node.value):
            raise ConstructorError(None, None, "NUL, or half of a character", node.start_mark)
    known[id(node)] = size + 1
    return size + 1


def _lines(node: yaml.Node, where: Where) -> Iterator[tuple[Where, int]]:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            yield (*where, key.value), key.start_mark.line
            yield from _lines(value, (*where, key.value))
    elif isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            yield (*where, index), item.start_mark.line
            yield from _lines(item, (*where, index))
