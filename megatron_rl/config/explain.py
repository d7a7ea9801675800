"""Error messages of a recipe: key, value found, values allowed, and the file; and ways through the recipe's schema."""

from __future__ import annotations

import difflib
import json
import re
import reprlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from megatron_rl.config import foreign_keys
from megatron_rl.config.base import FUNCTION_PATH, LookedUp, Patch, ShortList, _Rewritten, cached
from megatron_rl.config.recipe import REMOVED
from megatron_rl.config.yaml12 import Where


def is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def sections_of(annotation: Any) -> list[type[BaseModel]]:
    """Every section that a field's type names: one, the variants of a union, or those of items."""
    if is_section(annotation):
        return [annotation]
    return [section for argument in get_args(annotation) for section in sections_of(argument)]


def is_plain_union(annotation: Any) -> bool:
    """Whether a value may have one of several types, none of them a section: `all | n`. Null does not count."""
    union = get_origin(annotation) in (Union, UnionType) and not sections_of(annotation)
    return union and len([kind for kind in get_args(annotation) if kind is not type(None)]) > 1


def tag_key(variants: list[type[BaseModel]]) -> str | None:
    """The key that tells ``variants`` of a union apart; None for a single section."""
    return next((key for key in ("name", "mode") if len(variants) > 1 and tag_of(variants[0], key)), None)


def tag_of(variant: type[BaseModel], key: str) -> str | None:
    field = variant.model_fields.get(key)
    return get_args(field.annotation)[0] if field is not None and get_origin(field.annotation) is Literal else None


@dataclass(frozen=True)
class Place:
    """Where an error stands. ``keys``: as a recipe writes them, without the tags of unions. ``variants``: the sections
    that may stand there; several where a union's tag is not known. ``field``: what is wrong, if it is a known one."""

    keys: tuple[str | int, ...]
    variants: tuple[type[BaseModel], ...]
    field: FieldInfo | None = None


def locate(schema: type[BaseModel], location: tuple[Any, ...]) -> Place:
    """The place of pydantic's ``location``. ``variants`` are those of the section that holds its last key."""
    keys: list[str | int] = []
    holder, variants, field, tag = (schema,), (schema,), None, None
    for part in location:
        by_tag = [v for v in variants if tag is not None and tag_of(v, tag) == part]
        if by_tag:
            variants, tag = tuple(by_tag), None
            continue
        if field is not None and is_plain_union(field.annotation) and isinstance(part, str):
            continue  # the name of a type of the union
        keys.append(part)
        known = next((v.model_fields[part] for v in variants if part in v.model_fields), None)
        if isinstance(part, int) or (field is not None and not known and get_origin(field.annotation) is dict):
            continue  # an item: its sections are those of its list or mapping
        holder, field = variants, known
        variants = tuple(sections_of(known.annotation)) if known is not None else ()
        tag = tag_key(list(variants))
    return Place(tuple(keys), holder if field is not None or not variants else variants, field)


def paths_to(name: str, schema: type[BaseModel], above: tuple[str, ...] = ()) -> Iterator[str]:
    """Dotted paths of every key ``name`` in ``schema``; sections in lists and unions left out."""
    for key, field in schema.model_fields.items():
        if key == name:
            yield ".".join((*above, key))
        sections = sections_of(field.annotation)
        if len(sections) == 1 and get_origin(field.annotation) is not list:
            yield from paths_to(name, sections[0], (*above, key))


def expand(values: dict[str, Any], schema: type[BaseModel]) -> dict[str, Any]:
    """Return ``values`` with everything written out that the schema lets one write shorter."""
    return _rewritten(values, schema, lambda value, field: _expanded(value, field))


def _expanded(value: Any, field: FieldInfo) -> Any:
    for mark in reversed(field.metadata):  # as pydantic runs them: the last one first
        # What is off by null stays null: a message shall show what was written.
        if isinstance(mark, _Rewritten) and (value is not None or isinstance(mark, ShortList)):
            value = mark.expand(value)
    return value


def anchored(values: dict[str, Any], schema: type[BaseModel], *folders: Path) -> dict[str, Any]:
    """Return ``values`` with paths to read replaced by the first of ``folders`` that has them, names of the hub by what
    its cache holds; else as written. InputError for a name that says too little (`base.cached`)."""

    def look_up(value: Any, field: FieldInfo) -> Any:
        mark = next((mark for mark in field.metadata if isinstance(mark, LookedUp)), None)
        if mark is None:
            return value
        if isinstance(value, dict):
            return {key: _existing(item, folders, mark) for key, item in value.items()}
        return _existing(value, folders, mark)

    return _rewritten(values, schema, look_up)


