"""The metrics of a run by name, filled line by line: 16 bytes per number, 48 MB for 10,000 steps of 300 metrics."""

from __future__ import annotations

import json
from array import array
from bisect import bisect_left
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from megatron_rl.monitor.run_directory import decode_line

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
