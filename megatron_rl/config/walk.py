"""Ways through the schema of a recipe: what stands at a place, and values changed where a field is marked."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from megatron_rl.config.base import LookedUp, Patch, ShortList, _Rewritten
from megatron_rl.config.hub import cached


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
        found = next((v.model_fields[part] for v in variants if part in v.model_fields), None)
        if isinstance(part, int) or (field is not None and not found and get_origin(field.annotation) is dict):
            continue  # an item: its sections are those of its list or mapping
        holder, field = variants, found
        variants = tuple(sections_of(found.annotation)) if found is not None else ()
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
    """``values`` with everything written out that the schema lets one write shorter."""
    return _rewritten(values, schema, lambda value, field: _expanded(value, field))


def _expanded(value: Any, field: FieldInfo) -> Any:
    for mark in field.metadata:
        # What is off by null stays null: a message shall show what was written.
        if isinstance(mark, _Rewritten) and (value is not None or isinstance(mark, ShortList)):
            value = mark.expand(value)
    return value


def anchored(values: dict[str, Any], schema: type[BaseModel], *folders: Path) -> dict[str, Any]:
    """``values`` with paths to read replaced by the first of ``folders`` that has them, names of the hub by what its
    cache holds; else as written. InputError for a name that says too little (`hub.cached`)."""

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
    found = dict(values)
    for name, field in schema.model_fields.items():
        if name not in found:
            continue
        found[name] = value = change(found[name], field)
        sections = sections_of(field.annotation)
        if len(sections) != 1:
            continue
        if get_origin(field.annotation) is list:
            found[name] = _items(value, lambda item, section=sections[0]: _rewritten(item, section, change))
        elif isinstance(value, dict) and get_origin(field.annotation) is not dict:
            found[name] = _rewritten(value, sections[0], change)
    return found


def _items(value: Any, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    if isinstance(value, list):
        return [change(item) if isinstance(item, dict) else item for item in value]
    if isinstance(value, Patch):
        return Patch({index: change(item) if isinstance(item, dict) else item for index, item in value.items()})
    return value
