"""A study's gate comes first: its two arms are run before the others, which are left alone where it fails."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megatron_rl.lab.results import NothingFinished, read_results
from megatron_rl.lab.study import Job, LoadedStudy


@dataclass(frozen=True)
class Stage:
    """What of some runs is to be made at this point."""

    jobs: list[Job]
    waiting: list[Job] = field(default_factory=list)  # until the gate's own runs are finished, in every seed
    ruled_out: list[Job] = field(default_factory=list)  # not testable, whatever they would show


def stage(loaded: LoadedStudy, root: Path, jobs: Sequence[Job]) -> Stage:
    """Part ``jobs`` by the state of the gate below ``root``. It is judged once, when all of its seeds are there."""
    arms = loaded.study.gate_arms
    if not arms:
        return Stage(list(jobs))
    own = [job for job in jobs if job.arm in arms]
    others = [job for job in jobs if job.arm not in arms]
    passed = None
    with contextlib.suppress(NothingFinished):
        passed = read_results(loaded, root).gate_passed
    if passed is None:
        return Stage(own, waiting=others)
    return Stage(list(jobs)) if passed else Stage(own, ruled_out=others)
