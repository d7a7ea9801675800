"""Reads files of problems row by row: JSONL or parquet, with {problem, answer} or verl's columns.

Memory is bounded, although a small file may unpack to gigabytes. A row may take up to `MAX_ROW_BYTES`. For parquet
files, only the used columns are read, and the size of their text is computed before it is unpacked.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from megatron_rl.config.base import how_to_download
from megatron_rl.config.data import DataSourceConfig
from megatron_rl.errors import InputError, shown

if TYPE_CHECKING:
    import pyarrow as pa


MAX_ROW_BYTES = 64 << 20
_MAX_CHUNK_BYTES, _MAX_RATIO = (
    1 << 30,
    200,
)  # limits of a column in a row group: unpacked bytes, and unpacked over packed (about 10 for text)
_BATCH_ROWS = 1024  # rows of a parquet file that are in memory at a time
_MAX_DEPTH = 100  # deepest nesting of objects and lists

Row = dict[str, Any]
_UNREADABLE = (
    OSError,
    ValueError,
    OverflowError,
    LookupError,
    TypeError,
    NotImplementedError,
)  # Arrow's own exceptions are subclasses of these
PROMPT_KEYS = ("prompt", "problem", "question")
ANSWER_KEYS = ("reward_model.ground_truth", "answer", "ground_truth")
_EXTENSIONS = (".jsonl", ".parquet")
_EXACT_BELOW = 2**53  # larger whole numbers may differ from those in the file
_CHECKED_ROWS = 100  # number of rows that `check_source` reads
_SHOWN_NAMES = 50  # largest number of columns that a message lists
Message = dict[str, str]


def jsonl_rows(path: Path) -> Iterator[tuple[str, Row]]:
    """Yield (place, object) per line. Raises InputError for a line that is invalid, too long, or repeats a key."""
    number = 0
    with _opened(path) as lines:
        while line := _next_line(lines, path, number):
            number += 1
            where = f"{path}, line {number}"
            if len(line) > MAX_ROW_BYTES:
                raise InputError(f"{where}: longer than {MAX_ROW_BYTES >> 20} MiB; is it one JSON object a line?")
            if not line.strip():
                continue
            try:
                row = json.loads(line.decode("utf-8-sig"), object_pairs_hook=_object)
            except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, or an integer of over 4300 digits
                raise InputError(f"{where}: not a JSON object: {shown(error)}") from error
            if not isinstance(row, dict):
                raise InputError(f"{where}: expected a JSON object {{...}}, found {shown(row, 80)}")
            yield where, row


def _opened(path: Path) -> BinaryIO:
    try:
        return path.open("rb")
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from error


def _next_line(lines: BinaryIO, path: Path, number: int) -> bytes:
    try:
        return lines.readline(MAX_ROW_BYTES + 1)
    except OSError as error:
        raise InputError(f"{path}: cannot be read after line {number}: {error.strerror}; copy it again") from error


def _object(pairs: list[tuple[str, Any]]) -> Row:
    row = dict(pairs)
    if len(row) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {shown(twice, 80)} occurs twice; keep one")
    return row


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


def column_names(path: Path) -> list[str]:
    """Return the columns of a parquet file; parts of objects as ``name.part``. Raises InputError for other files."""
    import pyarrow as pa

    names = []
    for field in _open(path).schema_arrow:
        inner = field.type if pa.types.is_struct(field.type) else ()
        names += [f"{field.name}.{part.name}" for part in inner] or [field.name]
    return names


def parquet_rows(path: Path, wanted: Sequence[str]) -> Iterator[tuple[str, Row]]:
    """Yield (place, row) with the columns in ``wanted`` that the file has.

    Raises InputError for a file that cannot be read, a column that occurs twice or has values that Python cannot hold,
    and for a row with more than `MAX_ROW_BYTES` of text.
    """
    file = _open(path)
    names = file.schema_arrow.names
    # Read only the wanted parts of an object.
    paths = [file.schema.column(i).path for i in range(len(file.schema))]
    leaves = [leaf for leaf in paths if any(_is_below(leaf, name) for name in wanted)]
    columns = [name for name in dict.fromkeys(names) if any(_is_below(leaf, name) for leaf in leaves)]
    if twice := [name for name in columns if names.count(name) > 1]:
        raise InputError(f"{path}: two columns are named {shown(twice[0], 80)}; rename one")
    if not columns:
        yield from ((f"{path}, row {number}", {}) for number in range(file.metadata.num_rows))
        return
    number = 0
    batches = _batches(file, path, leaves)
    while True:
        try:
            batch = next(batches, None)
        except _UNREADABLE as error:  # a damaged page
            raise InputError(
                f"{path}: cannot be read after row {number}: {shown(error)}; write or copy it again"
            ) from error
        if batch is None:
            return
        for rows in _slices(batch, path, number):
            lists = {name: _values(rows.column(name), name, path, number) for name in columns}
            for i in range(len(rows)):
                yield f"{path}, row {number}", {name: lists[name][i] for name in columns}
                number += 1


def _open(path: Path) -> Any:
    import pyarrow
    import pyarrow.parquet

    try:
        return pyarrow.parquet.ParquetFile(path)
    except (pyarrow.ArrowException, *_UNREADABLE) as error:
        raise InputError(f"{path}: not a parquet file: {shown(error)}") from error


def _is_below(leaf: str, name: str) -> bool:
    """Return whether ``leaf``, a path in the file's schema, is ``name`` or a part of it."""
    return leaf == name or leaf.startswith(f"{name}.")


