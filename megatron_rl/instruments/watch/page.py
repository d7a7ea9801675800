"""The page of `run watch --page`: HTML without scripts, which a browser loads again while a run goes on."""

from __future__ import annotations

import html
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from megatron_rl.errors import InputError
from megatron_rl.instruments.watch.run import WatchedRun
from megatron_rl.instruments.why.changed import history_of
from megatron_rl.instruments.why.onset import find, page
from megatron_rl.monitor.html_page import html_page, html_table
from megatron_rl.monitor.plots import (
    CURVES_STYLE,
    Curves,
    Panel,
    curves_html,
    draw_disagreement,
    figure_svg,
    matching,
    panel_svg,
)
from megatron_rl.monitor.run_directory import read_metrics
from megatron_rl.monitor.samples import printable, read_samples, render
from megatron_rl.monitor.terminal import COLUMNS, format_duration

RELOAD_S = 15
ALARMS, SAMPLES = 20, 10  # how many are listed
FIGURES = ("count", "mean", "std", "q05", "q50", "q95")
MEAN, COUNT = "mismatch/rho_mean/", "mismatch/rho_count/"
STATUSES = {"alarmed": "done, with alarms", "collapsed": "done, reward collapsed"}


def keep_page(runs: Sequence[WatchedRun], file: Path, once: bool) -> None:
    """Write the page of ``runs`` to ``file`` whenever one has changed, until all have ended; or ``once``."""
    shown: Any = None
    while True:
        for run in runs:
            run.refresh()
        statuses = [run.status() for run in runs]
        now = [(run.records[-1:], len(run.records), status) for run, status in zip(runs, statuses, strict=True)]
        if now != shown:
            partial = file.with_name(f"{file.name}.partial")
            partial.write_text(overview(runs), encoding="utf-8")
            partial.replace(file)
            shown = now
        if once or not {"running", "waiting"} & set(statuses):
            return
        time.sleep(RELOAD_S)


def overview(runs: Sequence[WatchedRun]) -> str:
    """Return the page: state and alarms of each run, curves, mismatch by band, routes, `run why`, sampled texts."""
    body = [_states(runs), *(_alarms(run) for run in runs), curves_html(_groups(runs))]
    body += [part for run in runs for part in (_mismatch(run), _routes(run), _why(run), _texts(run))]
    is_going = any(run.status() in ("running", "waiting") for run in runs)
    head = f'<meta http-equiv="refresh" content="{RELOAD_S}">' if is_going else ""
    return html_page("megatron-rl watch", "\n".join(body), CURVES_STYLE, head)


def _escaped(text: Any) -> str:
    return html.escape(printable(str(text)))


def number(value: float | None) -> str:
    """Return four digits of a value; "" for none."""
    return "" if value is None else f"{value:.4g}"


def _states(runs: Sequence[WatchedRun]) -> str:
    rows = [["run", "", "step", "left", *(title for title, *_ in COLUMNS)]]
    for run in runs:
        status, eta, total = run.status(), run.eta_s(), run.setting("num_steps")
        mark = ' class="bad"' if status in ("alarmed", "collapsed", "silent") else ""
        step = f"{'–' if run.last_step is None else run.last_step}{f' of {total}' if isinstance(total, int) else ''}"
        step += f" ({run.broken_lines} broken lines)" if run.broken_lines else ""
        cells = [f"<span{mark}>{STATUSES.get(status, status)}</span>", step]
        cells += ["" if eta is None else format_duration(eta)]
        cells += [number(run.latest(metric)) for _, metric, *_ in COLUMNS]
        rows.append([_escaped(run.label), *map(str, cells)])
    return html_table(rows)


def _alarms(run: WatchedRun) -> str:
    return "\n".join(f'<p class="bad">{_escaped(line)}</p>' for line in run.alarm_lines(ALARMS))


def _groups(runs: Sequence[WatchedRun]) -> list[Curves]:
    return [Curves(printable(run.label), [run.records]) for run in runs]


def _mismatch(run: WatchedRun) -> str:
    """Return the mean rho by band of a token's probability over steps, and all figures of the last step with bands."""
    last = next((record for record in reversed(run.records) if any(name.startswith(COUNT) for name in record)), None)
    if last is None:
        return "<p>This run compares no probabilities: metrics.jsonl has no mismatch/rho_count/&lt;band&gt;.</p>"
    bands = [name.removeprefix(COUNT) for name in matching((f"{COUNT}.+",), set(last))]
    rows = [[f"po at step {last['step']:g}", *(f"rho {figure}" for figure in FIGURES)]]
    rows += [[_escaped(band), *(number(last.get(f"mismatch/rho_{name}/{band}")) for name in FIGURES)] for band in bands]
    panel = Panel(f"{printable(run.label)}: mean rho by po", (f"{MEAN}.+",))
    return f'<div class="panels"><figure>{panel_svg(panel, _groups([run]))}</figure></div>{html_table(rows)}'


def _routes(run: WatchedRun) -> str:
    figure = draw_disagreement(run.records, printable(run.label))
    if figure is None:
        return "<p>This run compares no routes. routing.telemetry: true does, as does routing.replay: r3.</p>"
    return f"<figure>{figure_svg(figure, f'routes of {run.label}')}</figure>"


def _texts(run: WatchedRun) -> str:
    """Return the newest sampled texts."""
    try:
        samples = list(read_samples(run.directory.samples))[-SAMPLES:]
    except InputError as error:
        return f"<p>{_escaped(run.label)}: {_escaped(error)}</p>"
    return "\n".join(f"<pre>{html.escape(render(sample))}</pre>" for sample in reversed(samples))


def _why(run: WatchedRun) -> str:
    """Return what `run why` prints: what was seen, in order, and what may have caused it."""
    try:
        records = read_metrics(run.directory.root)
        finding = find(run.label, records, run.recipe(), history_of(run.directory, records)) if records else None
        text = "No step is recorded yet." if finding is None else page(finding, run.directory.root)
    except (InputError, ValidationError) as error:  # no run yet, or one that cannot be read
        text = str(error)
    return f"<pre>{_escaped(text)}</pre>"
