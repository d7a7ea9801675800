"""`metrics.jsonl`: one line of JSON per step, the record that every plot and every offline tool reads."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_rl.errors import InputError

_NON_FINITE = {"NaN", "Infinity", "-Infinity"}  # as strings: JSON has no such numbers, and float() reads them back


def _to_json(value: Any) -> float | int | str:
    number = float(value)
    if math.isnan(number):
        return "NaN"
    if math.isinf(number):
        return "Infinity" if number > 0 else "-Infinity"
    return int(value) if isinstance(value, int) else number


def encode_line(step: int, metrics: Mapping[str, float]) -> str:
    """One line, newline included: step, Unix time, then the metrics in the order given. Always valid JSON."""
    record = {"step": step, "time": round(time.time(), 3)} | encode_record(metrics)
    return json.dumps(record, allow_nan=False) + "\n"


def encode_record(metrics: Mapping[str, float]) -> dict[str, float | int | str]:
    """What JSON holds; `decode_line` reads it back as it was."""
    return {name: _to_json(value) for name, value in metrics.items()}


def decode_line(line: bytes) -> dict[str, float]:
    """The record of a line. ValueError where it is none: no JSON object of numbers, or one without a step."""
    record = json.loads(line.decode("utf-8"))
    if not isinstance(record, dict):
        raise ValueError(f"a {type(record).__name__}, not an object")
    found = {name: float(v) if isinstance(v, str) and v in _NON_FINITE else v for name, v in record.items()}
    wrong = [name for name, value in found.items() if isinstance(value, bool) or not isinstance(value, int | float)]
    if wrong or not isinstance(found.get("step"), int):
        raise ValueError(f"{wrong[0]!r} is no number" if wrong else "no step")
    return found


def read_metrics(path: Path) -> list[dict[str, float]]:
    """All records of ``path`` (a metrics.jsonl or a run directory), in order; each has "step" and "time".

    A torn last line (a run killed while writing) is left out. Raises `InputError` for a missing file and for a broken
    line elsewhere.
    """
    path = Path(path)
    file = path / "metrics.jsonl" if path.is_dir() else path
    if not file.is_file():
        raise InputError(f"{file}: no such file; expected a run directory or its metrics.jsonl")
    lines = file.read_bytes().splitlines()
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            records.append(decode_line(line))
        except (ValueError, RecursionError) as error:
            if number == len(lines) and isinstance(error, json.JSONDecodeError | UnicodeDecodeError):
                break
            reason = error.msg if isinstance(error, json.JSONDecodeError) else error
            raise InputError(
                f"{file}, line {number}: not valid JSON of a step ({reason}); delete or repair the line"
            ) from error
    return records


def _is_before(line: bytes, step: int) -> bool:
    """Whether ``line`` is whole and records a step before ``step``."""
    try:
        return line.endswith(b"\n") and json.loads(line)["step"] < step
    except (ValueError, KeyError, TypeError):
        return False


def append_whole(path: Path, data: bytes) -> None:
    """Append ``data`` in one system call; a partial write (disk full) is taken back before the OSError."""
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        before = os.fstat(descriptor).st_size
        written = os.write(descriptor, data)
        if written != len(data):
            os.ftruncate(descriptor, before)
            raise OSError(f"{path}: only {written} of {len(data)} bytes could be written")
    finally:
        os.close(descriptor)


def drop_from(path: Path, step: int) -> None:
    """Drop the lines that record ``step`` or later, and a torn last one. Nothing to do where there is no file."""
    if not path.exists():
        return
    lines = path.read_bytes().splitlines(keepends=True)
    kept = [line for line in lines if _is_before(line, step)]
    if kept == lines[: len(kept)]:  # the usual case: cut, which a full disk allows
        os.truncate(path, sum(map(len, kept)))
        return
    partial = path.with_name(f".partial-{path.name}")
    with partial.open("wb") as file:
        file.writelines(kept)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


class JsonlSink:
    """Appends lines whole: a reader, or a run that dies, never leaves part of one behind a later line.

    Lines that cannot be written (disk full) wait in memory and go first as soon as there is room.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._waiting: list[bytes] = []

    def resume_at(self, step: int) -> None:
        """Drop what was recorded for ``step`` and later, and a torn last line: ``step`` is the next to be recorded."""
        drop_from(self.path, step)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append the line of a step, after those that wait. OSError where it has to wait as well."""
        self._waiting.append(encode_line(step, metrics).encode())
        self._flush()

    def _flush(self) -> None:
        while self._waiting:
            append_whole(self.path, self._waiting[0])
            del self._waiting[0]

    def close(self) -> None:
        """Write what still waits; nothing is kept open. OSError where that is not possible either."""
        self._flush()
