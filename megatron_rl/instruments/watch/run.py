"""One watched run: what its directory holds now, read on by `refresh`."""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from typing import Any

import yaml

from megatron_rl.config.yaml12 import parse
from megatron_rl.errors import InputError, shown
from megatron_rl.monitor.alarms import CollapseRule, first_collapse
from megatron_rl.monitor.run_directory import RunDirectory, decode_line
from megatron_rl.monitor.samples import printable

SILENT_S = 20.0  # a running run writes to its LOCK every 5 seconds
PAUSE = 10  # a gap of more than this many medians is a pause, not a step
ETA_STEPS = 20
_ALARM = re.compile(r"\d\d:\d\d:\d\d alarm (?P<name>[\w-]+) at step (?P<step>\d+): (?P<text>.*)")


@dataclass(frozen=True)
class SeenAlarm:
    """A rule that went off. ``text``: the log's text, "" if there is none."""

    step: int
    name: str
    text: str


class WatchedRun:
    """The records of a run, one a step, and its state."""

    def __init__(self, label: str, folder: Path) -> None:
        self.label, self.directory = label, RunDirectory(folder)
        self.records: list[dict[str, float]] = []
        self.broken_lines = 0
        self._read: tuple[int, ...] | None = None  # inode, size and time of metrics.jsonl as it was read
        self._beat: tuple[str, float] = ("", 0.0)

    def refresh(self) -> None:
        """Read metrics.jsonl again if it has changed."""
        lock, file = self.directory.lock, self.directory.metrics
        text = lock.read_text(encoding="utf-8", errors="replace").strip() if lock.is_file() else ""
        if text != self._beat[0]:
            self._beat = (text, time.monotonic())
        state = file.stat() if file.is_file() else None
        now = state and (state.st_ino, state.st_size, state.st_mtime_ns)
        if now != self._read:
            self.records, self.broken_lines, self._read = [], 0, now
            for line in file.read_bytes().split(b"\n")[:-1] if now else ():
                self._add(line)

    def _add(self, line: bytes) -> None:
        """Add a record. A step that is recorded again replaces all from it on; a line that is no record is counted."""
        try:
            record = decode_line(line)
        except (ValueError, RecursionError):
            self.broken_lines += 1
            return
        while self.records and self.records[-1]["step"] >= record["step"]:
            self.records.pop()
        self.records.append(record)

    @property
    def last_step(self) -> int | None:
        return int(self.records[-1]["step"]) if self.records else None

    def latest(self, name: str) -> float | None:
        """Return the last value of a metric, from any step."""
        return next((record[name] for record in reversed(self.records) if name in record), None)

    def setting(self, path: str) -> Any:
        """Return a key of the recipe, ``a.b.c``; None if it is absent."""
        value: Any = self.recipe()
        for name in path.split("."):
            value = value.get(name) if isinstance(value, dict) else None
        return value

    def recipe(self) -> dict[str, Any]:
        """Return the current recipe as plain values; empty if it is missing or unreadable."""
        try:
            values, _ = parse(self.directory.recipe.read_text(encoding="utf-8"))
        except (OSError, ValueError, yaml.YAMLError):
            return {}
        return values if isinstance(values, dict) else {}

    def eta_s(self) -> float | None:
        """Return the seconds that are left of a running run, from its last steps without pauses."""
        total, times = self.setting("num_steps"), [r.get("time", 0.0) for r in self.records[-ETA_STEPS - 1 :]]
        gaps = [gap for earlier, later in pairwise(times) if 0 <= (gap := later - earlier) < math.inf]
        if self.status() != "running" or not isinstance(total, int) or not gaps:
            return None
        return mean(gap for gap in gaps if gap <= PAUSE * median(gaps)) * max(total - self.last_step - 1, 0)

    def status(self) -> str:
        """done, alarmed (done, and an alarm went off), collapsed (done without one, but the reward collapsed), running,
        silent (a process holds the run, without a sign of life), ended, or waiting (no step yet)."""
        if self.directory.done.exists():
            collapse = first_collapse(self.records, CollapseRule())
            return "alarmed" if self.alarms() else "done" if collapse is None else "collapsed"
        text, since = self._beat
        if text:
            return "running" if time.monotonic() - since < SILENT_S else "silent"
        return "ended" if self.records else "waiting"

    def alarms(self) -> list[SeenAlarm]:
        """Return all alarms of recorded steps, the newest first."""
        found = [
            (int(record["step"]), name.removeprefix("alarm/"))
            for record in reversed(self.records)
            for name, value in record.items()
            if name.startswith("alarm/") and value > 0
        ]
        texts = {}
        if found and self.directory.log.is_file():
            for line in self.directory.log.read_text(encoding="utf-8", errors="replace").splitlines():
                if match := _ALARM.match(line):
                    texts[int(match["step"]), match["name"]] = printable(match["text"])
        return [SeenAlarm(*alarm, texts.get(alarm, "")) for alarm in found]

    def alarm_lines(self, most: int) -> list[str]:
        """Return a line for each of the newest alarms, at most ``most``, and one for those before them."""
        alarms = self.alarms()
        lines = [f"{self.label}, step {alarm.step}: {alarm.name} {alarm.text}" for alarm in alarms[:most]]
        return lines + [f"{self.label}: {len(alarms) - most} earlier alarms"] * (len(alarms) > most)


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
        name, taken = printable(label or folder.name), {run.label for run in runs}
        if name in taken and not label:
            name = printable(f"{folder.parent.name}/{folder.name}")
        numbered = (f"{name} ({number})" for number in range(2, len(runs) + 2))
        runs.append(WatchedRun(next(numbered) if name in taken else name, folder))
        while runs[-1].label in taken:
            runs[-1].label = next(numbered)
    return runs
