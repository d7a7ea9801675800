"""What is on disk of a run of a study, by its folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

from megatron_rl.errors import EXIT_DONE, EXIT_ENDED_BY_LIMIT
from megatron_rl.monitor.run_directory import RunDirectory

State = Literal["done", "ended", "failed", "interrupted", "missing"]
"""done: all steps. ended: by an alarm or limit, a result like any other. failed: another exit status. interrupted:
stopped before its end, to be continued. missing: never started."""
FINISHED: tuple[State, ...] = ("done", "ended")


def exit_file(run: Path) -> Path:
    """Where a runner notes how the last attempt ended."""
    return run.with_name(f"{run.name}.exit.json")


def _exit_statuses(run: Path) -> list[int]:
    """Of the last attempt: of the process that a runner started, or of each rank of a Slurm job."""
    noted = exit_file(run)
    if noted.is_file():
        return [json.loads(noted.read_text())["status"]]
    return [int(file.read_text()) for file in sorted((run / "slurm" / "latest" / "status").glob("*"))]


def state_of(run: Path) -> State:
    """What is on disk of a run, by its folder."""
    if RunDirectory(run).done.is_file():
        return "done"
    statuses = _exit_statuses(run)
    if EXIT_ENDED_BY_LIMIT in statuses:
        return "ended"
    if statuses:
        return "interrupted" if all(status <= EXIT_DONE for status in statuses) else "failed"
    return "interrupted" if run.is_dir() else "missing"
