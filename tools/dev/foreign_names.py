"""Writes docs/coming-from.json: every key and metric of other projects that this one reads, beside ours.

python -m tools.dev.foreign_names docs/coming-from.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from megatron_rl.config.foreign_keys import PROJECTS as TRANSLATED
from megatron_rl.config.foreign_keys import rows
from megatron_rl.instruments.foreign.read import PROJECTS


def record() -> dict[str, Any]:
    """Return versions read from, keys (ours → project → its key) and metrics (ours → project → its metrics)."""
    metrics: dict[str, dict[str, list[str]]] = {}
    for project in PROJECTS:
        for name in project.names:
            theirs = f"{name.theirs} ({name.note})" if name.note else name.theirs
            metrics.setdefault(name.ours, {}).setdefault(project.name, []).append(theirs)
        for ours, function in project.derived.items():
            metrics.setdefault(ours, {})[project.name] = [f"computed: {(function.__doc__ or '').splitlines()[0]}"]
    keys: dict[str, dict[str, str]] = {}
    for row in rows():
        theirs = {project: ", ".join(key for key, _ in row.keys[project]) for project in TRANSLATED}
        for project, names in theirs.items():
            if row.ours != "-" and names:
                told = keys.setdefault(row.ours, {})
                told[project] = f"{told[project]}, {names}" if project in told else names
    return {
        "about": "docs/coming-from.md explains this file; python -m tools.dev.foreign_names writes it",
        "versions": {p.name: f"{p.version}, commit {p.commit} of {p.date}" for p in PROJECTS},
        "keys": keys,
        "metrics": metrics,
    }


def _table(entries: dict[str, Any]) -> str:
    """``entries``, each on a line of its own."""
    lines = [f"  {json.dumps(key)}: {json.dumps(value, ensure_ascii=False)}" for key, value in entries.items()]
    return "{\n" + ",\n".join(lines) + "\n}"


def main(arguments: list[str]) -> int:
    (file,) = arguments
    sections = [
        f"{json.dumps(name)}: " + (json.dumps(value) if isinstance(value, str) else _table(value))
        for name, value in record().items()
    ]
    Path(file).write_text("{\n" + ",\n".join(sections) + "\n}\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
