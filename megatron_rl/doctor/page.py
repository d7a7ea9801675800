"""A report as one HTML page that loads nothing, and that reads as text where no browser is at hand."""

from __future__ import annotations

import html
from collections import Counter
from typing import Any

_STYLE = """
body { font: 14px/1.45 system-ui, sans-serif; margin: 2em auto; max-width: 1200px; padding: 0 1em; color: #222;
       background: #fff; }
table { border-collapse: collapse; margin: .6em 0; }
th, td { padding: 3px 12px; text-align: left; border-bottom: 1px solid #ddd; vertical-align: top; }
.pass { color: #17692c; } .fail { color: #b00020; font-weight: bold; } .not { color: #666; }
pre { background: #f5f5f5; padding: .6em; overflow-x: auto; white-space: pre-wrap; }
.scroll { overflow-x: auto; }
"""


def page(report: dict[str, Any]) -> str:
    """Which check came out how on which node; then each node with reasons, fixes, figures and the ends of logs."""
    nodes = report["nodes"]
    failed = sum(check["status"] == "fail" for node in nodes for check in node["checks"])
    title = f"doctor: {failed} failed" if failed else "doctor: nothing failed"
    parts = [f"<h1>{title}</h1>", f"<p>{len(nodes)} report{'s' if len(nodes) > 1 else ''}.</p>"]
    if len(nodes) > 1:
        parts.append(_overview(nodes))
    parts += [_node(node) for node in nodes]
    head = f'<meta charset="utf-8"><title>{title}</title><style>{_STYLE}</style>'
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>\n' + "\n".join(parts) + "\n</body></html>\n"


def _overview(nodes: list[dict[str, Any]]) -> str:
    """A row for each check, a column for each node; of many nodes, only those where something failed."""
    shown = nodes if len(nodes) <= 16 else [node for node in nodes if _failed(node)]
    names = list(dict.fromkeys(check["name"] for node in nodes for check in node["checks"]))
    rows = [["check", *(node["node"] for node in shown)]]
    by_node = [{check["name"]: check["status"] for check in node["checks"]} for node in shown]
    rows += [[name, *(statuses.get(name, "") for statuses in by_node)] for name in names]
    note = "" if shown is nodes else f"<p>{len(nodes) - len(shown)} nodes without a failure are left out here.</p>\n"
    return note + _table(rows)


def _failed(node: dict[str, Any]) -> bool:
    return any(check["status"] == "fail" for check in node["checks"])


def _node(node: dict[str, Any]) -> str:
    counts = Counter(check["status"] for check in node["checks"])
    said = [f"{counts[status]} {status}" for status in ("pass", "fail", "not run") if counts[status]]
    about = [node[key] for key in ("device", "started") if node.get(key)]
    about += [f"{node[key]:g} {unit}" for key, unit in (("ranks", "ranks"), ("seconds", "s")) if node.get(key)]
    rows = [["check", "", "s", "found"]]
    rows += [[c["name"], c["status"], f"{c['seconds']:.1f}", _found(c)] for c in node["checks"]]
    parts = [f"<h2>{html.escape(node['node'])}</h2>", f"<p>{html.escape(', '.join([*said, *map(str, about)]))}</p>"]
    parts.append(_table(rows))
    parts += [_details(check) for check in node["checks"] if check["figures"] or check.get("log")]
    return "\n".join(parts)


def _found(check: dict[str, Any]) -> str:
    return check["reason"] + (f"\nFix: {check['fix']}" if check["fix"] else "")


def _details(check: dict[str, Any]) -> str:
    """Figures and log of one check, open where it failed."""
    plain = {name: value for name, value in check["figures"].items() if not isinstance(value, dict)}
    body = [_table([["", ""], *([name, _text(value)] for name, value in plain.items())])] if plain else []
    for name, table in check["figures"].items():
        if isinstance(table, dict):
            body.append(_figures(name, table))
    if check.get("log"):
        body.append(f"<p>The end of its log:</p><pre>{html.escape(check['log'])}</pre>")
    state = " open" if check["status"] == "fail" else ""
    name, question = html.escape(check["name"]), html.escape(check["question"])
    return f"<details{state}><summary>{name}: {question}</summary>\n" + "\n".join(body) + "\n</details>"


def _figures(name: str, table: dict[str, Any]) -> str:
    """A table of name → (name → value), or of name → value."""
    if not all(isinstance(row, dict) for row in table.values()):
        return _table([[name, ""], *([key, _text(value)] for key, value in table.items())])
    columns = list(dict.fromkeys(column for row in table.values() for column in row))
    rows = [[key, *(_text(row.get(column, "")) for column in columns)] for key, row in table.items()]
    return _table([[name, *columns], *rows])


def _text(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _table(rows: list[list[str]]) -> str:
    """The first row is the head; cells that name a status have its colour. A tab between cells for readers of text."""
    lines = []
    for i, row in enumerate(rows):
        tag, cells = "td" if i else "th", []
        for cell in row:
            kind = f' class="{cell.split()[0]}"' if i and cell in ("pass", "fail", "not run") else ""
            cells.append(f"<{tag}{kind}>{html.escape(cell).replace(chr(10), '<br>')}</{tag}>")
        lines.append("<tr>" + "\t".join(cells) + "</tr>")
    return '<div class="scroll"><table>\n' + "\n".join(lines) + "\n</table></div>"
