"""Runs that were packed into one file: `lab pack` and `tools.dev.unstable_runs` write them, lines of JSON under xz."""

from __future__ import annotations

import hashlib
import json
import lzma
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from megatron_rl.errors import InputError
from megatron_rl.monitor.jsonl import decode_line

MAX_UNPACKED = 256 << 20  # bytes: a small file can unpack to anything


@dataclass(frozen=True)
class RecordedRun:
    """A finished run. ``cause``: what was planted in it, "" for nothing, None where nobody knows."""

    name: str
    records: list[dict[str, float]]
    cause: str | None = None
    recipe: dict[str, Any] = field(default_factory=dict)

    @property
    def half(self) -> Literal["set", "judge"]:
        """Which half it belongs to: rules are set on one and judged on the other. By a hash of its name."""
        return "judge" if hashlib.sha256(self.name.encode()).digest()[0] & 1 else "set"


def read_packed(file: Path) -> list[RecordedRun]:
    """The runs of ``file``, each named study/run. Raises `InputError` where it is no file of packed runs."""
    try:
        decompressor = lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=MAX_UNPACKED)
        lines = decompressor.decompress(file.read_bytes(), max_length=MAX_UNPACKED).splitlines()
        if not decompressor.eof:
            raise ValueError("the file is cut, or unpacks to more than 256 MiB")
        head, *runs = map(json.loads, lines)
        return [_read(head["study"], run) for run in runs]
    except (OSError, lzma.LZMAError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InputError(f"{file}: cannot be read as packed runs ({type(error).__name__}: {error})") from error


def _read(study: str, run: dict[str, Any]) -> RecordedRun:
    records = [decode_line(json.dumps(record).encode()) for record in run["records"]]
    return RecordedRun(f"{study}/{run['run']}", records, run.get("cause"), run.get("recipe", {}))


def distinct(runs: Sequence[RecordedRun]) -> list[RecordedRun]:
    """``runs`` without those whose reward was recorded before: studies share arms."""
    found: dict[str, RecordedRun] = {}
    for run in runs:
        curve = [(record["step"], record.get("critic/rewards/mean")) for record in run.records]
        found.setdefault(repr(curve), run)
    return list(found.values())
