"""Shows runs in a terminal: table, small curves, alarms, rho by band, routes by layer, one response by tokens."""

from __future__ import annotations

import math
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.panel import Panel as Box
from rich.progress_bar import ProgressBar
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from megatron_rl.errors import InputError, printable
from megatron_rl.instruments.watch import views
from megatron_rl.instruments.watch.run import WatchedRun
from megatron_rl.monitor.terminal import COLUMNS, format_duration, sparkline

SPARK_POINTS = 40
EVENTS, RESPONSE_TOKENS = 4, 160
STYLES = ("blue", "dark_orange3", "green4", "magenta", "cyan", "yellow4", "white", "purple")
SHADES = " ░▒▓█"
_STATUS_STYLES = {
    "running": "green",
    "done": "green",
    "alarmed": "bold red",
    "collapsed": "bold red",
    "silent": "bold red",
}
_STATUS_WORDS = {"alarmed": "done, with alarms", "collapsed": "done, reward collapsed"}


def watch(runs: Sequence[WatchedRun], every_s: float, once: bool, console: Console | None = None) -> None:
    """Draw ``runs`` until interrupted; with ``once``, or without a terminal, print them once and return."""
    console = console or Console(file=sys.stdout, highlight=False, markup=False)
    _read_all(runs)
    if once or not console.is_terminal:
        console.print(frame(runs, console.width))
        return
    with Live(frame(runs, console.width), console=console, auto_refresh=False, screen=True) as live:
        while True:
            time.sleep(every_s)
            for run in runs:
                run.refresh()
            live.update(frame(runs, console.width), refresh=True)


def _read_all(runs: Sequence[WatchedRun]) -> None:
    for run in runs:
        run.refresh()
        while run.share_read < 1:
            run.refresh()


def frame(runs: Sequence[WatchedRun], width: int) -> RenderableType:
    """Return the current frame, at most ``width`` wide, the most important part first."""
    state = views.state(runs)
    parts = [_overview(state, width), _curves(runs, width), *_alarms(state)]
    parts += [_bands(runs, width), *_routes(runs, width), *_response(runs)]
    return Printable(Group(*parts))


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


def _overview(state: dict[str, Any], width: int) -> Table:
    """Return a table with a row per run; a narrow terminal gets fewer columns."""
    is_wide = width >= 110
    shown_titles = (
        ("reward", "val", "length", "rho std", "entropy", "grad", "step s") if is_wide else ("reward", "rho std")
    )
    titles = [title for title, *_ in COLUMNS if title in shown_titles]
    table = Table(box=None, padding=(0, 1), pad_edge=False)
    for title in ("run", "", "step", *([""] if is_wide else []), "eta", *titles):
        table.add_column(title, justify="left" if title in ("run", "") else "right", no_wrap=title != "run")
    for index, run in enumerate(state["runs"]):
        numbers = [_number(run["summary"][title]) for title in titles]
        step, total = run["step"], run["num_steps"]
        steps = f"{'–' if step is None else step}{f'/{total}' if total else ''}"
        bar = ProgressBar(total=total, completed=run["done_steps"], width=12) if total else ""
        eta = "" if run["eta_s"] is None else format_duration(run["eta_s"])
        status = Text(_STATUS_WORDS.get(run["status"], run["status"]), style=_STATUS_STYLES.get(run["status"], ""))
        label = Text(run["label"], style=_style(index))
        table.add_row(label, status, steps, *([bar] if is_wide else []), eta, *numbers)
    return table


def _number(value: float | str | None) -> str:
    return "" if value is None else value if isinstance(value, str) else f"{value:.4g}"


def _curves(runs: Sequence[WatchedRun], width: int) -> RenderableType:
    """Return a line per panel and run: name, curve, first and last value."""
    points = max(10, min(SPARK_POINTS, width - 60))
    panels = views.panels(runs, "step", points)["panels"]
    table = Table(box=None, padding=(0, 1), pad_edge=False, show_header=False)
    for panel in panels:
        first = panel["curves"][0]["metric"]
        for curve in panel["curves"]:
            if curve["metric"] != first:
                continue
            values = [math.nan if value is None else value for value in curve["y"]]
            holes = f"  {curve['num_holes']} not finite" if curve["num_holes"] else ""
            shown = Text(sparkline(_on_scale(values, panel["is_log"])), style=_style(curve["run"]))
            ends = f"{_end(values)}{holes}"
            table.add_row(panel["title"] if curve is panel["curves"][0] else "", shown, ends)
    return table if panels else Text("no step is recorded yet", style="dim")


def _on_scale(values: list[float], is_log: bool) -> list[float]:
    return [math.log(value) if value > 0 else math.nan for value in values] if is_log else values


def _end(values: list[float]) -> str:
    finite = [value for value in values if math.isfinite(value)]
    return f"{finite[0]:.4g} → {finite[-1]:.4g}" if finite else ""


