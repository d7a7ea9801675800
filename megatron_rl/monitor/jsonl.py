"""`metrics.jsonl`: one JSON line per step. All plots and offline tools read it."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_rl.errors import InputError, shown

_NON_FINITE = {"NaN", "Infinity", "-Infinity"}  # written as strings: JSON has no such numbers; float() reads them


def _to_json(value: Any) -> float | int | str:
    number = float(value)
    if math.isnan(number):
        return "NaN"
    if math.isinf(number):
        return "Infinity" if number > 0 else "-Infinity"
    return int(value) if isinstance(value, int) else number


def encode_line(step: int, metrics: Mapping[str, float]) -> str:
    """Return one line with its newline: step, Unix time, then the metrics in their order. Always valid JSON."""
    record = {"step": step, "time": round(time.time(), 3)} | encode_record(metrics)
    return json.dumps(record, allow_nan=False) + "\n"


def encode_record(metrics: Mapping[str, float]) -> dict[str, float | int | str]:
    """Return ``metrics`` as JSON values; `decode_line` restores the originals."""
    return {name: _to_json(value) for name, value in metrics.items()}


def decode_line(line: bytes) -> dict[str, float]:
    """Return the record of a line. Raises ValueError unless it is a JSON object of numbers with a step."""
    record = json.loads(line.decode("utf-8"))
    if not isinstance(record, dict):
        raise ValueError(f"a {type(record).__name__}, not an object")
    metrics = {name: float(v) if isinstance(v, str) and v in _NON_FINITE else v for name, v in record.items()}
    wrong = [name for name, value in metrics.items() if isinstance(value, bool) or not isinstance(value, int | float)]
    if wrong or not isinstance(metrics.get("step"), int):
        raise ValueError(f"{shown(wrong[0], 60)} is not a number" if wrong else "no step")
    large = [name for name, value in metrics.items() if isinstance(value, int) and abs(value) >= 2**63]
    if large:
        raise ValueError(f"{shown(large[0], 60)} has more than 63 bits")
    return metrics


def read_metrics(path: Path) -> list[dict[str, float]]:
    """Return all records of ``path`` (a metrics.jsonl or a run directory), in order; each has "step" and "time".

    An incomplete last line (of a run killed while writing) is skipped. Raises `InputError` for a missing file or any
    other broken line.
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
    """Return whether ``line`` is complete and records a step before ``step``."""
    try:
        return line.endswith(b"\n") and json.loads(line)["step"] < step
    except (ValueError, KeyError, TypeError):
        return False


def append_whole(path: Path, data: bytes) -> None:
    """Append ``data`` in one system call. After a partial write (disk full), truncate the file and raise OSError."""
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
    """Drop the lines of ``step`` and later, and an incomplete last line. A missing file is left as it is."""
    if not path.exists():
        return
    lines = path.read_bytes().splitlines(keepends=True)
    earlier = [line for line in lines if _is_before(line, step)]
    if earlier == lines[: len(earlier)]:  # the usual case: truncate, which works on a full disk
        os.truncate(path, sum(map(len, earlier)))
        return
    partial = path.with_name(f".partial-{path.name}")
    with partial.open("wb") as file:
        file.writelines(earlier)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


class JsonlSink:
    """Appends complete lines to metrics.jsonl. A crash can leave only the last line incomplete.

    Lines that cannot be written (disk full) wait in memory and are written first when there is space again.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._waiting: list[bytes] = []

    def resume_at(self, step: int) -> None:
        """Drop the records of ``step`` and later, and an incomplete last line. ``step`` is recorded next."""
        self._waiting = [line for line in self._waiting if _is_before(line, step)]
        drop_from(self.path, step)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append the lines that wait, then that of ``step``. Raises OSError if it cannot be written yet."""
        self._waiting.append(encode_line(step, metrics).encode())
        self._flush()

    def _flush(self) -> None:
        while self._waiting:
            append_whole(self.path, self._waiting[0])
            del self._waiting[0]

    @property
    def waiting(self) -> list[str]:
        """Return the lines that could not be written yet."""
        return [line.decode() for line in self._waiting]

    def take_back(self, lines: list[str]) -> None:
        """Queue ``lines`` (the `waiting` of an earlier start) before all others."""
        self._waiting[:0] = [line.encode() for line in lines]

    def close(self) -> None:
        """Write the lines that still wait. Raises OSError if that fails. No file is kept open."""
        self._flush()
