"""Shows runs in a terminal: a table, small curves, alarms."""

from __future__ import annotations

import math
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from megatron_rl.errors import printable
from megatron_rl.instruments.watch.page import STATUSES, number
from megatron_rl.instruments.watch.run import WatchedRun
from megatron_rl.monitor.plots import Curves, drawable_panels, panel_metrics
from megatron_rl.monitor.terminal import COLUMNS, format_duration

EVERY_S = 2.0
SPARKS = "▁▂▃▄▅▆▇█"
SPARK_POINTS = 40
ALARMS = 4
STYLES = ("blue", "dark_orange3", "green4", "magenta", "cyan", "yellow4", "white", "purple")
_STATUS_STYLES = dict.fromkeys(("running", "done"), "green") | dict.fromkeys(
    ("alarmed", "collapsed", "silent"), "bold red"
)


def watch(runs: Sequence[WatchedRun], once: bool, console: Console | None = None) -> None:
    """Draw ``runs`` until interrupted; with ``once``, or without a terminal, print them once and return."""
    console = console or Console(file=sys.stdout, highlight=False, markup=False)
    if once or not console.is_terminal:
        console.print(frame(runs, console.width))
        return
    with Live(frame(runs, console.width), console=console, auto_refresh=False, screen=True) as live:
        while True:
            time.sleep(EVERY_S)
            live.update(frame(runs, console.width), refresh=True)


def frame(runs: Sequence[WatchedRun], width: int) -> RenderableType:
    """Return what ``runs`` hold now, at most ``width`` wide, the most important part first."""
    for run in runs:
        run.refresh()
    below = Text("\nmismatch by band, routes, sampled texts: megatron-rl run watch RUN --page FILE", style="dim")
    return Printable(Group(_overview(runs, width), _curves(runs, width), *_alarms(runs), below))


@dataclass(frozen=True)
class Printable:
    """``content`` with escapes for characters of its texts that could control a terminal: files may hold any."""

    content: RenderableType

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for segment in console.render(self.content, options):
            lines = segment.text.split("\n")
            yield segment if segment.control else Segment("\n".join(map(printable, lines)), segment.style)


def _style(index: int) -> str:
    return STYLES[index % len(STYLES)]


def _overview(runs: Sequence[WatchedRun], width: int) -> Table:
    """Return a table with a row per run; a narrow terminal gets fewer columns."""
    is_wide = width >= 110
    shown = ("reward", "val", "length", "rho std", "entropy", "grad", "step s") if is_wide else ("reward", "rho std")
    metrics = {title: metric for title, metric, *_ in COLUMNS if title in shown}
    table = Table(box=None, padding=(0, 1), pad_edge=False)
    for title in ("run", "", "step", *([""] if is_wide else []), "eta", *metrics):
        table.add_column(title, justify="left" if title in ("run", "") else "right", no_wrap=title != "run")
    for index, run in enumerate(runs):
        total, status, eta = run.setting("num_steps"), run.status(), run.eta_s()
        total = total if isinstance(total, int) else None
        step = "–" if run.last_step is None else run.last_step
        bar = ProgressBar(total=total, completed=1 + run.last_step, width=12) if total and run.records else ""
        cells = [f"{step}{f'/{total}' if total else ''}", *([bar] if is_wide else [])]
        cells += ["" if eta is None else format_duration(eta)]
        cells += [number(run.latest(metric)) for metric in metrics.values()]
        state = Text(STATUSES.get(status, status), style=_STATUS_STYLES.get(status, ""))
        table.add_row(Text(run.label, style=_style(index)), state, *cells)
    return table


def _curves(runs: Sequence[WatchedRun], width: int) -> RenderableType:
    """Return a line per panel and run: name, curve, first and last value."""
    groups = [Curves(run.label, [run.records]) for run in runs]
    points = max(10, min(SPARK_POINTS, width - 60))
    table = Table(box=None, padding=(0, 1), pad_edge=False, show_header=False)
    for panel in drawable_panels(groups):
        metric, title = next(iter(panel_metrics(panel, groups))), panel.title
        for index, group in enumerate(groups):
            if not len(values := group.series(metric)[1][0] if metric in group.metrics else ()):
                continue
            finite = values[np.isfinite(values)]
            ends = f"{finite[0]:.4g} → {finite[-1]:.4g}" if len(finite) else ""
            ends += f"  {len(values) - len(finite)} not finite" if len(finite) < len(values) else ""
            drawn = [math.log(value) if value > 0 else math.nan for value in values] if panel.is_log else values
            table.add_row(title, Text(sparkline(thinned(drawn, points)), style=_style(index)), ends)
            title = ""
    return table if table.row_count else Text("no step is recorded yet", style="dim")


def thinned(values: Sequence[float], points: int) -> list[float]:
    """Return at most ``points`` means of neighbours; NaN where none of them is finite."""
    parts = np.array_split(np.asarray(values, dtype=float), min(points, len(values)))
    return [float(np.mean(known)) if len(known := part[np.isfinite(part)]) else math.nan for part in parts]


def _alarms(runs: Sequence[WatchedRun]) -> list[RenderableType]:
    lines = []
    for run in runs:
        lines += (told := [Text(line, style="bold red") for line in run.alarm_lines(ALARMS)])
        if told:
            lines.append(Text(f"what may have caused it: megatron-rl run why {shlex.quote(str(run.directory.root))}"))
    return [Text(""), *lines] if lines else []


def sparkline(values: list[float]) -> str:
    """Return one block character per value, scaled from the smallest to the largest; a space if not finite."""
    finite = [v for v in values if math.isfinite(v)]
    if not finite:
        return ""
    low, span = min(finite), (max(finite) - min(finite)) or 1.0
    top = len(SPARKS) - 1
    return "".join(SPARKS[round((v - low) / span * top)] if math.isfinite(v) else " " for v in values)