def _existing(value: Any, folders: tuple[Path, ...], mark: LookedUp) -> Any:
    if not isinstance(value, str) or not value:
        return value
    path, colon, function = value.rpartition(":") if mark.is_function else (value, "", "")
    if mark.is_function and not path.endswith(".py"):
        return value
    for folder in folders:
        try:
            beside = folder / path
            if not Path(path).is_absolute() and beside.exists():
                return f"{beside.resolve()}{colon}{function}"
        except (OSError, ValueError):  # a name that is too long, for one
            return value
    if mark.hub is not None and (held := cached(path, mark.hub)) is not None:
        return str(held)
    return value


def _rewritten(
    values: dict[str, Any], schema: type[BaseModel], change: Callable[[Any, FieldInfo], Any]
) -> dict[str, Any]:
    rewritten = dict(values)
    for name, field in schema.model_fields.items():
        if name not in rewritten:
            continue
        rewritten[name] = value = change(rewritten[name], field)
        sections = sections_of(field.annotation)
        if get_origin(field.annotation) is list:
            rewritten[name] = _items(value, lambda item, sections=sections: _in_section(item, sections, change))
        elif isinstance(value, dict) and get_origin(field.annotation) is not dict:
            rewritten[name] = _in_section(value, sections, change)
    return rewritten


def _in_section(
    values: dict[str, Any], sections: list[type[BaseModel]], change: Callable[[Any, FieldInfo], Any]
) -> dict[str, Any]:
    """Return ``values`` rewritten by the one of ``sections`` that has their tag; unchanged if none has it."""
    if len(sections) > 1:
        key = tag_key(sections)
        sections = [section for section in sections if key is not None and tag_of(section, key) == values.get(key)]
    return _rewritten(values, sections[0], change) if sections else values


