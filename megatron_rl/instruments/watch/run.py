"""One watched run: the current content of its directory, updated by `refresh`.

Metrics are columns by name, filled line by line: 16 bytes per number, 48 MB for 10,000 steps of 300 metrics.
"""

from __future__ import annotations

import json
import os
import re
import stat
import threading
import time
import zlib
from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from megatron_rl.config.yaml12 import parse
from megatron_rl.errors import InputError, shown
from megatron_rl.monitor.alarms import HELD_OUT, CollapseRule, first_collapse
from megatron_rl.monitor.run_directory import RunDirectory, decode_line
from megatron_rl.monitor.samples import printable
from megatron_rl.run.recorded_batches import BatchSlices, batch_path, recorded_steps

_STEP_SECONDS, _STEP_TOKENS = "perf/time/step", "perf/rollout_tokens"
NON_FINITE_SHOWN = 50
PAUSE = 10  # a gap of more than this many medians is a pause, not a step


@dataclass
class _Column:
    rows: array = field(default_factory=lambda: array("l"))
    values: array = field(default_factory=lambda: array("d"))

    def keep(self, rows: int) -> None:
        num_kept = bisect_left(self.rows, rows)
        del self.rows[num_kept:], self.values[num_kept:]


class Columns:
    """Rows in order of steps, one per step. A step recorded again replaces its row and all later ones."""

    def __init__(self) -> None:
        self._steps, self._times = array("q"), array("d")
        self._columns: dict[str, _Column] = {}
        self._rows_after = array("l")  # number of rows after each line
        self._broken = array("l")  # numbers of broken lines
        self.has_replaced = False  # a step was recorded again, and the replaced rows are lost

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def num_lines(self) -> int:
        """Number of lines added."""
        return len(self._rows_after)

    @property
    def broken_lines(self) -> int:
        """Number of lines that are not a step's record."""
        return len(self._broken)

    @property
    def names(self) -> list[str]:
        """All metrics, in order of first appearance."""
        return [name for name, column in self._columns.items() if column.rows]

    def keep_lines(self, lines: int) -> None:
        """Drop the rows of all but the first ``lines`` lines."""
        if lines >= len(self._rows_after):
            return
        self._keep_rows(self._rows_after[lines - 1] if lines else 0)
        del self._rows_after[lines:], self._broken[bisect_left(self._broken, lines) :]
        self.has_replaced = self.has_replaced and lines > 0

    def add_line(self, line: bytes) -> None:
        """Add one line of metrics.jsonl. A line that is not a step's record is counted and skipped."""
        try:
            record = decode_line(line)
        except (ValueError, RecursionError):
            self._broken.append(len(self._rows_after))
        else:
            self._add(record)
        self._rows_after.append(len(self._steps))

    def _add(self, record: dict[str, float]) -> None:
        step = int(record.pop("step"))
        if self._steps and step <= self._steps[-1]:
            self._keep_rows(bisect_left(self._steps, step))
            self.has_replaced = True
        row = len(self._steps)
        self._steps.append(step)
        time = float(record.pop("time", 0.0))
        self._times.append(time if np.isfinite(time) else self._times[-1] if self._times else 0.0)
        for name, value in record.items():
            column = self._columns.get(name)
            if column is None:
                column = self._columns[name] = _Column()
            column.rows.append(row)
            column.values.append(value)

    def _keep_rows(self, rows: int) -> None:
        del self._steps[rows:], self._times[rows:]
        for column in self._columns.values():
            column.keep(rows)

    @property
    def last_step(self) -> int | None:
        return self._steps[-1] if self._steps else None

    @property
    def last_time(self) -> float | None:
        """Unix time of the last row."""
        return self._times[-1] if self._times else None

    def seconds_a_step(self, rows: int = 20) -> float | None:
        """Return the mean time between the newest ``rows`` rows, without pauses of the run; None for fewer than two."""
        gaps = np.diff(np.array(self._times[-rows - 1 :]))
        return float(gaps[gaps <= PAUSE * np.median(gaps)].mean()) if len(gaps) else None

    def latest(self, name: str) -> float | None:
        """Return the last value of a metric, from any step."""
        column = self._columns.get(name)
        return column.values[-1] if column and column.values else None

    def at(self, name: str, step: int) -> float | None:
        """Return the value of a metric at ``step``."""
        row = bisect_left(self._steps, step)
        column = self._columns.get(name)
        if column is None or row == len(self._steps) or self._steps[row] != step:
            return None
        place = bisect_left(column.rows, row)
        return column.values[place] if place < len(column.rows) and column.rows[place] == row else None

    def series(self, name: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return rows [n], steps [n] and values [n] of a metric."""
        column = self._columns.get(name) or _Column()
        rows = np.array(column.rows, dtype=np.int64)
        return rows, np.array(self._steps, dtype=np.int64)[rows], np.array(column.values, dtype=np.float64)

    def along(self, axis: str) -> np.ndarray:
        """Return each row's position on the axis: step, hours (``time``) or million tokens (``tokens``) at its end."""
        if axis == "step":
            return np.array(self._steps, dtype=np.float64)
        name, unit = (_STEP_SECONDS, 3600.0) if axis == "time" else (_STEP_TOKENS, 1e6)
        spent = np.zeros(len(self._steps))
        rows, _, values = self.series(name)
        spent[rows] = np.where(np.isfinite(values), values, 0.0)
        return np.cumsum(spent) / unit


def decimated(x: np.ndarray, y: np.ndarray, points: int) -> dict[str, Any]:
    """Return a curve [n] as at most ``points`` points of JSON: means ``y`` of neighbours, with ``low`` and ``high``.

    With at most ``points`` values, each value is a point, without low and high. Values that are not finite are left out
    of means: ``holes`` has the x of the first ones, ``num_holes`` their number; a point without finite values is None.
    ``last``: the last value.
    """
    finite = np.isfinite(y)
    holes = x[~finite]
    record: dict[str, Any] = {"holes": numbers(holes[:NON_FINITE_SHOWN]), "num_holes": len(holes)}
    record["last"] = number(float(y[-1])) if len(y) else None
    if len(x) <= points:
        return record | {"x": numbers(x), "y": numbers(y)}
    starts = np.linspace(0, len(x), points, endpoint=False).astype(np.int64)
    counts = np.add.reduceat(finite.astype(np.float64), starts)
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = np.add.reduceat(np.where(finite, y, 0.0), starts) / counts
    low = np.minimum.reduceat(np.where(finite, y, np.inf), starts)
    high = np.maximum.reduceat(np.where(finite, y, -np.inf), starts)
    ends = np.append(starts[1:], len(x)) - 1
    return record | {"x": numbers(x[ends]), "y": numbers(mean), "low": numbers(low), "high": numbers(high)}


def numbers(values: np.ndarray) -> list[float | None]:
    """Return the values with six digits; None for NaN and infinities."""
    return [float(f"{value:.6g}") if np.isfinite(value) else None for value in values.tolist()]


def number(value: float | None) -> float | str | None:
    """Return one value for JSON; NaN and infinities by name."""
    if value is None or np.isfinite(value):
        return value
    return "NaN" if np.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def dumps(value: Any) -> bytes:
    """Return compact JSON in ASCII."""
    return json.dumps(value, allow_nan=False, separators=(",", ":")).encode("ascii")


# Follows a file of lines that another process writes, even if it is cut or replaced meanwhile.


READ_BYTES = 8 * 2**20  # read by one poll, at least one line


class LineFollower:
    """Returns every complete line once, and the number of earlier lines that are still in the file.

    A resumed run cuts its files or replaces them by shorter ones (`run_directory.drop_from`). Therefore the end and the
    checksum of every line are kept, 16 bytes each, and the last line is compared at each poll. Every line has its step
    and time, so different lines at the same place differ.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._ends, self._sums = array("q"), array("q")
        self._seen: tuple[int, ...] | None = None
        self.size = 0  # bytes of the file at the last poll

    @property
    def count(self) -> int:
        """Number of returned lines that are still in the file."""
        return len(self._ends)

    @property
    def offset(self) -> int:
        """Bytes of the returned lines."""
        return self._ends[-1] if self._ends else 0

    @property
    def is_behind(self) -> bool:
        """Whether the last poll left complete lines unread."""
        return self._seen is None and self.size > self.offset

    def forget(self) -> None:
        """Read the file from its start again."""
        self._keep(0)
        self._seen = None

    def span(self, line: int) -> tuple[int, int]:
        """Return the bytes [start, end) of a returned line."""
        return (self._ends[line - 1] if line else 0), self._ends[line]

    def poll(self, max_bytes: int = READ_BYTES) -> tuple[int, list[bytes]]:
        """Return the number of earlier lines still in the file, and the following lines without line feeds.

        A file that is missing has no lines. At most about ``max_bytes`` are read: see `is_behind`.
        """
        try:
            # Do not wait if the name is a pipe.
            descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError:
            return self._nothing()
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                return self._nothing()
            seen = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
            if seen == self._seen:
                return len(self._ends), []
            self.size = status.st_size
            self._keep(self._standing(descriptor))
            num_kept = len(self._ends)
            lines, at_end = self._read(descriptor, max_bytes)
            self._seen = seen if at_end else None
            return num_kept, lines
        finally:
            os.close(descriptor)

    def _nothing(self) -> tuple[int, list[bytes]]:
        self.forget()
        self.size = 0
        return 0, []

    def _standing(self, descriptor: int) -> int:
        """Return the number of first lines still in the file. Files are only cut and extended, so a bisection works."""

        def is_changed(line: int) -> bool:
            start, end = self.span(line)
            return zlib.crc32(os.pread(descriptor, end - start, start)) != self._sums[line]

        count = len(self._ends)
        if not count or not is_changed(count - 1):
            return count
        return bisect_left(range(count), True, key=is_changed)

    def _keep(self, lines: int) -> None:
        del self._ends[lines:], self._sums[lines:]

    def _read(self, descriptor: int, max_bytes: int) -> tuple[list[bytes], bool]:
        """Return new complete lines, and whether the end of the file was reached."""
        start = self.offset
        data = os.pread(descriptor, max_bytes, start)
        at_end = len(data) < max_bytes
        while b"\n" not in data and not at_end:  # a line longer than max_bytes
            more = os.pread(descriptor, max_bytes, start + len(data))
            data, at_end = data + more, len(more) < max_bytes
        lines = data.split(b"\n")[:-1]  # the last part is an incomplete line or empty
        for line in lines:
            start += len(line) + 1
            self._ends.append(start)
            self._sums.append(zlib.crc32(line + b"\n"))
        return lines, at_end


LOG_LINES = 200
RECENT_NS = 5 * 10**9  # a folder may change again within this time without a new time stamp
SILENT_S = 20.0  # a running run writes to its LOCK every 5 seconds
_ALARM = re.compile(r"\d\d:\d\d:\d\d alarm (?P<name>[\w-]+) at step (?P<step>\d+): (?P<text>.*)")


@dataclass(frozen=True)
class SeenAlarm:
    """A rule that went off. ``text``: the log's text, "" if there is none."""

    step: int
    name: str
    text: str


class WatchedRun:
    """The data of all views. Hold `lock` while reading: another thread may be in `refresh`."""

    def __init__(self, label: str, folder: Path) -> None:
        self.label, self.directory = label, RunDirectory(folder)
        self.lock = threading.RLock()
        self.version = 0  # increases when curves, alarms or samples change
        self.columns = Columns()
        self.log: deque[str] = deque(maxlen=LOG_LINES)
        self._alarm_texts: dict[tuple[str, int], str] = {}
        self._metrics = LineFollower(self.directory.metrics)
        self._log = LineFollower(self.directory.log)
        self._samples = LineFollower(self.directory.samples)
        self._recipe: tuple[Any, dict[str, Any]] = (None, {})
        self._beat: tuple[str, float] = ("", 0.0)
        self._collapse: tuple[int, int | None] = (0, None)
        self._steps: tuple[int, list[int]] = (0, [])
        self._batch: tuple[Any, BatchSlices | None] = (None, None)

    def refresh(self) -> None:
        """Read new data, at most a few megabytes per file; a long history takes several calls."""
        with self.lock:
            changed = [self._read_metrics(), self._read_log(), self._read_samples()]
            self.version += any(changed)
            self._look_at_lock()

    def _read_metrics(self) -> bool:
        num_kept, lines = self._metrics.poll()
        is_cut = num_kept < self.columns.num_lines
        if is_cut and self.columns.has_replaced:  # replaced rows may be valid again
            self._metrics.forget()
            self.columns = Columns()
            num_kept, lines = self._metrics.poll()
        self.columns.keep_lines(num_kept)
        for line in lines:
            self.columns.add_line(line)
        return is_cut or bool(lines)

    def _read_log(self) -> bool:
        _, lines = self._log.poll()
        for line in lines:
            text = printable(line.decode("utf-8", "replace"))
            self.log.append(text)
            if match := _ALARM.match(text):
                self._alarm_texts[match["name"], int(match["step"])] = match["text"]
        return bool(lines)

    def _read_samples(self) -> bool:
        before = self._samples.count
        num_kept, lines = self._samples.poll()
        return num_kept < before or bool(lines)

    @property
    def share_read(self) -> float:
        """Share of metrics.jsonl that was read, 0 … 1; below 1 while a long history is being read."""
        return self._metrics.offset / self._metrics.size if self._metrics.is_behind else 1.0

    @property
    def num_samples(self) -> int:
        """Number of lines of samples.jsonl."""
        return self._samples.count

    def samples(self, before: int | None, number: int) -> list[dict[str, Any]]:
        """Return up to ``number`` samples before line ``before``, the newest first; each has its ``line``."""
        samples: list[dict[str, Any]] = []
        line = min(self._samples.count, self._samples.count if before is None else before)
        try:
            descriptor = os.open(self.directory.samples, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return []
        try:
            while line > 0 and len(samples) < number:
                line -= 1
                start, end = self._samples.span(line)
                try:
                    sample = json.loads(os.pread(descriptor, end - start, start))
                except (ValueError, RecursionError):  # the file was cut since the last poll
                    continue
                if isinstance(sample, dict):
                    samples.append({"line": line, **sample})
        finally:
            os.close(descriptor)
        return samples

    def recipe(self) -> dict[str, Any]:
        """Return the current recipe as plain values; empty if it is missing or unreadable."""
        try:
            status = self.directory.recipe.stat()
            key = (status.st_mtime_ns, status.st_size)
            if self._recipe[0] != key:
                values, _ = parse(self.directory.recipe.read_text(encoding="utf-8"))
                self._recipe = (key, values if isinstance(values, dict) else {})
        except (OSError, ValueError, yaml.YAMLError):
            self._recipe = (None, {})
        return self._recipe[1]

    def setting(self, path: str) -> Any:
        """Return a key of the recipe, ``a.b.c``; None if it is absent."""
        value: Any = self.recipe()
        for name in path.split("."):
            value = value.get(name) if isinstance(value, dict) else None
        return value

    def _look_at_lock(self) -> None:
        try:
            text = self.directory.lock.read_text(encoding="utf-8").strip()
        except (OSError, ValueError):
            text = ""
        if text != self._beat[0]:
            self._beat = (text, time.monotonic())

    def status(self) -> str:
        """done, alarmed (done, and an alarm went off), collapsed (done without one, but the reward collapsed), running,
        silent (a process holds the run, without a sign of life), ended, or waiting (no step yet)."""
        if self.directory.done.exists():
            return "alarmed" if self.alarm_events() else "done" if self.collapse() is None else "collapsed"
        text, since = self._beat
        if text:
            return "running" if time.monotonic() - since < SILENT_S else "silent"
        return "ended" if len(self.columns) else "waiting"

    def collapse(self) -> int | None:
        """Return the step at which the reward or the held-out reward collapsed; None if neither did."""
        if self._collapse[0] != self.columns.num_lines:
            names, records = (CollapseRule.metric, HELD_OUT), []
            for name in names:
                _, steps, values = self.columns.series(name)
                records += [{"step": step, name: value} for step, value in zip(steps, values, strict=True)]
            self._collapse = (self.columns.num_lines, first_collapse(records, CollapseRule()))
        return self._collapse[1]

    def alarm_events(self) -> list[SeenAlarm]:
        """Return all alarms of recorded steps, the newest first."""
        events = []
        for metric in self.columns.names:
            if metric.startswith("alarm/"):
                name = metric.removeprefix("alarm/")
                _, steps, values = self.columns.series(metric)
                for step in steps[values > 0].tolist():
                    events.append(SeenAlarm(step, name, self._alarm_texts.get((name, step), "")))
        return sorted(events, key=lambda event: (-event.step, event.name))

    def batch_steps(self) -> list[int]:
        """Return the steps whose batches are on disk. The folder is listed again only if it changed."""
        try:
            changed = self.directory.batches.stat().st_mtime_ns
            if self._steps[0] != changed or time.time_ns() - changed < RECENT_NS:
                self._steps = (changed, recorded_steps(self.directory.batches))
        except (OSError, ValueError):
            self._steps = (0, [])
        return self._steps[1]

    def batch(self, step: int) -> BatchSlices:
        """Return a batch on disk; the latest one is cached. Raises `InputError` if it was deleted."""
        path = batch_path(self.directory.batches, step)
        try:
            status = path.stat()
        except OSError as error:
            steps = ", ".join(map(str, self.batch_steps())) or "none"
            raise InputError(f"step {step}: no recorded batch; there are: {steps}") from error
        key = (path, status.st_ino, status.st_mtime_ns)
        if self._batch[0] != key:
            self._batch = (key, BatchSlices(path))
        return self._batch[1]


def open_runs(arguments: Sequence[str]) -> list[WatchedRun]:
    """Return the runs of RUN arguments (``PATH`` or ``label=PATH``) with unique labels. `InputError`: no such folder.

    The folder of a run that has not begun has no metrics.jsonl yet.
    """
    runs: list[WatchedRun] = []
    for argument in arguments:
        label, _, path = argument.rpartition("=") if not os.path.exists(argument) else ("", "", argument)
        try:
            folder = Path(path).resolve()
        except (OSError, RuntimeError, ValueError) as error:  # a link to itself, a NUL
            raise InputError(f"{printable(path)}: {shown(error)}; expected a run directory") from error
        folder = folder.parent if folder.is_file() else folder
        if not folder.is_dir():
            raise InputError(f"{folder}: no such folder; expected a run directory (run_root/name of its recipe)")
        name, number = printable(label or folder.name), 2
        taken = {run.label for run in runs}
        if name in taken and not label:
            name = printable(f"{folder.parent.name}/{folder.name}")
        base_name = name
        while name in taken:
            name, number = f"{base_name} ({number})", number + 1
        runs.append(WatchedRun(name, folder))
    return runs
