"""Reading a recipe: YAML with `extends:` and `--set`, checked at once, errors in the user's own terms."""

from __future__ import annotations

import difflib
import re
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError

from megatron_rl.config.objective import with_max_response_length
from megatron_rl.config.recipe import Recipe
from megatron_rl.config.rollout import RolloutConfig
from megatron_rl.errors import InputError
from megatron_rl.shipped import existing_or_shipped

_PATH_KEYS = (("model", "path"),)  # looked up from the folder of the recipe that names them


class _Loader(yaml.SafeLoader):
    """Safe YAML that reads scalars as YAML 1.2 does and refuses a key given twice.

    YAML 1.1, PyYAML's default, reads `off` as false and `1e-6` as a string: both are values people write here.
    """

    yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag not in _REPLACED]
        for _REPLACED in [("tag:yaml.org,2002:bool", "tag:yaml.org,2002:float")]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=deep)
            if not isinstance(key, Hashable):
                raise yaml.constructor.ConstructorError(None, None, f"{key!r} cannot be a key", key_node.start_mark)
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} is given twice", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), "tTfF")
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(?:\d+\.\d*(?:[eE][-+]?\d+)?|\.\d+(?:[eE][-+]?\d+)?|\d+[eE][-+]?\d+|\.(?:inf|nan))$"),
    "-+0123456789.",
)


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read, merge, override and validate a recipe.

    Args:
        path: YAML file. `extends:` names one file or a list of files (relative to it), merged in order before it.
            A name that begins with ``recipes/`` and is not there means the recipe that ships with the package.
        overrides: ``a.b=value`` strings, values in YAML, applied last.

    Raises:
        InputError: naming file, key path, value found, values allowed and the nearest valid key.
    """
    path = existing_or_shipped(path)
    values = _read(path, ())
    for override in overrides:
        _apply(values, override)
    if not any(override.partition("=")[0].strip() == "name" for override in overrides):
        _refuse_inherited_name(path, values)
    _fill_in(values)
    try:
        return Recipe.model_validate(values)
    except ValidationError as error:
        raise InputError(f"recipe {path}:\n" + explain(error, Recipe)) from error


def _refuse_inherited_name(path: Path, values: dict[str, Any]) -> None:
    """Two recipes of one name share a run directory, and the second would go on with the run of the first."""
    own = read_yaml(path.resolve(), "recipe")
    if "name" in values and "name" not in own:
        raise InputError(
            f"recipe {path}: name: {values['name']!r} is inherited ({path.name} extends {own['extends']}), and so this "
            "recipe would share the run directory of the other; give it a name of its own"
        )


def is_base(path: str | Path) -> bool:
    """Whether a recipe file is a base for others: merged with what it extends, it still lacks a required section."""
    values = _read(Path(path), ())
    return any(field.is_required() and name not in values for name, field in Recipe.model_fields.items())


def _read(path: Path, chain: tuple[Path, ...]) -> dict[str, Any]:
    path = path.resolve()
    if path in chain:
        raise InputError(f"{path}: extends itself through {' → '.join(p.name for p in (*chain, path))}")
    values = read_yaml(path, "recipe", f" (extended by {chain[-1]})" if chain else "")
    for keys in _PATH_KEYS:
        _anchor(values, keys, path.parent)
    for key in ("train", "validation"):
        _anchor_sources(values.get("data"), key, path.parent)
    bases = values.pop("extends", [])
    bases = [bases] if isinstance(bases, str) else bases
    if not isinstance(bases, list) or not all(isinstance(base, str) and "\0" not in base for base in bases):
        raise InputError(f"recipe {path}: extends: expected the name of a file or a list of names, found {bases!r}")
    merged: dict[str, Any] = {}
    for base in bases:
        merged = _merge(merged, _read(existing_or_shipped(base, path.parent), (*chain, path)))
    return _merge(merged, values)


def read_yaml(path: Path, kind: str, context: str = "") -> dict[str, Any]:
    """The mapping in a YAML file, scalars read as YAML 1.2 does. ``kind`` and ``context`` are for messages.

    Raises `InputError` for a file that is missing, not YAML, or no mapping.
    """
    if not _is_there(path):
        near = difflib.get_close_matches(path.name, [p.name for p in path.parent.glob("*.yaml")], n=1)
        hint = f"; did you mean {path.parent / near[0]}?" if near else ""
        raise InputError(f"{kind} {path}: no such file{context}{hint}")
    try:
        values = _parse(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InputError(f"{kind} {path}: not valid YAML: {error}") from error
    if not isinstance(values, dict):
        raise InputError(f"{kind} {path}: expected a mapping of keys, found {type(values).__name__}")
    return values


def _parse(text: str) -> Any:
    try:
        return yaml.load(text, _Loader)
    except (ValueError, RecursionError) as error:  # a date that is none, or brackets without end
        raise yaml.YAMLError(str(error)) from error


def _is_there(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # a name that is too long, for one
        return False


def _anchor(values: dict[str, Any], keys: tuple[str, ...], folder: Path) -> None:
    *parents, last = keys
    for key in parents:
        values = values.get(key) if isinstance(values, dict) else None
    if isinstance(values, dict) and isinstance(values.get(last), str):
        values[last] = _existing(values[last], folder)


def _anchor_sources(data: Any, key: str, folder: Path) -> None:
    """Data files, like the model, are looked up beside the recipe that names them."""
    if not isinstance(data, dict) or key not in data:
        return
    sources = data[key] if isinstance(data[key], list) else [data[key]]
    data[key] = [
        _existing(s, folder)
        if isinstance(s, str)
        else {**s, "path": _existing(s["path"], folder)}
        if isinstance(s, dict) and isinstance(s.get("path"), str)
        else s
        for s in sources
    ]


def _existing(value: str, folder: Path) -> str:
    beside = folder / value
    try:
        return str(beside.resolve()) if not Path(value).is_absolute() and beside.exists() else value
    except OSError:  # as in `_is_there`
        return value


def _merge(base: dict[str, Any], top: dict[str, Any]) -> dict[str, Any]:
    """``top`` over ``base``, mappings key by key. Another policy term replaces the old one with all its numbers."""
    merged = dict(base)
    for key, value in top.items():
        old = merged.get(key)
        both = isinstance(old, dict) and isinstance(value, dict)
        other_variant = both and key == "policy_term" and value.get("name", old.get("name")) != old.get("name")
        merged[key] = _merge(old, value) if both and not other_variant else value
    return merged


def _apply(values: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key.strip():
        raise InputError(f"--set {override!r}: expected KEY.PATH=VALUE")
    try:
        value = _parse(text)
    except yaml.YAMLError as error:
        raise InputError(f"--set {override!r}: the value is not valid YAML: {error}") from error
    *parents, last = key.strip().split(".")
    for parent in parents:
        values = values.setdefault(parent, {})
        if not isinstance(values, dict):
            raise InputError(f"--set {override!r}: {parent!r} is a value, not a section")
    old = values.get(last)
    # Merged under its own name: another policy term replaces the old one with all its numbers here, too.
    values |= _merge({last: old}, {last: value})


def _fill_in(values: dict[str, Any]) -> None:
    """The objective needs the longest response (Dr.GRPO's constant); the rollout section knows it."""
    rollout, objective = values.get("rollout") or {}, values.get("objective") or {}
    if isinstance(rollout, dict) and isinstance(objective, dict):
        default = RolloutConfig.model_fields["max_response_length"].default
        values["objective"] = with_max_response_length(objective, rollout.get("max_response_length", default))


def explain(error: ValidationError, schema: type[BaseModel]) -> str:
    """What is wrong with values for ``schema``, a line for each: key, value found, values allowed, nearest key."""
    lines = []
    for item in error.errors():
        location = ".".join(str(part) for part in item["loc"])
        message = item["msg"].removeprefix("Value error, ")
        if item["type"] == "extra_forbidden":
            lines.append(f"{location}: unknown key{_nearest(item['loc'], schema)}")
        elif item["type"] == "missing":
            lines.append(f"{location}: missing, and it has no default")
        elif item["type"] == "value_error":
            lines += [f"{location}: {line}" if location else line for line in message.splitlines()]
        else:
            lines.append(f"{location}: found {item['input']!r}; {message[0].lower()}{message[1:]}")
    return "\n".join(f"  {line}" for line in lines)


def _nearest(location: tuple[Any, ...], schema: type[BaseModel]) -> str:
    """``; did you mean …?`` by walking the schema to where the unknown key stands."""
    model: Any = schema
    for part in location[:-1]:
        field = model.model_fields.get(part) if isinstance(part, str) and _is_section(model) else None
        if field is not None:
            model = next((t for t in _sections(field.annotation)), None)
        # List indices and the tags of unions are no fields: stay where we are.
    if not _is_section(model):
        return ""
    allowed = list(model.model_fields)
    near = difflib.get_close_matches(str(location[-1]), allowed, n=1, cutoff=0.5)
    return f"; did you mean {near[0]!r}?" if near else f"; allowed are {', '.join(allowed)}"


def _is_section(model: Any) -> bool:
    return isinstance(model, type) and issubclass(model, BaseModel)


def _sections(annotation: Any):
    if _is_section(annotation):
        yield annotation
    for argument in get_args(annotation):
        yield from _sections(argument)
