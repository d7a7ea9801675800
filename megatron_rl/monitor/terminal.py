"""A run's output: one line per step."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from megatron_rl.errors import printable

# Column title, metric, format, width. A metric that a step lacks leaves its column empty.
COLUMNS = (
    ("reward", "critic/rewards/mean", "{:.3f}", 6),
    ("val", "val/reward/mean", "{:.3f}", 6),
    ("length", "response_length/mean", "{:.1f}", 8),
    ("rho std", "mismatch/rho_std", "{:.1e}", 8),
    ("entropy", "actor/entropy", "{:.3f}", 7),
    ("grad", "actor/grad_norm", "{:.3g}", 8),
    ("lr", "actor/lr", "{:.2e}", 8),
    ("tok/s", "perf/tokens_per_s/generate", "{:.0f}", 7),
    ("step s", "perf/time/step", "{:.2f}", 7),
    ("own", "perf/overhead_frac", "{:.0%}", 4),
)
# The ETA uses the mean wall time of this many steps: enough to include a checkpoint now and then.
ETA_STEPS = 20


def format_duration(seconds: float) -> str:
    """Return ``h:mm:ss``, or ``m:ss`` below an hour."""
    minutes, seconds_left = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds_left:02d}" if hours else f"{minutes}:{seconds_left:02d}"


def phase_times(metrics: Mapping[str, float]) -> str:
    """Return the seconds of phases that took at least 1% of the step, longest first: ``refit 0.30  reward 0.21``."""
    prefix = "perf/time/"
    times = {k.removeprefix(prefix): v for k, v in metrics.items() if k.startswith(prefix) and k != prefix + "step"}
    worth_saying = 0.01 * metrics.get(prefix + "step", 0.0)
    ordered = sorted(times.items(), key=lambda item: -item[1])
    return "  ".join(f"{name} {seconds:.2f}" for name, seconds in ordered if seconds >= worth_saying)


class TerminalSink:
    """Writes lines to standard output (nothing if ``is_off``) and to ``log_file``.

    ``num_steps`` is the number of steps of the run; None if unknown (then there is no ETA).
    """

    def __init__(self, log_file: Path, is_off: bool, num_steps: int | None, console: Console | None = None) -> None:
        self.console = console or Console(file=sys.stdout, highlight=False, soft_wrap=True)
        self.log_file = log_file
        self.num_steps = num_steps
        self.is_off = is_off
        self._lines = 0
        self._last_time: float | None = None
        self._walls: deque[float] = deque(maxlen=ETA_STEPS)
        self._done = 0

    def header(self, summary: Mapping[str, Any]) -> None:
        """Print the run's summary, one ``key: value`` per line."""
        for key, value in summary.items():
            self.log(f"{key}: {value}")

    def resume_at(self, step: int) -> None:
        """Count progress from ``step``."""
        self._done = step

    def log(self, message: str, style: str | None = None) -> None:
        """Write one message to log.txt and to the terminal."""
        message = printable(message)
        if not self.is_off:  # before log.txt: a full disk must not silence the terminal
            self.console.print(Text(message, style=style or ""))
        with self.log_file.open("a", encoding="utf-8") as file:
            file.write(f"{time.strftime('%H:%M:%S')} {message}\n")

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Print the line of one step, with the column titles before every 25th."""
        now = time.perf_counter()
        if self._last_time is not None:
            self._walls.append(now - self._last_time)
        elif "perf/time/step" in metrics:
            self._walls.append(metrics["perf/time/step"])
        # The validation after the last step is recorded too, but is not a further step.
        self._last_time, self._done = now, min(step + 1, self.num_steps or step + 1)
        if self._lines % 25 == 0:
            titles = "  ".join(title.rjust(width) for title, _, _, width in COLUMNS)
            self.log(f"{'step':>6}  {titles}  {'eta':>7}  seconds by phase", style="bold")
        self._lines += 1
        cells = [form.format(metrics[key]).rjust(w) if key in metrics else " " * w for _, key, form, w in COLUMNS]
        eta = self._eta()
        self.log(f"{step:>6}  {'  '.join(cells)}  {eta:>7}  {phase_times(metrics)}")

    def close(self) -> None:
        """Do nothing: every line is written at once."""

    def _eta(self) -> str:
        if not self._walls or not self.num_steps:
            return ""
        return format_duration(sum(self._walls) / len(self._walls) * max(self.num_steps - self._done, 0))
