"""Writes docs/coming-from.json: every key and metric of other projects that this one reads, beside ours.

python -m tools.dev.foreign_names docs/coming-from.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from megatron_rl.config.foreign_keys import COLUMNS, ROWS
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
    return {
        "about": "docs/coming-from.md explains this file; python -m tools.dev.foreign_names writes it",
        "versions": {p.name: f"{p.version}, commit {p.commit} of {p.date}" for p in PROJECTS},
        "keys": {
            cells[0]: dict(zip(COLUMNS[1:], cells[1:], strict=True))
            for cells in ([cell.replace("`", "") for cell in row] for row in ROWS)
        },
        "metrics": metrics,
    }


def main(arguments: list[str]) -> int:
    (file,) = arguments
    Path(file).write_text(json.dumps(record(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
