"""Makes problems of a file's rows: {problem, answer} or verl's columns, text or chat messages, tools."""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from decimal import Decimal
from itertools import islice
from pathlib import Path
from typing import Any

from megatron_rl.config.base import how_to_download
from megatron_rl.config.data import DataSourceConfig
from megatron_rl.data.files import (
    EXTENSIONS,
    column_names,
    has_values,
    how_to_convert,
    jsonl_rows,
    parquet_rows,
)
from megatron_rl.errors import InputError, shown

_MAX_DEPTH = 100  # deepest nesting of objects and lists
PROMPT_KEYS = ("prompt", "problem", "question")
ANSWER_KEYS = ("reward_model.ground_truth", "answer", "ground_truth")
_OTHER_KEYS = ("id", "data_source", "extra_info", "tools", "system")  # read under these names alone
_MEDIA_KEYS = ("images", "image", "videos", "video", "audios", "audio")
_EXACT_BELOW = 2**53  # larger whole numbers may differ from those in the file
_CHECKED_ROWS = 100  # number of rows that `check_source` reads
_SHOWN_NAMES = 50  # largest number of columns that a message lists
_LIKE_MESSAGES = re.compile(r"""[\[{]\s*\{?\s*['"](?:role|content|messages)['"]\s*:""")
Message = dict[str, str]


def check_depth(value: Any, what: str, where: str) -> None:
    """Raise InputError if ``value`` nests too deep for the functions that write it."""
    level = [value]
    for _ in range(_MAX_DEPTH):
        level = [
            part
            for item in level
            if isinstance(item, dict | list)
            for part in (item.values() if isinstance(item, dict) else item)
        ]
        if not level:
            return
    raise InputError(f"{where}: column {what!r} nests deeper than {_MAX_DEPTH} objects and lists; flatten it")


@dataclass(frozen=True)
class Problem:
    """One row, not yet tokenized. ``where`` names the row in messages: file and line or row number."""

    id: str  # "<source name>:<value of the id column, or row number>"
    question: str | list[Message]
    answer: str
    data_source: str
    extra: dict[str, Any]
    where: str
    tools: list[Any] | None = None  # for the chat template


@dataclass(frozen=True)
class Columns:
    """The columns of a file by meaning, resolved on its first row."""

    prompt: str
    answer: str
    id: str | None
    unused: tuple[str, ...] = ()  # parts of objects as ``name.part``


def check_source(config: DataSourceConfig) -> Columns:
    """Return the columns of a file. Quick. Raises InputError if the first rows are unusable."""
    for _ in islice(read_problems(config), _CHECKED_ROWS):
        pass  # raises for an unusable row
    columns = find_columns(config, next(_rows(config))[1])
    path = Path(config.path)
    if path.suffix == ".parquet":
        names = column_names(path)
    else:
        names = [name for _, row in islice(_rows(config), _CHECKED_ROWS) for name in _names(row)]
    used = [*filter(None, (columns.prompt, columns.answer, columns.id)), *_OTHER_KEYS]
    unused = [name for name in dict.fromkeys(names) if not any(f"{name}.".startswith(f"{key}.") for key in used)]
    return replace(columns, unused=tuple(unused))


def read_problems(config: DataSourceConfig) -> Iterator[Problem]:
    """Yield the rows of a file in order.

    Raises InputError for a missing file or unknown format, no rows, a broken or incomplete row, a missing column, or an
    id that occurs twice.
    """
    name = config.label
    columns: Columns | None = None
    seen: dict[str, str] = {}
    for number, (where, row) in enumerate(islice(_rows(config), config.limit)):
        columns = columns or find_columns(config, row)
        if columns.id is None and row.get("id") is not None:
            raise InputError(f"{where}: column 'id' is null in the first row and not here; fill it in")
        if media := [name for name in _MEDIA_KEYS if row.get(name)]:
            raise InputError(_no_media(where, media[0]))
        key = str(number) if columns.id is None else _scalar(row, columns.id, where)
        if key in seen:
            raise InputError(f"{where}: id {key!r} occurs twice, first in {seen[key]}; rename one")
        if columns.id is not None:
            seen[key] = where
        yield Problem(
            id=f"{name}:{key}",
            question=_with_system(_question(row, columns.prompt, where), row, where),
            answer=_scalar(row, columns.answer, where),
            data_source=_optional_text(row, "data_source", where) or name,
            extra=_extra(row, where),
            where=where,
            tools=_tools(row, where),
        )
    if columns is None:
        raise InputError(f"{config.path}: the dataset is empty; at least one row is needed")