def _batches(file: Any, path: Path, leaves: list[str]) -> Iterator[pa.RecordBatch]:
    """Yield batches of the columns ``leaves`` (paths in the file's schema).

    Text stays dictionary-encoded, so that repeated text is stored once.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    texts = set()
    for group in range(file.metadata.num_row_groups):
        about = file.metadata.row_group(group)
        for i in range(about.num_columns):
            chunk = about.column(i)
            if chunk.path_in_schema not in leaves:
                continue
            if chunk.physical_type == "BYTE_ARRAY" and file.schema.column(i).logical_type.type in ("STRING", "NONE"):
                texts.add(chunk.path_in_schema)
            unpacked, packed = chunk.total_uncompressed_size, chunk.total_compressed_size
            if unpacked > max(_MAX_CHUNK_BYTES, _MAX_RATIO * packed):
                raise InputError(
                    f"{path}: column {shown(chunk.path_in_schema, 80)} takes {packed} bytes in the file and "
                    f"{unpacked >> 20} MiB unpacked, which is not plausible for text: write the file again"
                )
    for batch in pq.ParquetFile(path, read_dictionary=sorted(texts)).iter_batches(
        batch_size=_BATCH_ROWS, columns=leaves
    ):
        assert isinstance(batch, pa.RecordBatch)
        yield batch


def _slices(batch: pa.RecordBatch, path: Path, first: int) -> Iterator[pa.RecordBatch]:
    """Yield ``batch`` as a whole, or row by row if its text exceeds the limit of a row."""
    if sum(map(_text_bytes, batch.columns)) <= MAX_ROW_BYTES:
        yield batch
        return
    for i in range(len(batch)):
        row = batch.slice(i, 1)
        if (size := sum(map(_text_bytes, row.columns))) > MAX_ROW_BYTES:
            raise InputError(f"{path}, row {first + i}: {size >> 20} MiB; at most {MAX_ROW_BYTES >> 20} are allowed")
        yield row


def _text_bytes(array: pa.Array) -> int:
    """Return the bytes of ``array`` once each value is a Python object."""
    import pyarrow as pa
    import pyarrow.compute as pc

    kind = array.type
    if pa.types.is_dictionary(kind):
        lengths = pc.cast(pc.binary_length(array.dictionary), pa.int64())
        return pc.sum(lengths.take(array.indices.drop_null())).as_py() or 0
    if pa.types.is_struct(kind):
        return sum(map(_text_bytes, array.flatten()))
    if pa.types.is_map(kind):
        return array.nbytes
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return _text_bytes(array.flatten())
    return array.nbytes


def _values(array: pa.Array, name: str, path: Path, first: int) -> list[Any]:
    """Return Python objects. Numbers of 32 or 16 bits keep their shortest digits: 0.1, not 0.1000000015."""
    import pyarrow as pa

    try:
        values = array.to_pylist()
    except (pa.ArrowException, *_UNREADABLE) as error:
        raise InputError(
            f"{path}: column {shown(name, 80)}, {shown(str(array.type), 80)}: cannot be read in rows {first} … "
            f"{first + len(array) - 1}: {shown(error)}; write the column as text or numbers"
        ) from error
    kind = array.type
    if pa.types.is_struct(kind):
        parts = {field.name: _narrow(field.type) for field in kind.fields}
        narrow = {part: narrow_type for part, narrow_type in parts.items() if narrow_type is not None}
        for row in filter(None, values if narrow else ()):
            row |= {part: _as_written(row[part], narrow_type) for part, narrow_type in narrow.items()}
    elif (narrow_type := _narrow(kind)) is not None:
        return [_as_written(value, narrow_type) for value in values]
    return values


def _narrow(kind: pa.DataType) -> type[np.floating] | None:
    """Return NumPy's type for numbers of 32 or 16 bits; None for all others."""
    import pyarrow as pa

    if pa.types.is_float16(kind):
        return np.float16
    return np.float32 if pa.types.is_float32(kind) else None