def _alarms(state: dict[str, Any]) -> list[RenderableType]:
    lines = []
    for run in state["runs"]:
        for event in run["events"][:EVENTS]:
            lines.append(
                Text(f"{run['label']}, step {event['step']}: {event['name']} {event['text']}", style="bold red")
            )
        if run["num_events"] > EVENTS:
            lines.append(Text(f"{run['label']}: {run['num_events'] - EVENTS} earlier alarms", style="red"))
        if run["num_events"]:
            lines.append(Text(f"what may have caused it: megatron-rl run why {shlex.quote(run['folder'])}"))
    return [Text(""), *lines] if lines else []


def _bands(runs: Sequence[WatchedRun], width: int) -> RenderableType:
    """Return a row per run and a column per band of po: mean rho - 1, and 5% and 95% quantiles if recorded.

    A narrow terminal gets no quantiles, and a digit less.
    """
    data = views.bands(runs, None, 2)
    if not data["labels"]:
        return Text(f"\n{views.HINTS['bands']}", style="dim")
    for digits, has_spread in ((1, True), (1, False), (0, False)):
        cells = [[_band(row, digits, has_spread) for row in its["rows"]] for its in data["runs"]]
        rows = [["run", "step", *data["labels"]]]
        rows += [[run.label, _number(its["step"]), *of] for run, its, of in zip(runs, data["runs"], cells, strict=True)]
        if sum(max(map(len, column)) + 2 for column in zip(*rows, strict=True)) <= width + 2:
            break
    title = "mean rho − 1 by po (5% to 95%)" if has_spread else "mean rho − 1 by po"
    table = Table(box=None, padding=(0, 1), pad_edge=False, title=title, title_justify="left")
    for name in rows[0]:
        table.add_column(name, justify="left" if name == "run" else "right", overflow="fold")
    for index, (label, *of) in enumerate(rows[1:]):
        table.add_row(Text(label, style=_style(index)), *of)
    return Group(Text(""), table)


def _band(row: Mapping[str, Any], digits: int, has_spread: bool) -> str:
    if not isinstance(row["mean"], float):
        return "–"
    ends = [row[name] for name in ("q05", "q95")]
    spread = f" ({ends[0] - 1:+.1g} to {ends[1] - 1:+.1g})" if all(isinstance(end, float) for end in ends) else ""
    return f"{row['mean'] - 1:+.{digits}e}{spread if has_spread else ''}"


def _routes(runs: Sequence[WatchedRun], width: int) -> list[RenderableType]:
    """Return, per run, a cell per layer; a fuller cell means more rows with other routes, in powers of ten."""
    lines: list[RenderableType] = []
    for index, run in enumerate(runs):
        with run.lock:
            data = views.routes(run, 1000)
        last = [next((value for value in reversed(row) if value is not None), None) for row in data["values"]]
        if not last:
            continue
        cells = "".join("?" if value is None else _shade(value) for value in last[: max(8, width - 60)])
        worst = max(range(len(last)), key=lambda i: last[i] or 0.0)
        line = Text(f"routes of {run.label}: [", style=_style(index)).append(cells).append("]")
        lines.append(line.append(f" most in layer {data['layers'][worst]}, {(last[worst] or 0.0):.2%} of rows"))
    return [Text(""), *lines] if lines else []


def _shade(value: float) -> str:
    """Return the cell for a share: blank below 1e-4, then a step per power of ten."""
    return SHADES[0 if value <= 1e-4 else min(len(SHADES) - 1, 1 + int(math.log10(value) + 4))]


def _response(runs: Sequence[WatchedRun]) -> list[RenderableType]:
    """Return, for the first run with a recorded batch, the response of the newest batch with the largest |log rho|."""
    for run in runs:
        try:
            if not (steps := run.batch_steps()):
                continue
            listed = views.responses(run, steps[-1], "mismatch", 0, 1)["responses"]
            if not listed:
                continue
            it = views.response(run, steps[-1], listed[0]["sequence"], 0, RESPONSE_TOKENS)
        except InputError:  # deleted in between
            continue
        magnitudes = [abs(value) for value in it["strip"] or () if value is not None]
        reach = max([1e-9, *magnitudes])
        text = Text()
        for piece, log_rho in zip(it["texts"], it["log_rho"] or [None] * len(it["texts"]), strict=True):
            text.append(piece, style=_token_style(log_rho, reach))
        if it["length"] > len(it["texts"]):
            text.append(f" … {it['length']} tokens", style="dim")
        ends = f"rho {math.exp(-reach):.3g} (blue) to {math.exp(reach):.3g} (orange)"
        title = f"{run.label}, step {it['step']}, {it['id']}: {ends}"
        return [Text(""), Box(text, title=Text(title), title_align="left", subtitle=Text(f"reward {it['reward']:g}"))]
    return [Text(f"\n{views.HINTS['batches']}", style="dim")]


def _token_style(log_rho: float | None, reach: float) -> str:
    """Return a token's style: blue for rho below 1, orange above, stronger with distance; black text."""
    if log_rho is None or abs(log_rho) < 0.05 * reach:
        return ""
    fade = round(210 * (1 - min(1.0, abs(log_rho) / reach)))
    return f"black on rgb({255 if log_rho > 0 else fade + 40},{150 + fade // 3},{fade + 40 if log_rho > 0 else 255})"
