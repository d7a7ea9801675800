"""One HTML file with the curves of several runs: opens anywhere, loads nothing."""

from __future__ import annotations

import html
import io
from collections.abc import Sequence

import matplotlib
from matplotlib.figure import Figure

from megatron_rl.monitor.plots import VALIDATION, Curves, Panel, draw_panel, drawable_panels, last_values, matching

_TABLE_METRICS = (
    "critic/rewards/mean",
    "response_length/mean",
    "mismatch/rho_std",
    "actor/entropy",
    "actor/grad_norm",
    "actor/lr",
    "perf/time/step",
)
_STYLE = """
body { font: 14px/1.45 system-ui, sans-serif; margin: 2em auto; max-width: 1500px; padding: 0 1em; color: #222;
       background: #fff; }
main { display: grid; grid-template-columns: repeat(auto-fill, minmax(420px, 1fr)); gap: 8px; }
svg { width: 100%; height: auto; }
table { border-collapse: collapse; margin: 1em 0; }
th, td { padding: 3px 12px; text-align: right; border-bottom: 1px solid #ddd; }
th:first-child, td:first-child { text-align: left; }
"""


def panel_svg(panel: Panel, groups: Sequence[Curves]) -> str:
    """One panel as an ``<svg>`` element."""
    # A salt per panel: clip paths of different panels must not share an id within one page.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": panel.title}):
        figure = Figure(figsize=(5.2, 3.2), layout="constrained")
        draw_panel(figure.add_subplot(), panel, groups)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]


def _table(groups: Sequence[Curves]) -> str:
    metrics = [name for name in _TABLE_METRICS if any(name in group.metrics for group in groups)]
    metrics += matching(VALIDATION, set().union(*(group.metrics for group in groups)))
    rows = ["<tr>" + "".join(f"<th>{html.escape(cell)}</th>" for cell in ["run", "seeds", "steps", *metrics]) + "</tr>"]
    values = last_values(groups, metrics)
    for group in groups:
        steps = max((len(run) for run in group.runs), default=0)
        cells = [group.label, str(len(group.runs)), str(steps), *values[group.label]]
        rows.append("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in cells) + "</tr>")
    return "<table>" + "\n".join(rows) + "</table>"


def build_page(groups: Sequence[Curves], title: str) -> str:
    """The page: last values as a table, then every panel; bands span the seeds, lines are their mean."""
    panels = "\n".join(f"<figure>{panel_svg(panel, groups)}</figure>" for panel in drawable_panels(groups))
    name = html.escape(title)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{name}</title>'
        f"<style>{_STYLE} figure {{ margin: 0; }}</style></head>\n<body><h1>{name}</h1>\n"
        f"<p>Last values, mean over seeds.</p>\n{_table(groups)}\n<main>\n{panels}\n</main></body></html>\n"
    )