def find_columns(config: DataSourceConfig, row: dict[str, Any]) -> Columns:
    """Return the columns for ``config``, resolved on a row. Keys that are not configured are guessed by name."""

    def resolve(key: str, wanted: str | None, known: tuple[str, ...]) -> str:
        candidates = (wanted,) if wanted else known
        column = next((name for name in candidates if _lookup(row, name) is not None), None)
        if column is not None:
            return column
        if empty := next((name for name in candidates if _holds(row, name)), None):
            raise InputError(
                f"{config.path}: column {empty!r}, taken for the {key}, is null in the first row; fill it in, or name "
                f"another column with {key}_key in this source"
            )
        path = Path(config.path)
        available = sorted(column_names(path) if path.suffix == ".parquet" else _names(row))
        short = [name for name in available[:_SHOWN_NAMES] if len(name) <= 100]
        near = difflib.get_close_matches(wanted or known[0], short, n=1, cutoff=0.5)
        hint = f"; did you mean {shown(near[0], 60)}?" if near else ""
        expected = repr(wanted) if wanted else "any of " + ", ".join(known)
        names = ", ".join(shown(name, 60)[1:-1] for name in available[:_SHOWN_NAMES])
        names += f" and {len(available) - _SHOWN_NAMES} more" if len(available) > _SHOWN_NAMES else ""
        raise InputError(
            f"{config.path}: no column for the {key}: expected {expected}, found {names}{hint} "
            f"(set {key}_key in this source)"
        )

    prompt = resolve("prompt", config.prompt_key, PROMPT_KEYS)
    answer = resolve("answer", config.answer_key, ANSWER_KEYS)
    return Columns(prompt, answer, "id" if row.get("id") is not None else None)


def answer_text(value: Any) -> str | None:
    """Return a gold answer as text: "142" for ``142.0``, "0.00001" for ``1e-05``; None if it is not an answer."""
    if isinstance(value, list) and len(value) == 1:  # some verl files wrap the answer in a list
        value = value[0]
    if isinstance(value, bool) or not isinstance(value, str | int | float | Decimal):
        return None
    if isinstance(value, float | Decimal):
        if not math.isfinite(value):
            return None
        exact = value.normalize() if isinstance(value, Decimal) else Decimal(repr(value))
        return format(exact or Decimal(0), "f").removesuffix(".0")  # the digits of the file, without an exponent
    return str(value).strip() or None


def _scalar(row: dict[str, Any], key: str, where: str) -> str:
    value = _lookup(row, key)
    text = answer_text(value)
    if text is None:
        raise InputError(f"{where}: column {key!r} must hold text or a number, found {shown(value, 80)}")
    if isinstance(value, float) and abs(value) >= _EXACT_BELOW:
        raise InputError(
            f"{where}: column {key!r} holds {value!r}, a number that a file keeps only to 16 digits; write it as text"
        )
    return _encodable(text, key, where)


def _encodable(text: str, key: str, where: str) -> str:
    r"""Return ``text``. Raises InputError for half a character, such as ``\ud800``: tokenizers and files reject it."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(
            f"{where}: column {key!r} holds {text[error.start]!r} at position {error.start}, half of a UTF-16 pair "
            "that is not a character; write the character itself, or remove it"
        ) from error
    return text


def _optional_text(row: dict[str, Any], key: str, where: str) -> str:
    """Return the text of a column, or "" if the row has none."""
    value = row.get(key)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise InputError(f"{where}: column {key!r} must hold text, found {shown(value, 80)}")
    return _encodable(value, key, where)


def _extra(row: dict[str, Any], where: str) -> dict[str, Any]:
    """Return the row's extra columns for its reward function."""
    value = row.get("extra_info")
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise InputError(
            f"{where}: column 'extra_info' must hold an object, found {shown(value, 80)}; a reward function gets its "
            "keys. Write it as an object, or rename the column"
        )
    check_depth(value, "extra_info", where)
    return value


def _question(row: dict[str, Any], key: str, where: str) -> str | list[Message]:
    value = _lookup(row, key)
    if isinstance(value, str):
        value = _from_json(value, key, where)
    if isinstance(value, str) and value.strip():
        return _encodable(value, key, where)
    if isinstance(value, list) and value and all(isinstance(item, dict) and "role" in item for item in value):
        return [_message(item, number, key, where) for number, item in enumerate(value)]
    raise InputError(
        f"{where}: column {key!r} must hold text or a list of {{role, content}} messages, found {shown(value, 80)}"
    )


def _from_json(text: str, key: str, where: str) -> str | list[Any]:
    """Return the messages that ``text`` holds as JSON, or ``text`` where it holds none."""
    stripped = text.strip()
    if stripped[:1] not in ("[", "{"):
        return text
    try:
        value = json.loads(stripped)
    except (ValueError, RecursionError) as error:
        if _LIKE_MESSAGES.match(stripped):
            raise InputError(
                f"{where}: column {key!r} looks like chat messages as JSON text and is none: {shown(error)}; write "
                "json.dumps(messages), or the list itself"
            ) from error
        return text
    value = value.get("messages", [value]) if isinstance(value, dict) else value
    is_chat = isinstance(value, list) and value and all(isinstance(item, dict) and "role" in item for item in value)
    return value if is_chat else text


