"""What of a study can be run at this point.

A gate's two arms come before the others, which are left alone where it fails; a yoked run comes after the run that its
values are outcomes of.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megatron_rl.lab.jobs import Job, LoadedStudy
from megatron_rl.lab.results import NothingFinished, read_results


@dataclass(frozen=True)
class Stage:
    """What of some runs is to be made at this point."""

    jobs: list[Job]
    waiting: list[Job] = field(default_factory=list)  # until the runs that they depend on are finished
    ruled_out: list[Job] = field(default_factory=list)  # not testable, whatever they would show


def stage(
    loaded: LoadedStudy,
    root: Path,
    seeds: Sequence[int] | None = None,
    arms: Sequence[str] | None = None,
) -> Stage:
    """Part the runs of ``seeds`` and ``arms`` (None: all) by what is finished below ``root``.

    The gate is judged once, when all of its seeds are there; who names ``arms`` has them whatever it says.
    """
    jobs = loaded.jobs(root, seeds, arms)
    found = Stage(jobs) if arms else _by_the_gate(loaded, root, jobs)
    ready, unready = ([job for job in found.jobs if bool(job.waits_for) == waits] for waits in (False, True))
    return Stage(ready, found.waiting + unready, found.ruled_out)


def _by_the_gate(loaded: LoadedStudy, root: Path, jobs: list[Job]) -> Stage:
    arms = loaded.study.gate_arms
    if not arms:
        return Stage(jobs)
    own = [job for job in jobs if job.arm in arms]
    others = [job for job in jobs if job.arm not in arms]
    passed = None
    with contextlib.suppress(NothingFinished):
        passed = read_results(loaded, root).gate_passed
    if passed is None:
        return Stage(own, waiting=others)
    return Stage(jobs) if passed else Stage(own, ruled_out=others)
