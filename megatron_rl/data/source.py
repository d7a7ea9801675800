"""Reads files of problems row by row: JSONL and parquet, {problem, answer} and verl's columns alike."""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from megatron_rl.config.data import DataSourceConfig
from megatron_rl.config.hub import how_to_download
from megatron_rl.errors import InputError

PROMPT_KEYS = ("prompt", "problem", "question")
ANSWER_KEYS = ("reward_model.ground_truth", "answer", "ground_truth")
_EXTENSIONS = (".jsonl", ".parquet")
_BATCH_ROWS = 1024  # of a parquet file in memory at a time
_CHECKED_ROWS = 100  # that `check_source` reads

Message = dict[str, str]


@dataclass(frozen=True)
class Problem:
    """One row, not yet tokenized. ``where`` names the row in messages: file and line or row number."""

    id: str  # "<source name>:<value of the id column, or row number>"
    question: str | list[Message]
    answer: str
    data_source: str
    extra: dict[str, Any]
    where: str


@dataclass(frozen=True)
class Columns:
    """Which columns of a file mean what, after looking at its first row."""

    prompt: str
    answer: str
    id: str | None


def check_source(config: DataSourceConfig) -> Columns:
    """Raise InputError for a file that cannot be used, judging by its first rows. Needs no tokenizer; quick."""
    rows = list(islice(read_problems(config), _CHECKED_ROWS))
    assert rows, "read_problems raises on an empty file"
    return find_columns(config, next(_rows(config))[1])


def read_problems(config: DataSourceConfig) -> Iterator[Problem]:
    """The rows of a file in order. InputError: file missing or of another kind, no rows, a broken or incomplete row,
    a column that is not there, an id that occurs twice."""
    name = config.label
    columns: Columns | None = None
    seen: dict[str, str] = {}
    for number, (where, row) in enumerate(islice(_rows(config), config.limit)):
        columns = columns or find_columns(config, row)
        key = str(number) if columns.id is None else _scalar(row, columns.id, where)
        if key in seen:
            raise InputError(f"{where}: id {key!r} occurs twice, first in {seen[key]}; set id_key to a unique column")
        if columns.id is not None:
            seen[key] = where
        extra = row.get("extra_info")
        yield Problem(
            id=f"{name}:{key}",
            question=_question(row, columns.prompt, where),
            answer=_scalar(row, columns.answer, where),
            data_source=_encodable(str(row.get("data_source") or name), "data_source", where),
            extra=extra if isinstance(extra, dict) else {},
            where=where,
        )
    if columns is None:
        raise InputError(f"{config.path}: the dataset is empty; at least one row is needed")


def find_columns(config: DataSourceConfig, row: dict[str, Any]) -> Columns:
    """Resolve the keys of ``config`` on a row; what is not configured is recognised."""

    def resolve(key: str, wanted: str | None, known: tuple[str, ...]) -> str:
        candidates = (wanted,) if wanted else known
        found = next((name for name in candidates if _lookup(row, name) is not None), None)
        if found is not None:
            return found
        if empty := next((name for name in candidates if _holds(row, name)), None):
            raise InputError(
                f"{config.path}: column {empty!r}, taken for the {key}, is null in the first row; fill it in, or name "
                f"another column with {key}_key in this source"
            )
        available = sorted(_names(row))
        near = difflib.get_close_matches(wanted or known[0], available, n=1, cutoff=0.5)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        expected = repr(wanted) if wanted else "any of " + ", ".join(known)
        raise InputError(
            f"{config.path}: no column for the {key}: expected {expected}, found {', '.join(available)}{hint} "
            f"(set {key}_key in this source)"
        )

    prompt = resolve("prompt", config.prompt_key, PROMPT_KEYS)
    answer = resolve("answer", config.answer_key, ANSWER_KEYS)
    if config.id_key:
        resolve("id", config.id_key, ())
    return Columns(prompt, answer, config.id_key or ("id" if row.get("id") is not None else None))