def _message(item: dict[str, Any], number: int, key: str, where: str) -> Message:
    """Return role and content of a chat message. Raises InputError for anything else that it says."""
    place = f"{where}: message {number} of column {key!r}"
    if more := [name for name, content in item.items() if content and name not in ("role", "content")]:
        raise InputError(
            f"{place} has {shown(more[0], 60)}, which is not read: only role and content are. Remove it, or write it "
            "into the content"
        )
    content = item.get("content")
    if isinstance(content, list) and content:
        content = "".join(_part(part, place) for part in content)
    if not isinstance(content, str) or not isinstance(item["role"], str):
        raise InputError(f"{place}: role and content must be text, found {shown(item, 80)}")
    return {"role": _encodable(item["role"], key, where), "content": _encodable(content, key, where)}


def _part(part: Any, place: str) -> str:
    """Return the text of a part of a message, {type: text, text: …}."""
    if isinstance(part, dict) and isinstance(part.get("text"), str) and part.get("type", "text") == "text":
        return part["text"]
    kind = part.get("type") if isinstance(part, dict) else part
    raise InputError(f"{place} has a part of type {shown(kind, 60)}, which is not read: the model sees text alone")


def _with_system(question: str | list[Message], row: dict[str, Any], where: str) -> str | list[Message]:
    """Return ``question`` with the row's system text in front."""
    text = _optional_text(row, "system", where)
    if not text:
        return question
    messages = [{"role": "user", "content": question}] if isinstance(question, str) else question
    if messages[0]["role"] == "system":
        raise InputError(f"{where}: column 'system' has a text, and the chat begins with a system message; remove one")
    return [{"role": "system", "content": text}, *messages]


def _tools(row: dict[str, Any], where: str) -> list[Any] | None:
    """Return the row's tools, a list of objects or the JSON text of one; None if it has none."""
    value = row.get("tools")
    if isinstance(value, str) and value.strip():
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise InputError(f"{where}: column 'tools' is text and not JSON: {shown(error)}") from error
    if not value:
        return None
    if not isinstance(value, list) or not all(isinstance(tool, dict) and tool for tool in value):
        raise InputError(f"{where}: column 'tools' must hold a list of objects, found {shown(value, 80)}")
    check_depth(value, "tools", where)
    _encodable(json.dumps(value, ensure_ascii=False, default=str), "tools", where)
    return _without_nulls(value) if ", row " in where else value


def _without_nulls(value: Any) -> Any:
    """Return ``value`` without null entries of objects: parquet fills in the keys of other rows."""
    if isinstance(value, dict):
        return {key: _without_nulls(part) for key, part in value.items() if part is not None}
    return [_without_nulls(part) for part in value] if isinstance(value, list) else value


def _no_media(where: str, name: str) -> str:
    return (
        f"{where}: column {name!r} is not read: the model sees text alone. Use rows without it, or rename the "
        "column if it does not belong to the prompt"
    )


def _lookup(row: dict[str, Any], key: str) -> Any:
    """Return ``row[key]``, else ``row["a"]["b"]`` for a key ``a.b``, else None."""
    if key in row:
        return row[key]
    value: Any = row
    for part in key.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def _holds(row: dict[str, Any], key: str) -> bool:
    """Return whether ``row`` has a column ``key``, even if it is null."""
    above, _, last = key.rpartition(".")
    parent = _lookup(row, above) if above else row
    return key in row or (isinstance(parent, dict) and last in parent)


def _names(row: dict[str, Any], prefix: str = "") -> list[str]:
    names = []
    for key, value in row.items():
        names += _names(value, f"{prefix}{key}.") if isinstance(value, dict) and not prefix else [prefix + key]
    return names


def _rows(config: DataSourceConfig) -> Iterator[tuple[str, dict[str, Any]]]:
    path = Path(config.path)
    if "\0" in config.path:
        raise InputError(f"{config.path!r}: a path cannot hold a NUL character")
    if path.suffix not in EXTENSIONS:
        allowed = " or ".join(EXTENSIONS)
        command = how_to_convert(path) if path.exists() else ""
        hint = f"; convert it: {command}" if command else _hub_hint(config.path)
        raise InputError(f"{config.path}: unknown kind of dataset {path.suffix!r}; allowed is {allowed}{hint}")
    if not path.is_file():
        near = difflib.get_close_matches(path.name, [p.name for p in path.parent.glob("*")], n=1)
        hint = f"; did you mean {path.parent / near[0]}?" if near else ""
        hint += _hub_hint(config.path)
        raise InputError(f"{config.path}: no such file (looked in {path.resolve().parent}){hint}")
    if path.suffix == ".jsonl":
        return jsonl_rows(path)
    keys = (config.prompt_key, config.answer_key, *PROMPT_KEYS, *ANSWER_KEYS)
    names = column_names(path)
    for name in _MEDIA_KEYS:
        if any(column == name or column.startswith(f"{name}.") for column in names) and has_values(path, name):
            raise InputError(_no_media(config.path, name))
    return parquet_rows(path, [*filter(None, keys), *_OTHER_KEYS])


def _hub_hint(path: str) -> str:
    command = how_to_download(path, "dataset")
    return (
        f"; if it is a dataset of the Hugging Face hub, `{command}` brings it into the local cache" if command else ""
    )
