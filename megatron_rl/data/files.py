"""Reads the rows of a data file: JSON lines or parquet.

Memory is bounded, although a small file may unpack to gigabytes. A row may take up to `MAX_ROW_BYTES`. For parquet
files, only the used columns are read, and the size of their text is computed before it is unpacked.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from megatron_rl.errors import InputError, shown

if TYPE_CHECKING:
    import pyarrow as pa


MAX_ROW_BYTES = 64 << 20
_MAX_CHUNK_BYTES, _MAX_RATIO = (
    1 << 30,
    200,
)  # limits of a column in a row group: unpacked bytes, and unpacked over packed (about 10 for text)
_BATCH_ROWS = 1024  # rows of a parquet file that are in memory at a time

Row = dict[str, Any]
_UNREADABLE = (
    OSError,
    ValueError,
    OverflowError,
    LookupError,
    TypeError,
    NotImplementedError,
)  # Arrow's own exceptions are subclasses of these
EXTENSIONS = (".jsonl", ".parquet")
_LOAD = "python -c \"import datasets; datasets.{}.to_parquet('{}.parquet')\""
_LOADERS = {".json": "json", ".csv": "csv", ".tsv": "csv", ".arrow": "arrow", ".txt": "text", ".ndjson": "json"}
_UNPACK = {".gz": "gunzip", ".zst": "unzstd", ".bz2": "bunzip2", ".xz": "unxz", ".zip": "unzip"}
_BEGINNINGS = {  # of files that are something else than their name says
    b"\x1f\x8b": "a gzip file; unpack it: gunzip < {0} > {1}",
    b"\x28\xb5\x2f\xfd": "a zstd file; unpack it: unzstd < {0} > {1}",
    b"BZh": "a bzip2 file; unpack it: bunzip2 < {0} > {1}",
    b"\xfd7zXZ": "an xz file; unpack it: unxz < {0} > {1}",
    b"PK\x03\x04": "a zip archive; unpack it: unzip -p {0} > {1}",
    b"PAR1": "a parquet file; give it a name that ends in .parquet",
    b"ARROW1": "an Arrow file; give it a name that ends in .arrow to be told how to convert it",
    b"\xff\xfe": "text in UTF-16; convert it: iconv -f UTF-16 -t UTF-8 {0} > {1}",
    b"\xfe\xff": "text in UTF-16; convert it: iconv -f UTF-16 -t UTF-8 {0} > {1}",
    b"version https://git-lfs": "a pointer of Git LFS, not the file; `git lfs pull` brings it",
}


def how_to_convert(path: Path) -> str:
    """Return the command that makes a readable file of ``path``, whose name is of another kind; "" for unknown ones."""
    name = shlex.quote(str(path))
    if path.is_dir():
        return _LOAD.format(f"load_from_disk({str(path)!r})", path.name)
    if path.suffix in _UNPACK:
        return f"{_UNPACK[path.suffix]} {name}"
    if path.suffix in _LOADERS:
        more = ", sep='\\t'" if path.suffix == ".tsv" else ""
        loader = f"load_dataset('{_LOADERS[path.suffix]}', data_files={str(path)!r}, split='train'{more})"
        return _LOAD.format(loader, path.stem)
    return ""


def what_it_is(path: Path) -> str:
    """Return what a file is that is not what its name says, with the cure; "" where nothing is known of it."""
    with _opened(path) as file:
        begins = file.read(4096)
    new = shlex.quote(str(path.with_stem(f"{path.stem}-2")))
    for beginning, text in _BEGINNINGS.items():
        if begins.startswith(beginning):
            return text.format(shlex.quote(str(path)), new)
    if b"\0" in begins[:200]:
        order = next((name for i, name in enumerate(("BE", "LE")) if not begins[i:200:2].strip(b"\0")), None)
        utf16 = f"text in UTF-16; convert it: iconv -f UTF-16{order} -t UTF-8 {shlex.quote(str(path))} > {new}"
        return utf16 if order else "a binary file"
    if path.suffix == ".jsonl" and begins.removeprefix(b"\xef\xbb\xbf").lstrip()[:1] == b"[":
        return f"a JSON array, not one object a line; convert it: jq -c '.[]' {shlex.quote(str(path))} > {new}"
    return ""


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
                if number == 1 and (other := what_it_is(path)):
                    raise InputError(f"{path}: it is {other}") from error
                raise InputError(f"{where}: not a JSON object: {shown(error)}") from error
            if not isinstance(row, dict):
                if number == 1 and (other := what_it_is(path)):
                    raise InputError(f"{path}: it is {other}")
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


def column_names(path: Path) -> list[str]:
    """Return the columns of a parquet file; parts of objects as ``name.part``. Raises InputError for other files."""
    import pyarrow as pa

    names = []
    for field in _open(path).schema_arrow:
        inner = field.type if pa.types.is_struct(field.type) else ()
        names += [f"{field.name}.{part.name}" for part in inner] or [field.name]
    return names


def has_values(path: Path, name: str) -> bool:
    """Return whether a row of a parquet file has something in column ``name``, by the statistics of the file."""
    import pyarrow as pa

    file = _open(path)
    metadata = file.metadata
    if pa.types.is_null(file.schema_arrow.field(name).type):
        return False
    groups = map(metadata.row_group, range(metadata.num_row_groups))
    for chunk in (group.column(i) for group in groups for i in range(metadata.num_columns)):
        if _is_below(chunk.path_in_schema, name):
            counted = chunk.statistics is not None and chunk.statistics.has_null_count
            if not counted or chunk.num_values > chunk.statistics.null_count:
                return True
    return False


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
        other = what_it_is(path)
        raise InputError(f"{path}: not a parquet file: {f'it is {other}' if other else shown(error)}") from error


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
    encoded = pq.ParquetFile(path, read_dictionary=sorted(texts))
    for group in range(file.metadata.num_row_groups):
        # A batch over two groups would have two dictionaries, which Arrow cannot put into a struct or list.
        for batch in encoded.iter_batches(batch_size=_BATCH_ROWS, row_groups=[group], columns=leaves):
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
