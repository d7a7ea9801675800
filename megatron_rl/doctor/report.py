"""Reports: one of a node, merged ones of several, as data and as text.

``{"format": 1, "nodes": [{"node", "device", "ranks", "started", "seconds", "versions", "checks": […]}]}``, each check
as `outcome.Result.as_json` gives it.
"""

from __future__ import annotations

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

from megatron_rl.doctor.checks import Check
from megatron_rl.doctor.outcome import Result, failed
from megatron_rl.doctor.setting import Setting
from megatron_rl.errors import InputError
from megatron_rl.process.output import write_whole

FORMAT = 1
JOB = "between nodes"  # the "node" of what a job's ranks did together
NO_REPORT = "report"


def make(results: Sequence[Result], setting: Setting, started: float) -> dict[str, Any]:
    try:
        from megatron_rl.monitor.environment import package_versions

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
            found = json.loads(path.read_text())
            for node in found["nodes"]:
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
    """``json_file``: "-" for standard output."""
    text = json.dumps(report, indent=1) + "\n"
    if json_file == "-":
        sys.stdout.write(text)
    elif json_file:
        path = Path(json_file)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, text)
    if page_file:
        from megatron_rl.doctor.page import page

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
    told = [f"{node}: {check['name']}: {check['reason']}" for node, check in failures(report)] if nodes else []
    return "\n".join([f"{text}{nodes}", *told])
