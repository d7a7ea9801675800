"""What `why` says of short runs of which the cause is known: one planted cause each, or none.

    python -m tools.dev.unstable_runs docs/lab/unstable.jsonl.xz

The file has recipes, and some metrics to four digits. docs/lab/causes.md says how the runs were made.
"""

from __future__ import annotations

import sys
from pathlib import Path

from megatron_rl.instruments.why.onset import Finding, find
from megatron_rl.monitor.alarms import RecordedRun, read_packed

# Name of a planted cause → the suspect that `why` should name.
SUSPECTS = {
    "rate": "learning rate",
    "updates": "updates a batch",
    "rounding": "rounding",
    "clip": "clip range",
    "reward": "reward",
    "length": "length",
    "entropy": "temperature",
    "fp16": "overflow",
    "data": "data",
    "staleness": "staleness",
}


def judged(file: Path) -> list[tuple[RecordedRun, Finding, str]]:
    """Return each run in ``file`` with what `why` finds, and whether that is right.

    "yes": a planted cause is among the first two suspects, a healthy run has none. "unharmed": a planted cause, no
    sign. Else "no".
    """
    rows = []
    for run in read_packed(file):
        finding = find(run.name, run.records, run.recipe)
        named = [suspect.name for suspect in finding.suspects[:2]]
        right = (
            "yes"
            if (SUSPECTS[run.cause] in " or ".join(named).split(" or ") if run.cause else finding.is_healthy)
            else "no"
        )
        rows.append((run, finding, "unharmed" if run.cause and finding.is_healthy else right))
    return rows


def table(rows: list[tuple[RecordedRun, Finding, str]]) -> list[str]:
    """Return a Markdown table with a line for each run that `judged` returned."""
    lines = ["| run | first alarm | collapse | first two suspects | right |", "|---|---|---|---|---|"]
    for run, finding, right in rows:
        alarms = [sign for sign in finding.signs if sign.name != "collapse"]
        first = f"{alarms[0].name}, step {alarms[0].step}" if alarms else "none"
        named = [suspect.name for suspect in finding.suspects[:2]]
        collapse = "none" if finding.collapse is None else str(finding.collapse)
        name = run.name.partition("/")[2]
        lines.append(f"| `{name}` | {first} | {collapse} | {', '.join(named) or 'none'} | {right} |")
    return lines


def summary(rows: list[tuple[RecordedRun, Finding, str]]) -> list[str]:
    """Return a Markdown table with a line for each planted cause, and one for the healthy runs."""
    lines = ["| planted | runs | harmed | `why` right |", "|---|---|---|---|"]
    for cause, name in [*SUSPECTS.items(), ("", "nothing")]:
        rights = [right for run, _, right in rows if run.cause == cause]
        harmed = sum(right != "unharmed" for right in rights) if cause else "–"
        lines.append(f"| {name} | {len(rights)} | {harmed} | {rights.count('yes')} |")
    return lines


if __name__ == "__main__":
    rows = judged(Path(sys.argv[1]))
    print("\n".join([*table(rows), "", *summary(rows)]))