def answer_text(value: Any) -> str | None:
    """A gold answer as text: ``142.0`` → "142", ``0.5`` → "0.5"; None for what is no answer."""
    if isinstance(value, list) and len(value) == 1:  # some verl files wrap the answer in a list
        value = value[0]
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return None
    if isinstance(value, float):
        if not math.isfinite(value):
            return None
        return str(int(value)) if value.is_integer() else repr(value)
    return str(value).strip() or None


def _scalar(row: dict[str, Any], key: str, where: str) -> str:
    value = _lookup(row, key)
    text = answer_text(value)
    if text is None:
        raise InputError(f"{where}: column {key!r} must hold text or a number, found {_short(value)}")
    return _encodable(text, key, where)


def _encodable(text: str, key: str, where: str) -> str:
    r"""``text``, unless it holds half of a character: JSON can write ``\ud800``, no tokenizer or file takes it."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(
            f"{where}: column {key!r} holds {text[error.start]!r} at position {error.start}, half of a UTF-16 pair "
            "that is no character; write the character itself, or remove it"
        ) from error
    return text


def _question(row: dict[str, Any], key: str, where: str) -> str | list[Message]:
    value = _lookup(row, key)
    if isinstance(value, str) and value.strip():
        return _encodable(value, key, where)
    if isinstance(value, list) and value and all(_is_message(item) for item in value):
        return [{part: _encodable(item[part], key, where) for part in ("role", "content")} for item in value]
    raise InputError(
        f"{where}: column {key!r} must hold text or a list of {{role, content}} messages, found {_short(value)}"
    )


def _is_message(item: Any) -> bool:
    return isinstance(item, dict) and isinstance(item.get("role"), str) and isinstance(item.get("content"), str)


def _short(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= 80 else shown[:77] + "..."


def _lookup(row: dict[str, Any], key: str) -> Any:
    """``row[key]``, else ``row["a"]["b"]`` for a key ``a.b``; None where there is nothing."""
    if key in row:
        return row[key]
    value: Any = row
    for part in key.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def _holds(row: dict[str, Any], key: str) -> bool:
    """Whether ``row`` has a column ``key``, be it null."""
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
    if path.suffix not in _EXTENSIONS:
        allowed = " or ".join(_EXTENSIONS)
        hint = _hub_hint(config.path)
        raise InputError(f"{config.path}: unknown kind of dataset {path.suffix!r}; allowed is {allowed}{hint}")
    if not path.is_file():
        near = difflib.get_close_matches(path.name, [p.name for p in path.parent.glob("*")], n=1)
        hint = f"; did you mean {path.parent / near[0]}?" if near else ""
        hint += _hub_hint(config.path)
        raise InputError(f"{config.path}: no such file (looked in {path.resolve().parent}){hint}")
    return _jsonl_rows(path) if path.suffix == ".jsonl" else _parquet_rows(path)


def _hub_hint(path: str) -> str:
    command = how_to_download(path, "dataset")
    return (
        f"; if it is a dataset of the Hugging Face hub, `{command}` brings it into the local cache" if command else ""
    )


def _jsonl_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            where = f"{path}, line {number}"
            if not line.strip():
                continue
            try:
                row = json.loads(line.decode("utf-8-sig"))
            except (ValueError, RecursionError) as error:  # no UTF-8, no JSON, or an integer of over 4300 digits
                raise InputError(f"{where}: not a JSON object: {error}") from error
            if not isinstance(row, dict):
                raise InputError(f"{where}: expected a JSON object {{...}}, found {_short(row)}")
            yield where, row


def _parquet_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    import pyarrow
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(path)
    except (pyarrow.ArrowException, OSError) as error:
        raise InputError(f"{path}: not a parquet file: {error}") from error
    batches, number = file.iter_batches(batch_size=_BATCH_ROWS), 0
    while True:
        try:
            rows = next(batches).to_pylist()
        except StopIteration:
            return
        except (pyarrow.ArrowException, OSError, ValueError) as error:  # a page that was damaged, or text that is none
            raise InputError(
                f"{path}: cannot be read after row {number}: {' '.join(str(error).split())}; write or copy it again"
            ) from error
        for row in rows:
            yield f"{path}, row {number}", row
            number += 1
