"""The files and folders of a run directory, and its `metrics.jsonl`: one JSON line per step, which all tools read."""

from __future__ import annotations

import json
import math
import os
import stat
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_rl.errors import InputError, printable, shown

STOP_FILE = "STOP"  # after `touch RUN/STOP` the run saves after the current step and exits


@dataclass(frozen=True)
class RunDirectory:
    """Paths in a run directory; only `create` creates any of them."""

    root: Path

    @property
    def recipe(self) -> Path:
        """The current recipe."""
        return self.root / "recipe.resolved.yaml"

    def kept_recipe(self, number: int) -> Path:
        """Return the path of the run's ``number``-th recipe (from 1); its first line has the step where it began."""
        return self.root / f"recipe.resolved.{number}.yaml"

    def kept_recipes(self) -> list[Path]:
        """Return all recipes that the run has used, the first one first."""
        numbers = [path.name.split(".")[2] for path in self.root.glob("recipe.resolved.*.yaml")]
        return [self.kept_recipe(number) for number in sorted(int(n) for n in numbers if n.isdigit())]

    @property
    def environment(self) -> Path:
        return self.root / "environment.json"

    @property
    def metrics(self) -> Path:
        return self.root / "metrics.jsonl"

    @property
    def samples(self) -> Path:
        """A few sampled responses; see the module `samples`."""
        return self.root / "samples.jsonl"

    @property
    def tensorboard(self) -> Path:
        return self.root / "tensorboard"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def batches(self) -> Path:
        return self.root / "batches"

    @property
    def plots(self) -> Path:
        return self.root / "plots"

    @property
    def log(self) -> Path:
        return self.root / "log.txt"

    @property
    def rollbacks(self) -> Path:
        """When alarms took the run back; see `run.rollback`."""
        return self.root / "rollbacks.json"

    @property
    def done(self) -> Path:
        """Exists once the run is complete and holds its number of steps. A scheduler's script looks for it."""
        return self.root / "DONE"

    @property
    def lock(self) -> Path:
        """Lock file of the process that writes to this folder; see `RunLock`."""
        return self.root / "LOCK"

    def check(self) -> None:
        """Raise `InputError` if a name that the run needs is taken, such as a file in place of a folder.

        Copies (samples, log) are not checked: the run continues when they fail. So does it for metrics.jsonl, up to its
        end.
        """
        folders = (self.root, self.tensorboard, self.checkpoints, self.batches, self.plots)
        files = (self.recipe, self.environment, self.done, self.lock)
        for path in (*folders, *files, self.root / STOP_FILE):
            try:
                kind = path.stat().st_mode
            except FileNotFoundError:
                if not path.is_symlink():
                    continue
                problem = "a link to nothing"
            except OSError as error:
                problem = error.strerror or str(error)
            else:
                if stat.S_ISDIR(kind) if path in folders else stat.S_ISREG(kind):
                    continue
                problem = "a folder" if stat.S_ISDIR(kind) else "a file" if stat.S_ISREG(kind) else "a device or pipe"
            expected_kind = "folder" if path in folders else "file"
            raise InputError(
                f"run directory {self.root}: {printable(path.name)} is not the {expected_kind} that a run keeps there "
                f"({problem}); move it away, or give the run another name (--set name=…)"
            )

    def create(self) -> RunDirectory:
        """Create missing folders and return the directory itself. Only one rank calls this."""
        for folder in (self.root, self.tensorboard, self.checkpoints, self.batches, self.plots):
            folder.mkdir(parents=True, exist_ok=True)
        return self


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
