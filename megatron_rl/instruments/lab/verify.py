"""Verifies a run of a study: repeats it from its recipe and compares bit for bit."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

from megatron_rl.errors import InputError
from megatron_rl.instruments.lab.jobs import FINISHED, Job, LoadedStudy
from megatron_rl.instruments.lab.runner import PACKED, StudyRunner
from megatron_rl.monitor.run_directory import RunDirectory, encode_record, read_metrics

FOLDER = "verify"


def verify(
    loaded: LoadedStudy,
    root: Path,
    jobs: Sequence[Job],
    num_parallel: int,
    say: Callable[[str], None] = print,
    command: Callable[[Job], list[str]] | None = None,
) -> dict[str, str | None]:
    """Run ``jobs`` again in a new folder of ``root/verify`` and return the first difference per run, None if equal.

    Raises `InputError` if a job has no finished run to compare with.
    """
    first = StudyRunner(loaded, root, num_parallel)
    if missing := [job.name for job in jobs if first.state(job) not in FINISHED]:
        raise InputError(f"{root}: {', '.join(missing)} is not finished; `megatron-rl lab run` makes it")
    fresh = next(folder for number in count(1) if not (folder := root / FOLDER / str(number)).exists())
    again = [job for original in jobs for job in loaded.jobs(fresh, [original.seed], [original.arm], yoked_to=root)]
    runner = StudyRunner(loaded, fresh, num_parallel, command, say)
    states = runner.run(again)
    differences: dict[str, str | None] = {}
    for job in again:
        if states[job.name] not in FINISHED:
            differences[job.name] = f"the second run is {states[job.name]}: {fresh / job.name}.log"
            continue
        one, other = (read_metrics(RunDirectory(folder / job.name).metrics) for folder in (root, fresh))
        packed = root / job.name / PACKED
        if packed.is_file():
            differences[job.name] = _difference_from_packed(one, other, json.loads(packed.read_text())["sha256"])
        else:
            differences[job.name] = first_difference(one, other)
    return differences


def digest(records: Sequence[Mapping[str, Any]]) -> str:
    """Return the SHA-256 of all metrics of a run, without times."""
    lines = (json.dumps(encode_record(_without_times(record)), sort_keys=True) + "\n" for record in records)
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def _difference_from_packed(
    one: Sequence[Mapping[str, Any]], other: Sequence[Mapping[str, Any]], all_of_one: str
) -> str | None:
    if digest(other) == all_of_one:
        return None
    packed_keys = {key for record in one for key in record}
    narrowed = [{key: record[key] for key in record if key in packed_keys} for record in other]
    return first_difference(one, narrowed) or "a metric differs that the file of runs did not keep"


def drawn(jobs: Sequence[Job], number: int, sha256: str) -> list[Job]:
    """Return ``number`` of ``jobs``, drawn by the study's hash, so that everyone gets the same ones."""
    return random.Random(sha256).sample(list(jobs), min(number, len(jobs)))


def first_difference(one: Sequence[Mapping[str, Any]], other: Sequence[Mapping[str, Any]]) -> str | None:
    """Return the first metric (except times) in which two lists of records differ bit for bit; None if equal."""
    for a, b in zip(one, other, strict=False):
        a, b = (_without_times(record) for record in (a, b))
        for key in [*a, *(b.keys() - a.keys())]:
            # repr: NaN equals itself, and 0.0 differs from -0.0.
            if repr(a.get(key)) != repr(b.get(key)):
                return f"step {a['step']}: {key} is {a.get(key)!r} in the first run and {b.get(key)!r} in the second"
    if len(one) != len(other):
        return f"{len(one)} records in the first run and {len(other)} in the second"
    return None


def _without_times(record: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in record.items() if key != "time" and not key.startswith("perf/")}
