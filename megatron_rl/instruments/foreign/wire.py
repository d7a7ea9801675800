"""Files of framed records of protocol buffers: TensorBoard's event files, and `.wandb` files of offline runs.

A `.wandb` file is a log of LevelDB: blocks of 32 KiB of fragments, each with checksum, length and type. Its records are
read without the client, whose reader has changed places between versions; the four fields that matter have not.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

from megatron_rl.errors import InputError

Points = list[tuple[str, int, float]]  # name, step, value, in the order in which they were written

_BLOCK, _HEADER = 32768, 7
_WHOLE, _FIRST, _LAST = 1, 2, 4  # types of a fragment; 3 is one in the middle
_NUMBER_TYPES = {0, 1, 2, 5}  # varint, 8 bytes, length-delimited, 4 bytes


def read_events(files: list[Path]) -> Points:
    """The scalars of the event files ``files`` of one folder. A cut last record is left out."""
    from tensorboard.compat.proto.event_pb2 import Event  # imported late: other formats do not need it
    from tensorboard.util.tensor_util import make_ndarray

    points: Points = []
    for file in sorted(files, key=lambda path: path.name):  # names begin with the time
        for data in _events(file):
            try:
                event = Event.FromString(data)
            except Exception as error:  # protobuf's DecodeError has another class in each implementation
                raise InputError(f"{file}: not an event file of TensorBoard ({error})") from error
            for value in event.summary.value:
                if value.HasField("simple_value"):
                    points.append((value.tag, int(event.step), float(value.simple_value)))
                elif value.HasField("tensor") and value.tensor.dtype in (1, 2):  # float, double; 7 is text
                    points.append((value.tag, int(event.step), float(make_ndarray(value.tensor).reshape(-1)[0])))
    return points


def _events(file: Path) -> Iterator[bytes]:
    """The records of a TFRecord file: length (8), its checksum (4), data, its checksum (4)."""
    data, at = file.read_bytes(), 0
    while at + 12 <= len(data):
        (length,) = struct.unpack_from("<Q", data, at)
        if at + 16 + length > len(data):
            if at == 0:
                raise InputError(f"{file}: not an event file of TensorBoard (its first record is not whole)")
            return
        yield data[at + 12 : at + 12 + length]
        at += 16 + length


def read_wandb(file: Path) -> list[dict[str, float]]:
    """The numbers of each `wandb.log` of an offline run, with `_step`; nested names are joined by "." as W&B does."""
    rows = []
    for data in _fragments(file):
        try:
            rows += [_history(value) for number, value in _fields(data) if number == 2]  # Record.history
        except (ValueError, TypeError, AttributeError, IndexError, RecursionError, struct.error) as error:
            raise InputError(f"{file}: a record that the client cannot have written ({error})") from error
    return rows


def _fragments(file: Path) -> Iterator[bytes]:
    data = file.read_bytes()
    if data[:4] != b":W&B":
        raise InputError(f"{file}: not a file of an offline run of Weights & Biases (it does not begin with :W&B)")
    at, whole = _HEADER, b""
    while at + _HEADER <= len(data):
        left = _BLOCK - at % _BLOCK
        if left < _HEADER:  # too small for a fragment: filled with zeros
            at += left
            continue
        checksum, length, kind = struct.unpack_from("<IHB", data, at)
        part = data[at + _HEADER : at + _HEADER + length]
        if kind == 0 or len(part) < length:  # the client was killed while it wrote
            return
        if zlib.crc32(part, zlib.crc32(bytes([kind]))) != checksum:
            raise InputError(f"{file}: broken at byte {at} (wrong checksum); copy it again, or cut it there")
        whole = part if kind in (_WHOLE, _FIRST) else whole + part
        at += _HEADER + length
        if kind in (_WHOLE, _LAST):
            yield whole


def _history(data: bytes) -> dict[str, float]:
    row: dict[str, float] = {}
    for number, value in _fields(data):
        if number == 2:  # HistoryRecord.step
            row["_step"] = float(next((num for field, num in _fields(value) if field == 1), 0))
        elif number == 1:  # HistoryRecord.item
            name, number_of_item = _item(value)
            if number_of_item is not None:
                row[name] = number_of_item
    return row


def _item(data: bytes) -> tuple[str, float | None]:
    """Name and number of a HistoryItem; None for text, tables and pictures.

    Up to 0.20 every value is JSON (field 16); later versions have a field for each type.
    """
    key, nested, found = "", [], None
    for number, value in _fields(data):
        if number == 1:
            key = value.decode("utf-8", "replace")
        elif number == 2:
            nested.append(value.decode("utf-8", "replace"))
        elif number == 5:  # integer, zigzag
            found = float((value >> 1) ^ -(value & 1))
        elif number == 6:
            (found,) = struct.unpack("<d", value)
        elif number == 16:
            found = number_of(json.loads(value))
    return key or ".".join(nested), found


def number_of(value: object) -> float | None:
    """``value`` as a number, None if it is none. Numbers that are not finite may be written as text."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int | float):
        return float(value)
    if isinstance(value, str) and value.strip().lower().lstrip("+-") in {"nan", "inf", "infinity"}:
        return float(value)
    return None


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Number and value of each field of a message: an int for a varint, else its bytes. Raises ValueError."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        number, kind = key >> 3, key & 7
        if kind not in _NUMBER_TYPES:
            raise ValueError(f"a field of type {kind}")
        if kind == 0:
            value, at = _varint(data, at)
            yield number, value
            continue
        length = {1: 8, 5: 4}.get(kind)
        if length is None:
            length, at = _varint(data, at)
        if at + length > len(data):
            raise ValueError("a field that is longer than its record")
        yield number, data[at : at + length]
        at += length


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at
