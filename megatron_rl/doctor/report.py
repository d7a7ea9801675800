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
    """Return the result of a check that still runs when the report is written."""
    fix = f"Run it alone, where its log can be seen: megatron-rl doctor --only {check.name}"
    return Result(check, failed("it was running when the doctor was ended", fix), 0.0)


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
    check = {
        "name": NO_REPORT,
        "question": "Is there a report?",
        "status": "fail",
        "reason": f"no report {'of the ranks' if name == JOB else 'of this node'}",
        "fix": f"The log says why{'' if name == JOB else f'; submit without it: --exclude={name}'}",
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
    """One check for a person, with its time of its budget; a failure with its likely fix below."""
    check, outcome = result.check, result.outcome
    text = f"{outcome.status:>7}  {check.name:13} {result.seconds:5.1f} of {check.budget_s:3g} s  {outcome.reason}"
    return text + (f"\n{'':>24}   fix: {outcome.fix}" if outcome.fix else "")


def summary(report: dict[str, Any]) -> str:
    """The last lines: how many of which kind, and what failed."""
    counts = Counter(check["status"] for node in report["nodes"] for check in node["checks"])
    nodes = f" on {len(report['nodes'])} nodes" if len(report["nodes"]) > 1 else ""
    text = ", ".join(f"{counts[status]} {status}" for status in ("pass", "fail", "not run"))
    failed_checks = [f"{node}: {check['name']}: {check['reason']}" for node, check in failures(report)] if nodes else []
    return "\n".join([f"{text}{nodes}", *failed_checks])


_STYLE = """th, td { text-align: left; }
.pass { color: #17692c; } .fail { color: #b00020; font-weight: bold; } .not { color: #666; }
"""


def page(report: dict[str, Any]) -> str:
    """Which checks failed on which node; then each node with reasons, fixes, figures and the ends of logs."""
    from megatron_rl.monitor.html_page import html_page

    nodes, failed = report["nodes"], failures(report)
    title = f"doctor: {len(failed)} failed" if failed else "doctor: nothing failed"
    parts = [f"<p>{len(nodes)} report{'s' if len(nodes) > 1 else ''}.</p>"]
    if failed and len(nodes) > 1:
        parts.append(_table([["node", "check", ""], *([node, c["name"], _found(c)] for node, c in failed)]))
    parts += [_node(node) for node in nodes]
    return html_page(title, "\n".join(parts), _STYLE)


def _node(node: dict[str, Any]) -> str:
    about = [f"{name} {node[name]}" for name in ("device", "ranks", "started", "seconds") if node.get(name)]
    rows = [["check", "", "s", "of", "found"]]
    rows += [
        [c["name"], c["status"], f"{c['seconds']:.1f}", f"{c.get('budget_s', 0):g}", _found(c)] for c in node["checks"]
    ]
    parts = [f"<h2>{html.escape(node['node'])}</h2>", f"<p>{html.escape(', '.join(about))}</p>", _table(rows)]
    return "\n".join(parts + [_details(check) for check in node["checks"] if check["figures"] or check.get("log")])


def _found(check: dict[str, Any]) -> str:
    return check["reason"] + (f"\nFix: {check['fix']}" if check["fix"] else "")


def _details(check: dict[str, Any]) -> str:
    """Figures and log of one check, open where it failed."""
    shown = [json.dumps(check["figures"], indent=1, ensure_ascii=False), check.get("log", "")]
    state = " open" if check["status"] == "fail" else ""
    head = html.escape(f"{check['name']}: {check['question']}")
    body = "\n".join(f"<pre>{html.escape(text)}</pre>" for text in shown if text)
    return f"<details{state}><summary>{head}</summary>\n{body}\n</details>"


def _table(rows: list[list[str]]) -> str:
    """Cells of a status have its colour. The first row is the head."""
    from megatron_rl.monitor.html_page import html_table

    def cell(text: str) -> str:
        shown = html.escape(text).replace("\n", "<br>")
        return f'<span class="{text.split()[0]}">{shown}</span>' if text in ("pass", "fail", "not run") else shown

    return html_table([[cell(text) for text in row] for row in rows])
