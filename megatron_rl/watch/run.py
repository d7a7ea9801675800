"""One run that is watched: what its directory holds now, read on at each `refresh`."""

from __future__ import annotations

import json
import os
import re
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from megatron_rl.config.yaml12 import parse
from megatron_rl.errors import InputError
from megatron_rl.monitor.run_directory import RunDirectory
from megatron_rl.monitor.samples import printable
from megatron_rl.stored.batches import batch_path, recorded_steps
from megatron_rl.stored.slices import BatchSlices
from megatron_rl.watch.columns import Columns
from megatron_rl.watch.lines import LineFollower

LOG_LINES = 200
RECENT_NS = 5 * 10**9  # so long a folder may change again under the same time of change
SILENT_S = 20.0  # a run that is alive writes to its LOCK every 5 seconds
_ALARM = re.compile(r"\d\d:\d\d:\d\d alarm (?P<name>[\w-]+) at step (?P<step>\d+): (?P<text>.*)")


@dataclass(frozen=True)
class SeenAlarm:
    """A rule that went off. ``text``: what the log says of it, "" where that is not there."""

    step: int
    name: str
    text: str


class WatchedRun:
    """All that the views read. Hold `lock` while reading: another thread may be in `refresh`."""

    def __init__(self, label: str, folder: Path) -> None:
        self.label, self.directory = label, RunDirectory(folder)
        self.lock = threading.RLock()
        self.version = 0  # grows whenever curves, alarms or samples have changed
        self.columns = Columns()
        self.log: deque[str] = deque(maxlen=LOG_LINES)
        self._alarm_texts: dict[tuple[str, int], str] = {}
        self._metrics = LineFollower(self.directory.metrics)
        self._log = LineFollower(self.directory.log)
        self._samples = LineFollower(self.directory.samples)
        self._recipe: tuple[Any, dict[str, Any]] = (None, {})
        self._beat: tuple[str, float] = ("", 0.0)
        self._steps: tuple[int, list[int]] = (0, [])
        self._batch: tuple[Any, BatchSlices | None] = (None, None)

    def refresh(self) -> None:
        """Read on: at most some megabytes of each file, so that a long history comes in several calls."""
        with self.lock:
            changed = [self._read_metrics(), self._read_log(), self._read_samples()]
            self.version += any(changed)
            self._look_at_lock()

    def _read_metrics(self) -> bool:
        kept, lines = self._metrics.poll()
        is_cut = kept < self.columns.num_lines
        if is_cut and self.columns.has_replaced:  # what was replaced may stand again
            self._metrics.forget()
            self.columns = Columns()
            kept, lines = self._metrics.poll()
        self.columns.keep_lines(kept)
        for line in lines:
            self.columns.add_line(line)
        return is_cut or bool(lines)

    def _read_log(self) -> bool:
        _, lines = self._log.poll()
        for line in lines:
            text = printable(line.decode("utf-8", "replace"))
            self.log.append(text)
            if found := _ALARM.match(text):
                self._alarm_texts[found["name"], int(found["step"])] = found["text"]
        return bool(lines)

    def _read_samples(self) -> bool:
        before = self._samples.count
        kept, lines = self._samples.poll()
        return kept < before or bool(lines)

    @property
    def share_read(self) -> float:
        """Of metrics.jsonl, 0 … 1: below 1 while a long history is being read."""
        return self._metrics.offset / self._metrics.size if self._metrics.is_behind else 1.0

    @property
    def num_samples(self) -> int:
        """Lines of samples.jsonl."""
        return self._samples.count

    def samples(self, before: int | None, number: int) -> list[dict[str, Any]]:
        """Up to ``number`` samples, the newest first, from the line before ``before`` on; each has its ``line``."""
        found: list[dict[str, Any]] = []
        line = min(self._samples.count, self._samples.count if before is None else before)
        try:
            descriptor = os.open(self.directory.samples, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return []
        try:
            while line > 0 and len(found) < number:
                line -= 1
                start, end = self._samples.span(line)
                try:
                    sample = json.loads(os.pread(descriptor, end - start, start))
                except ValueError:  # the file was cut since the last poll
                    continue
                if isinstance(sample, dict):
                    found.append({"line": line, **sample})
        finally:
            os.close(descriptor)
        return found

    def recipe(self) -> dict[str, Any]:
        """The recipe in force, as plain values; empty where it is missing or cannot be read."""
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
        """A key of the recipe, ``a.b.c``; None where it is absent."""
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
        """done, running, silent (a process holds the run, without a sign of life), ended, or waiting (no step yet)."""
        if self.directory.done.exists():
            return "done"
        text, since = self._beat
        if text:
            return "running" if time.monotonic() - since < SILENT_S else "silent"
        return "ended" if len(self.columns) else "waiting"

    def alarm_events(self) -> list[SeenAlarm]:
        """Every alarm that went off in a step that stands, the newest first."""
        events = []
        for metric in self.columns.names:
            if metric.startswith("alarm/"):
                name = metric.removeprefix("alarm/")
                _, steps, values = self.columns.series(metric)
                for step in steps[values > 0].tolist():
                    events.append(SeenAlarm(step, name, self._alarm_texts.get((name, step), "")))
        return sorted(events, key=lambda event: (-event.step, event.name))

    def batch_steps(self) -> list[int]:
        """Steps whose batches are on disk now. The folder is listed again only where it has changed."""
        try:
            changed = self.directory.batches.stat().st_mtime_ns
            if self._steps[0] != changed or time.time_ns() - changed < RECENT_NS:
                self._steps = (changed, recorded_steps(self.directory.batches))
        except (OSError, ValueError):
            self._steps = (0, [])
        return self._steps[1]

    def batch(self, step: int) -> BatchSlices:
        """A batch on disk. The description of the one asked for last is kept. `InputError` where it is gone."""
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
    """Runs of RUN arguments (``PATH`` or ``label=PATH``), under labels that differ. `InputError`: no such folder.

    A run that has not begun is a folder that does not hold a metrics.jsonl yet.
    """
    runs: list[WatchedRun] = []
    for argument in arguments:
        label, _, path = argument.rpartition("=") if not os.path.exists(argument) else ("", "", argument)
        folder = Path(path).resolve()
        folder = folder.parent if folder.is_file() else folder
        if not folder.is_dir():
            raise InputError(f"{folder}: no such folder; expected a run directory (run_root/name of its recipe)")
        name, number = printable(label or folder.name), 2
        taken = {run.label for run in runs}
        if name in taken and not label:
            name = printable(f"{folder.parent.name}/{folder.name}")
        wanted = name
        while name in taken:
            name, number = f"{wanted} ({number})", number + 1
        runs.append(WatchedRun(name, folder))
    return runs
