"""What is wrong with a recipe, in the terms of the one who wrote it: key, value found, values allowed, and the file."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ValidationError

from megatron_rl.config.walk import Place, is_plain_union, locate, paths_to, sections_of, tag_key, tag_of
from megatron_rl.config.yaml12 import Where

Origins = Mapping[Where, str]
"""Where each value was set: file and line, or the `--set` that did it."""

_PATTERNS = {
    r"^[A-Za-z0-9_-][A-Za-z0-9._-]*$": "use letters, digits, '.', '_' and '-', with no '.' first",
    r"^[A-Za-z0-9_-]+$": "use letters, digits, '_' and '-'",
}
_SECTION_ERRORS = ("model_type", "dict_type", "model_attributes_type", "dataclass_type")
_TAG_ERRORS = ("union_tag_invalid", "union_tag_not_found")
_MAX_SHOWN = 80
_KEY_PATH = re.compile(r"\b[a-z_]\w*(?:\.\w+)+\b")


def explain(error: ValidationError, schema: type[BaseModel], origins: Origins | None = None) -> str:
    """What is wrong with values for ``schema``, a line for each problem."""
    lines = []
    told = [(item, locate(schema, item["loc"])) for item in error.errors(include_url=False)]
    for item, place in _merged(told):
        tag = (tag_key(sections_of(place.field.annotation)) or "name",) if item["type"] in _TAG_ERRORS else ()
        for line in _describe(item, place, schema):
            lines.append(line + _set_in(line, place.keys + tag, origins or {}))
    return "\n".join(f"  {line}" for line in dict.fromkeys(lines))


def _merged(told: list[tuple[Any, Place]]) -> list[tuple[Any, Place]]:
    """``told`` with what each type of a plain union says of one value in one message."""
    found: list[tuple[Any, Place]] = []
    for item, place in told:
        if place.field is not None and is_plain_union(place.field.annotation):
            says = f"allowed: {item['ctx']['expected']}" if item["type"] == "literal_error" else item["msg"]
            says = f"{says[0].lower()}{says[1:]}"
            if found and found[-1][1].keys == place.keys:
                found[-1][0]["msg"] += f", or {says}"
                continue
            item = {**item, "type": "union", "msg": says}
        found.append((item, place))
    return found


def _describe(item: Any, place: Place, schema: type[BaseModel]) -> list[str]:
    kind, where, found = item["type"], dotted(place.keys), shown(item["input"])
    message = item["msg"].removeprefix("Value error, ")
    if kind == "extra_forbidden":
        return [f"{where}: unknown key{_of_variant(place)}{_remedy(place, schema)}"]
    if kind == "missing":
        return [f"{where}: missing, and it has no default"]
    if kind == "value_error":
        own = place.field is None or not sections_of(place.field.annotation)
        return [_joined(where, line, own) for line in message.splitlines()]
    if kind == "literal_error":
        return [f"{where}: found {found}; allowed: {item['ctx']['expected']}{_near(item['input'], item['ctx'])}"]
    if kind == "string_pattern_mismatch":
        return [f"{where}: found {found}; {_PATTERNS.get(item['ctx']['pattern'], message)}"]
    variants = sections_of(place.field.annotation) if place.field is not None else []
    if kind in _TAG_ERRORS:
        key = tag_key(variants) or "name"
        tags = [str(tag_of(variant, key)) for variant in variants]
        value = item["input"].get(key) if isinstance(item["input"], Mapping) else item["input"]
        what = "missing" if kind == "union_tag_not_found" else f"found {shown(value)}"
        return [f"{where}.{key}: {what}; allowed: {', '.join(tags)}{_near(value, tags)}"]
    if kind in _SECTION_ERRORS and variants:
        if key := tag_key(variants):
            allowed = f"{key}: {', '.join(str(tag_of(variant, key)) for variant in variants)}"
        else:
            allowed = ", ".join(variants[0].model_fields)
        return [f"{where}: found {found}; expected a mapping with the keys {allowed}"]
    return [f"{where}: found {found}; {message[0].lower()}{message[1:]}"]


def dotted(keys: Where) -> str:
    return ".".join(str(key) for key in keys)


def shown(value: Any) -> str:
    """A value as a recipe writes it, shortened."""
    if isinstance(value, bool) or value is None:
        return json.dumps(value)
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[: _MAX_SHOWN - 3]}..."


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
    allowed = list(dict.fromkeys(key for variant in place.variants for key in variant.model_fields))
    above = dotted(place.keys[:-1])
    elsewhere = sorted(paths_to(name, schema), key=lambda path: (not path.startswith(f"{above}."), len(path)))
    near = difflib.get_close_matches(name, allowed, n=1, cutoff=0.5)
    if elsewhere and (not near or difflib.SequenceMatcher(None, name, near[0]).ratio() < 0.8):
        near = elsewhere
    hint = f"; did you mean {near[0]!r}?" if near else ";"
    return f"{hint} allowed: {', '.join(allowed)}"


def _near(value: Any, allowed: Any) -> str:
    names = re.findall(r"'([^']*)'", allowed["expected"]) if isinstance(allowed, dict) else allowed
    near = difflib.get_close_matches(value, names, n=1, cutoff=0.6) if isinstance(value, str) else []
    return f"; did you mean {near[0]!r}?" if near else ""


def _set_in(line: str, keys: Where, origins: Origins) -> str:
    """`` (set in FILE:LINE)`` of the value at ``keys``; for a rule between sections, of each key that it names."""
    if keys:
        found = next((origins[keys[:n]] for n in range(len(keys), 0, -1) if keys[:n] in origins), None)
        return f" (set in {found})" if found else ""
    named = dict.fromkeys(_KEY_PATH.findall(line))
    places = {key: origins.get(tuple(key.split("."))) for key in named}
    told = ", ".join(f"{key} in {place}" for key, place in places.items() if place)
    return f" (set: {told})" if told else ""