def _items(value: Any, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    if isinstance(value, list):
        return [change(item) if isinstance(item, dict) else item for item in value]
    if isinstance(value, Patch):
        return Patch({index: change(item) if isinstance(item, dict) else item for index, item in value.items()})
    return value


Origins = Mapping[Where, str]
"""Where each value was set: file and line, or the `--set` that did it."""

_PATTERNS = {
    r"^[A-Za-z0-9_-][A-Za-z0-9._-]*$": "use letters, digits, '.', '_' and '-', with no '.' first",
    r"^[A-Za-z0-9_-]+$": "use letters, digits, '_' and '-'",
    FUNCTION_PATH: "write a function of your own as path/to/file.py:function",
}
_SECTION_ERRORS = ("model_type", "dict_type", "model_attributes_type", "dataclass_type")
_TAG_ERRORS = ("union_tag_invalid", "union_tag_not_found")
_MAX_SHOWN, _MAX_PROBLEMS = 80, 40
_KEY_PATH = re.compile(r"\b[a-z_]\w*(?:\.\w+)+\b")


def explain(error: ValidationError, schema: type[BaseModel], origins: Origins | None = None) -> str:
    """What is wrong with values for ``schema``, a line for each problem."""
    lines = []
    problems = [(item, locate(schema, item["loc"])) for item in error.errors(include_url=False)[:_MAX_PROBLEMS]]
    for item, place in _merged(problems):
        tag = (tag_key(sections_of(place.field.annotation)) or "name",) if item["type"] in _TAG_ERRORS else ()
        for line in _describe(item, place, schema):
            lines.append(line + _set_in(line, place.keys + tag, origins or {}))
    if error.error_count() > _MAX_PROBLEMS:
        lines.append(f"and {error.error_count() - _MAX_PROBLEMS} problems more")
    return "\n".join(f"  {line}" for line in dict.fromkeys(lines))


def _merged(problems: list[tuple[Any, Place]]) -> list[tuple[Any, Place]]:
    """Return ``problems`` with one message for each value of a plain union, in place of one for each of its types."""
    merged: list[tuple[Any, Place]] = []
    for item, place in problems:
        if place.field is not None and is_plain_union(place.field.annotation):
            if item["type"] == "literal_error":
                says = f"allowed: {item['ctx']['expected']}{_near(item['input'], item['ctx'])}"
            else:
                says = _PATTERNS.get(item.get("ctx", {}).get("pattern"), item["msg"])
            says = f"{says[0].lower()}{says[1:]}"
            if merged and merged[-1][1].keys == place.keys:
                merged[-1][0]["msg"] += f", or {says}"
                continue
            item = {**item, "type": "union", "msg": says}
        merged.append((item, place))
    return merged


def _describe(item: Any, place: Place, schema: type[BaseModel]) -> list[str]:
    kind, where, shown_value = item["type"], dotted(place.keys), shown(item["input"])
    message = re.sub(r"^Value error, | for <class '.*'>| after validation, not \d+", "", item["msg"])
    if kind == "extra_forbidden":
        if (removed := REMOVED.get(dotted([key for key in place.keys if isinstance(key, str)]))) is not None:
            return [f"{where}: removed: {removed[1]}; leave it out"]
        if theirs := foreign_keys.hint(where):
            return [f"{where}: unknown key{_of_variant(place)}; {theirs}; allowed: {', '.join(_keys_of(place))}"]
        return [f"{where}: unknown key{_of_variant(place)}{_remedy(place, schema)}"]
    if kind == "missing":
        return [f"{where}: missing, and it has no default"]
    if kind == "value_error":
        own = place.field is None or not sections_of(place.field.annotation)
        return [_joined(where, line, own) for line in message.splitlines()]
    if kind == "literal_error":
        return [f"{where}: found {shown_value}; allowed: {item['ctx']['expected']}{_near(item['input'], item['ctx'])}"]
    if kind == "string_pattern_mismatch":
        return [f"{where}: found {shown_value}; {_PATTERNS.get(item['ctx']['pattern'], message)}"]
    variants = sections_of(place.field.annotation) if place.field is not None else []
    if kind in _TAG_ERRORS:
        key = tag_key(variants) or "name"
        tags = [str(tag_of(variant, key)).replace("function", "path/to/file.py:function") for variant in variants]
        value = item["input"].get(key) if isinstance(item["input"], Mapping) else item["input"]
        what = "missing" if kind == "union_tag_not_found" else f"found {shown(value)}"
        return [f"{where}.{key}: {what}; allowed: {', '.join(tags)}{_near(value, tags)}"]
    if kind in _SECTION_ERRORS and variants:
        if key := tag_key(variants):
            allowed = f"{key}: {', '.join(str(tag_of(variant, key)) for variant in variants)}"
        else:
            allowed = ", ".join(variants[0].model_fields)
        return [f"{where}: found {shown_value}; expected a mapping with the keys {allowed}"]
    return [f"{where}: found {shown_value}; {message[0].lower()}{message[1:]}"]


def dotted(keys: Where) -> str:
    return ".".join(str(key) for key in keys)


def shown(value: Any) -> str:
    """A value as a recipe writes it, shortened."""
    if isinstance(value, bool) or value is None:
        return json.dumps(value)
    text = repr(value) if isinstance(value, str | int | float) else _repr.repr(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[: _MAX_SHOWN - 3]}..."


_repr = reprlib.Repr()  # of a value that nests deeper than Python can write
_repr.maxlevel, _repr.maxstring = 12, _MAX_SHOWN
_repr.maxdict = _repr.maxlist = _repr.maxother = _MAX_SHOWN


def _joined(where: str, line: str, own: bool) -> str:
    """A rule's message behind the path of its section: `mode: …` of `schedule` becomes `schedule.mode: …`."""
    if not where:
        return line
    return f"{where}.{line}" if not own and re.match(r"[a-z_]+: ", line) else f"{where}: {line}"


def _of_variant(place: Place) -> str:
    if len(place.variants) != 1:
        return ""
    tags = ((key, tag_of(place.variants[0], key)) for key in ("name", "mode"))
    return next((f" for {key}: {tag}" for key, tag in tags if tag), "")


def _remedy(place: Place, schema: type[BaseModel]) -> str:
    """What may have been meant, and every key that is allowed there."""
    name = str(place.keys[-1])
    allowed = _keys_of(place)
    above = dotted(place.keys[:-1])
    elsewhere = sorted(paths_to(name, schema), key=lambda path: (not path.startswith(f"{above}."), len(path)))
    near = difflib.get_close_matches(name.lower(), allowed, n=1, cutoff=0.5)
    if elsewhere and (not near or difflib.SequenceMatcher(None, name.lower(), near[0]).ratio() < 0.8):
        near = elsewhere
    hint = f"; did you mean {near[0]!r}?" if near else ";"
    return f"{hint} allowed: {', '.join(allowed)}"


def _keys_of(place: Place) -> list[str]:
    return list(dict.fromkeys(key for variant in place.variants for key in variant.model_fields))


def _near(value: Any, allowed: Any) -> str:
    names = re.findall(r"'([^']*)'", allowed["expected"]) if isinstance(allowed, dict) else allowed
    spelled = {name.lower(): name for name in names}
    near = difflib.get_close_matches(value.lower(), spelled, n=1, cutoff=0.6) if isinstance(value, str) else []
    return f"; did you mean {spelled[near[0]]!r}?" if near else ""


def _set_in(line: str, keys: Where, origins: Origins) -> str:
    """`` (set in FILE:LINE)`` of the value at ``keys``; for a rule between sections, of each key that it names."""
    if keys:
        below = (where for where in origins if where[: len(keys)] == keys)
        above = (keys[:n] for n in range(len(keys) - 1, 0, -1))
        origin = next((origins[where] for where in (keys, *below, *above) if where in origins), None)
        return f" (set in {origin})" if origin else ""
    named = dict.fromkeys(_KEY_PATH.findall(line))
    places = {key: origins.get(tuple(key.split("."))) for key in named}
    text = ", ".join(f"{key} in {place}" for key, place in places.items() if place)
    return f" (set: {text})" if text else ""