def _as_written(value: float | None, narrow: type[np.floating]) -> float | None:
    return None if value is None else float(str(narrow(value)))


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
    """The columns of a file by meaning, resolved on its first row."""

    prompt: str
    answer: str
    id: str | None


def check_source(config: DataSourceConfig) -> Columns:
    """Raise InputError if the first rows of a file are unusable. Quick; needs no tokenizer."""
    for _ in islice(read_problems(config), _CHECKED_ROWS):
        pass  # raises for an unusable row
    return find_columns(config, next(_rows(config))[1])


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
            raise InputError(f"{where}: column 'id' is null in the first row and not here; fill it in, or set id_key")
        key = str(number) if columns.id is None else _scalar(row, columns.id, where)
        if key in seen:
            raise InputError(f"{where}: id {key!r} occurs twice, first in {seen[key]}; set id_key to a unique column")
        if columns.id is not None:
            seen[key] = where
        yield Problem(
            id=f"{name}:{key}",
            question=_question(row, columns.prompt, where),
            answer=_scalar(row, columns.answer, where),
            data_source=_data_source(row, where) or name,
            extra=_extra(row, where),
            where=where,
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
    if config.id_key:
        resolve("id", config.id_key, ())
    return Columns(prompt, answer, config.id_key or ("id" if row.get("id") is not None else None))


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


def _data_source(row: dict[str, Any], where: str) -> str:
    """Return the row's data source, or "" if it names none."""
    value = row.get("data_source")
    if value is None or value == "":
        return ""
    if not isinstance(value, str):
        raise InputError(f"{where}: column 'data_source' must hold text, found {shown(value, 80)}")
    return _encodable(value, "data_source", where)


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
    if isinstance(value, str) and value.strip():
        return _encodable(value, key, where)
    if isinstance(value, list) and value and all(_is_message(item) for item in value):
        for number, item in enumerate(value):
            if more := [name for name, content in item.items() if content and name not in ("role", "content")]:
                raise InputError(
                    f"{where}: message {number} of column {key!r} has {shown(more[0], 60)}, which is not read: only "
                    "role and content are. Remove it, or write it into the content"
                )
        return [{part: _encodable(item[part], key, where) for part in ("role", "content")} for item in value]
    raise InputError(
        f"{where}: column {key!r} must hold text or a list of {{role, content}} messages, found {shown(value, 80)}"
    )


def _is_message(item: Any) -> bool:
    return isinstance(item, dict) and isinstance(item.get("role"), str) and isinstance(item.get("content"), str)


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
    if path.suffix not in _EXTENSIONS:
        allowed = " or ".join(_EXTENSIONS)
        hint = _hub_hint(config.path)
        raise InputError(f"{config.path}: unknown kind of dataset {path.suffix!r}; allowed is {allowed}{hint}")
    if not path.is_file():
        near = difflib.get_close_matches(path.name, [p.name for p in path.parent.glob("*")], n=1)
        hint = f"; did you mean {path.parent / near[0]}?" if near else ""
        hint += _hub_hint(config.path)
        raise InputError(f"{config.path}: no such file (looked in {path.resolve().parent}){hint}")
    if path.suffix == ".jsonl":
        return jsonl_rows(path)
    keys = (config.prompt_key, config.answer_key, config.id_key, *PROMPT_KEYS, *ANSWER_KEYS)
    return parquet_rows(path, [*filter(None, keys), "id", "data_source", "extra_info"])


def _hub_hint(path: str) -> str:
    command = how_to_download(path, "dataset")
    return (
        f"; if it is a dataset of the Hugging Face hub, `{command}` brings it into the local cache" if command else ""
    )
