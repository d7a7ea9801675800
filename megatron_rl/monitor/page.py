"""One self-contained HTML file with the curves of several runs."""

from __future__ import annotations

import html
import io
from collections.abc import Sequence

import matplotlib
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from megatron_rl.monitor.curves import Curves, last_values, matching
from megatron_rl.monitor.panels import VALIDATION, Panel
from megatron_rl.monitor.plots import View, draw_panel, drawable_panels, group_handles, zero_panels

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
.table { overflow-x: auto; }
.groups span { margin-right: 1.5em; white-space: nowrap; }
.groups i { display: inline-block; width: 1.6em; height: 0.25em; margin: 0 0.4em 0.2em 0; }
table { border-collapse: collapse; margin: 1em 0; }
th, td { padding: 3px 12px; text-align: right; border-bottom: 1px solid #ddd; }
th:first-child, td:first-child { text-align: left; }
"""


def panel_svg(panel: Panel, groups: Sequence[Curves], view: View) -> str:
    """Return one panel as an ``<svg>`` element."""
    # Each panel has its own salt: the ids of clip paths must be unique within the page.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": panel.title}):
        figure = Figure(figsize=(5.2, 3.5), layout="constrained")
        draw_panel(figure.add_subplot(), panel, groups, view)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]


def _table(groups: Sequence[Curves]) -> str:
    """Return the table of last values: a row per metric, a column per group, wrapped after a few groups."""
    metrics = [name for name in _TABLE_METRICS if any(name in group.metrics for group in groups)]
    metrics += matching(VALIDATION, set().union(*(group.metrics for group in groups)))
    values = last_values(groups, metrics)
    table = [
        ["", *(group.label for group in groups)],
        ["seeds", *(str(len(group.runs)) for group in groups)],
        ["steps", *(str(max((len(run) for run in group.runs), default=0)) for group in groups)],
        *([metric, *(values[group.label][row] for group in groups)] for row, metric in enumerate(metrics)),
    ]
    rows = ["<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in table]
    return '<div class="table"><table>' + "\n".join(rows) + "</table></div>"


def _legend(groups: Sequence[Curves]) -> str:
    if len(groups) == 1:
        return ""
    colours = [to_hex(handle.get_color()) for handle in group_handles(groups)]
    names = [html.escape(group.label) for group in groups]
    spans = (f'<span><i style="background:{c}"></i>{name}</span>' for c, name in zip(colours, names, strict=True))
    return f'<p class="groups">{"".join(spans)}</p>'


def build_page(groups: Sequence[Curves], title: str, view: View | None = None) -> str:
    """Return the page: a table of last values, then all panels. Bands span the seeds; lines are their mean."""
    view = view or View()
    panels = "\n".join(f"<figure>{panel_svg(panel, groups, view)}</figure>" for panel in drawable_panels(groups))
    name, zero = html.escape(title), html.escape(", ".join(zero_panels(groups)))
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{name}</title>'
        f"<style>{_STYLE} figure {{ margin: 0; }}</style></head>\n<body><h1>{name}</h1>\n"
        f"<p>Last values, mean over seeds.</p>\n{_table(groups)}\n{_legend(groups)}\n<main>\n{panels}\n</main>\n"
        + (f"<p>0 throughout, not drawn: {zero}.</p>" if zero else "")
        + "</body></html>\n"
    )
