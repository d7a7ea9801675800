"""Reading a recipe: YAML with `extends:` and `--set`, checked at once, errors in the user's own terms."""

from __future__ import annotations

import difflib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_origin

import yaml
from pydantic import ValidationError

from megatron_rl.config.base import Patch
from megatron_rl.config.explain import anchored, expand, explain, locate
from megatron_rl.config.objective import with_max_response_length
from megatron_rl.config.recipe import Recipe
from megatron_rl.config.rollout import RolloutConfig
from megatron_rl.config.yaml12 import Where, parse
from megatron_rl.errors import InputError, shown
from megatron_rl.shipped import existing_or_shipped

MAX_DEPTH = 32  # of files that extend files
MAX_PARTS = 32  # of the path of a `--set`


@dataclass(frozen=True)
class _Tree:
    """What recipe files say, merged, and where each value was set."""

    values: dict[str, Any]
    origins: dict[Where, str]


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read, merge, override and validate a recipe.

    Args:
        path: YAML file. `extends:` names one file or a list of files (relative to it), merged in order before it.
            A name that begins with ``recipes/`` and is not there means the recipe that ships with the package.
        overrides: ``a.b=value`` strings, values in YAML, applied last; ``data.train.0.path=…`` reaches into a list.

    Raises:
        InputError: naming file, key path, value found, values allowed and the nearest valid key.
    """
    path = existing_or_shipped(path)
    tree = _read(path, (), {})
    for override in overrides:
        tree = _overridden(tree, override, path.parent)
    if not any(override.partition("=")[0].strip() == "name" for override in overrides):
        _refuse_inherited_name(path, tree.values)
    values = dict(tree.values)
    _fill_in(values)
    try:
        return Recipe.model_validate(values)
    except ValidationError as error:
        raise InputError(f"recipe {path}:\n" + explain(error, Recipe, tree.origins)) from error


def values_of(overrides: Sequence[str]) -> dict[str, Any]:
    """The keys that ``overrides`` tell, as in `load_recipe`, without a recipe under them."""
    tree = _Tree({}, {})
    for override in overrides:
        tree = _overridden(tree, override, Path(os.curdir))
    return dict(tree.values)


def _refuse_inherited_name(path: Path, values: dict[str, Any]) -> None:
    """Two recipes of one name share a run directory, and the second would go on with the run of the first."""
    own = read_yaml(path, "recipe")
    if "name" in values and "name" not in own:
        raise InputError(
            f"recipe {path}: name: {values['name']!r} is inherited ({path.name} extends {own['extends']}), and so this "
            "recipe would share the run directory of the other; give it a name of its own"
        )


def is_base(path: str | Path) -> bool:
    """Whether a recipe file is a base for others: merged with what it extends, it still lacks a required section."""
    values = _read(Path(path), (), {}).values
    return any(field.is_required() and name not in values for name, field in Recipe.model_fields.items())


def _read(path: Path, chain: tuple[Path, ...], known: dict[Path, _Tree]) -> _Tree:
    """Read a recipe and those that it extends. ``known``: files read already, so that each is read once."""
    if _is_there(path):  # else the message below names it; a link to itself cannot be resolved
        path = path.resolve()
    if path in chain:
        raise InputError(f"{path}: extends itself through {' → '.join(p.name for p in (*chain, path))}")
    if path in known:
        return known[path]
    if len(chain) >= MAX_DEPTH:
        raise InputError(f"{path}: extended through {len(chain)} files; at most {MAX_DEPTH} are followed")
    values, lines = _read_lines(path, "recipe", f" (extended by {chain[-1]})" if chain else "")
    bases = values.pop("extends", None) or []
    bases = [bases] if isinstance(bases, str) else bases
    if not isinstance(bases, list) or not all(isinstance(base, str) for base in bases):
        raise InputError(f"recipe {path}: extends: expected the name of a file or a list of names, found {bases!r}")
    tree = _Tree({}, {})
    for base in bases:
        tree = _over(tree, _read(existing_or_shipped(base, path.parent), (*chain, path), known))
    shown = _shown(path)
    own = anchored(expand(values, Recipe), Recipe, path.parent)
    known[path] = _over(tree, _Tree(own, {where: f"{shown}:{line}" for where, line in lines.items()}))
    return known[path]


def _shown(path: Path) -> str:
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def read_yaml(path: Path, kind: str, context: str = "") -> dict[str, Any]:
    """The mapping in a YAML file, scalars read as YAML 1.2 does. ``kind`` and ``context`` are for messages.

    Raises `InputError` for a file that is missing, not YAML, or no mapping.
    """
    return _read_lines(path, kind, context)[0]


def _read_lines(path: Path, kind: str, context: str) -> tuple[dict[str, Any], dict[Where, int]]:
    if not _is_there(path):
        names = [other.name for other in path.parent.glob("*.yaml") if other.name != path.name]
        near = difflib.get_close_matches(path.name, names, n=1)
        hint = f"; did you mean {path.parent / near[0]}?" if near else ""
        raise InputError(f"{kind} {path}: no such file{context}{hint}")
    try:
        values, lines = parse(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError, OSError) as error:
        raise InputError(f"{kind} {path}: not valid YAML: {error}") from error
    if not isinstance(values, dict):
        raise InputError(f"{kind} {path}: expected a mapping of keys, found {type(values).__name__}")
    return values, lines


def _is_there(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # a name that is too long, for one
        return False


def _over(base: _Tree, top: _Tree) -> _Tree:
    """Return ``base`` with the values of ``top``."""
    replaced: set[Where] = set()
    values = _merge(base.values, top.values, (), replaced)
    kept = {
        where: origin
        for where, origin in base.origins.items()
        if not any(where[:length] in replaced for length in range(1, len(where) + 1))
    }
    return _Tree(values, {**kept, **top.origins})


def _merge(base: dict[str, Any], top: dict[str, Any], at: Where, replaced: set[Where]) -> dict[str, Any]:
    """Return ``base`` with the values of ``top``, mappings key by key. Another policy term, or another function of the
    user, replaces the old one whole."""
    merged = dict(base)
    for key, value in top.items():
        old, here = merged.get(key), (*at, key)
        both = isinstance(old, dict) and isinstance(value, dict)
        told = ("name", "function") if key == "policy_term" else ("function",) if at else ()  # a section is no variant
        if both and all(value.get(part, old.get(part)) == old.get(part) for part in told):
            merged[key] = _merge(old, value, here, replaced)
        elif isinstance(value, Patch):
            merged[key] = _patched(old or [], value, here, replaced)
        else:
            merged[key] = value
            replaced.add(here)
    return merged


def _patched(items: list[Any], patch: dict[str, Any], at: Where, replaced: set[Where]) -> list[Any]:
    numbered = _merge({str(index): item for index, item in enumerate(items)}, patch, at, replaced)
    return list(numbered.values())


def _overridden(tree: _Tree, override: str, folder: Path) -> _Tree:
    """Apply one ``--set``. Paths to read are looked up in the working directory first, as in a shell."""
    key, equals, text = override.partition("=")
    if not equals or not all(part.strip() for part in key.split(".")):
        raise InputError(f"--set {shown(override)}: expected KEY.PATH=VALUE")
    if key.count(".") >= MAX_PARTS:
        raise InputError(
            f"--set {shown(override, 80)}: a path of {key.count('.') + 1} parts; at most {MAX_PARTS} are read"
        )
    try:
        value, _ = parse(text)
    except yaml.YAMLError as error:
        raise InputError(f"--set {override!r}: the value is not valid YAML: {error}") from error
    parts = key.strip().split(".")
    _check_way(tree.values, parts, override)
    top = value
    for number in range(len(parts) - 1, -1, -1):
        top = (Patch if _is_list(tree.values, parts[:number]) else dict)({parts[number]: top})
    top = anchored(expand(top, Recipe), Recipe, Path(os.curdir), folder)
    where = tuple(_key(part) for part in parts)
    return _over(tree, _Tree(top, {where: f"--set {override}"}))


def _key(part: str) -> int | str:
    """The number of an item, or the name of a key."""
    return int(part) if part.isascii() and part.isdigit() and len(part) < 10 else part


def _is_list(values: Any, parts: list[str]) -> bool:
    """Whether a list is at ``parts``; where nothing is yet, whether the schema wants one there."""
    for part in parts:
        if isinstance(values, list):
            values = values[int(part)] if int(part) < len(values) else None
        else:
            values = values.get(part) if isinstance(values, dict) else None
    if values is not None:
        return isinstance(values, list)
    field = locate(Recipe, tuple(_key(part) for part in parts)).field
    return field is not None and get_origin(field.annotation) is list and isinstance(_key(parts[-1]), str)


def _check_way(values: Any, parts: list[str], override: str) -> None:
    """Raise `InputError` where ``parts`` leads through a value, or to an item that a list does not have."""
    for number, part in enumerate(parts):
        if isinstance(values, list):
            allowed = f"0 … {len(values)}" if values else "0"
            if not isinstance(_key(part), int) or int(part) > len(values):  # one behind the last: a further item
                name = ".".join(parts[:number])
                raise InputError(
                    f"--set {override!r}: {name} is a list of {len(values)}; after it comes the number of an item "
                    f"({allowed}), found {part!r}"
                )
            values = values[int(part)] if int(part) < len(values) else None
        elif isinstance(values, dict):
            values = values.get(part)
        elif values is None:
            return
        else:
            raise InputError(f"--set {override!r}: {parts[number - 1]!r} is a value, not a section")


def _fill_in(values: dict[str, Any]) -> None:
    """The objective needs the longest response (Dr.GRPO's constant); the rollout section knows it."""
    rollout, objective = values.get("rollout") or {}, values.get("objective", {})
    if isinstance(rollout, dict) and isinstance(objective, dict):
        default = RolloutConfig.model_fields["max_response_length"].default
        values["objective"] = with_max_response_length(objective, rollout.get("max_response_length", default))


# The JSON Schema of recipe files, for editors: what `load_recipe` reads, before it merges.


_EXTENDS = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": "string"}},
        {"type": "null"},
    ],
    "description": "Recipes that this one changes, relative to it: one, or several merged in order.",
}


def recipe_schema() -> dict[str, Any]:
    """Every key with its sentence, type and range. No key is required: a recipe says what differs from its base."""
    schema = _without_required(Recipe.model_json_schema())
    properties = {"extends": _EXTENDS, **schema.pop("properties")}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "properties": properties}


def _without_required(node: Any) -> Any:
    """A part of a variant may stand without the key that names it, so that several variants may fit."""
    if isinstance(node, list):
        return [_without_required(item) for item in node]
    if not isinstance(node, dict):
        return node
    is_schema = isinstance(node.get("properties"), dict) or "oneOf" in node
    left_out = ("required", "discriminator") if is_schema else ()
    return {
        "anyOf" if key == "oneOf" and is_schema else key: _without_required(value)
        for key, value in node.items()
        if key not in left_out
    }
