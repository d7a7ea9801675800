"""Reports: one of a node, merged ones of several, as data, as text, and as one HTML page that loads nothing.

``{"format": 1, "nodes": [{"node", "device", "ranks", "started", "seconds", "versions", "checks": […]}]}``, each check
as `checks.Result.as_json` gives it.
"""

from __future__ import annotations

import html
import json
import os
import socket
import sys
import time
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from megatron_rl.doctor.checks import Check, Result, Setting, failed
from megatron_rl.errors import InputError
from megatron_rl.process.host import write_whole

FORMAT = 1
JOB = "between nodes"  # the "node" of what a job's ranks did together
NO_REPORT = "report"


def make(results: Sequence[Result], setting: Setting, started: float) -> dict[str, Any]:
    try:
        from megatron_rl.monitor.run_directory import package_versions

        versions = package_versions()
    except ModuleNotFoundError:  # without torch: the check `packages` says so
        versions = {}
    node = {
        "node": JOB if setting.in_job else os.environ.get("SLURMD_NODENAME") or socket.gethostname(),
        "device": setting.device,
        "ranks": int(os.environ["WORLD_SIZE"]) if setting.in_job else setting.ranks,
        "recipe": setting.recipe,
        "started": datetime.fromtimestamp(started, UTC).isoformat(timespec="seconds"),
        "seconds": round(time.time() - started, 1),
        "versions": versions,
        "checks": [result.as_json() for result in results],
    }
    return {"format": FORMAT, "nodes": [node]}


def unended(check: Check) -> Result:
    """In the place of a check that runs, for a report that is written before it ends."""
    return Result(
        check.name,
        check.question,
        failed(
            "it was running when the doctor was ended",
            f"Run it alone, where its log can be seen: megatron-rl doctor --only {check.name}",
        ),
        0.0,
    )


def merge(files: Sequence[Path], expected: Sequence[str] = ()) -> dict[str, Any]:
    """One report of several. A node of ``expected`` that has none counts as failed. Raises `InputError`."""
    nodes: dict[str, dict[str, Any]] = {}
    for path in files:
        if not path.is_file() and expected:
            continue  # its node is named below
        try:
            report = json.loads(path.read_text())
            for node in report["nodes"]:
                nodes.setdefault(node["node"], node)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InputError(f"{path}: not a report of `megatron-rl doctor --json` ({error})") from error
    for name in expected:
        nodes.setdefault(name, _absent(name))
    order = [*expected, *(name for name in nodes if name not in expected)]
    return {"format": FORMAT, "nodes": [nodes[name] for name in order]}


def _absent(name: str) -> dict[str, Any]:
    without = "" if name == JOB else "; submit without it: --exclude=" + name
    check = {
        "name": NO_REPORT,
        "question": "Did the ranks report?" if name == JOB else "Did the node report?",
        "status": "fail",
        "reason": "no report of the ranks" if name == JOB else "no report of this node",
        "fix": f"The log says why{without}",
        "figures": {},
        "seconds": 0.0,
    }
    return {"node": name, "checks": [check], "seconds": 0.0}


def failures(report: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Node and check of everything that failed."""
    return [(node["node"], c) for node in report["nodes"] for c in node["checks"] if c["status"] == "fail"]


def write(report: dict[str, Any], json_file: str | None, page_file: Path | None) -> None:
    """Write the report as JSON and as a page, where given. ``json_file``: "-" for standard output."""
    text = json.dumps(report, indent=1) + "\n"
    if json_file == "-":
        sys.stdout.write(text)
    elif json_file:
        path = Path(json_file)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, text)
    if page_file:
        page_file.parent.mkdir(parents=True, exist_ok=True)
        page_file.write_text(page(report))


def line(result: Result) -> str:
    """One check for a person; a failure with its likely fix below."""
    outcome = result.outcome
    text = f"{outcome.status:>7}  {result.name:13} {result.seconds:6.1f} s  {outcome.reason}"
    return text + (f"\n{'':>24}   fix: {outcome.fix}" if outcome.fix else "")


def summary(report: dict[str, Any]) -> str:
    """The last lines: how many of which kind, and what failed."""
    counts = Counter(check["status"] for node in report["nodes"] for check in node["checks"])
    nodes = f" on {len(report['nodes'])} nodes" if len(report["nodes"]) > 1 else ""
    text = ", ".join(f"{counts[status]} {status}" for status in ("pass", "fail", "not run"))
    failed_checks = [f"{node}: {check['name']}: {check['reason']}" for node, check in failures(report)] if nodes else []
    return "\n".join([f"{text}{nodes}", *failed_checks])


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
    status_counts = [f"{counts[status]} {status}" for status in ("pass", "fail", "not run") if counts[status]]
    about = [node[key] for key in ("device", "started") if node.get(key)]
    about += [f"{node[key]:g} {unit}" for key, unit in (("ranks", "ranks"), ("seconds", "s")) if node.get(key)]
    rows = [["check", "", "s", "found"]]
    rows += [[c["name"], c["status"], f"{c['seconds']:.1f}", _found(c)] for c in node["checks"]]
    parts = [
        f"<h2>{html.escape(node['node'])}</h2>",
        f"<p>{html.escape(', '.join([*status_counts, *map(str, about)]))}</p>",
    ]
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
