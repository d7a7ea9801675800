"""Is a run of a study what the code makes of its recipe? One arm and seed are run again and compared bit for bit."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

from megatron_rl.errors import InputError
from megatron_rl.lab.jobs import Job, LoadedStudy
from megatron_rl.lab.on_disk import FINISHED
from megatron_rl.lab.runner import PACKED, StudyRunner
from megatron_rl.monitor.jsonl import encode_record, read_metrics
from megatron_rl.monitor.run_directory import RunDirectory

FOLDER = "verify"


def verify(
    loaded: LoadedStudy,
    root: Path,
    jobs: Sequence[Job],
    num_parallel: int,
    say: Callable[[str], None] = print,
    command: Callable[[Job], list[str]] | None = None,
) -> dict[str, str | None]:
    """Run ``jobs`` again, below a new folder of ``root/verify``: run → its first difference, None where there is none.

    Raises `InputError` where one of them has no finished run to be compared with.
    """
    first = StudyRunner(loaded, root, num_parallel)
    if missing := [job.name for job in jobs if first.state(job) not in FINISHED]:
        raise InputError(f"{root}: {', '.join(missing)} is not finished; `megatron-rl lab run` makes it")
    fresh = next(folder for number in count(1) if not (folder := root / FOLDER / str(number)).exists())
    again = [job for wanted in jobs for job in loaded.jobs(fresh, [wanted.seed], [wanted.arm], yoked_to=root)]
    runner = StudyRunner(loaded, fresh, num_parallel, command, say)
    states = runner.run(again)
    found: dict[str, str | None] = {}
    for job in again:
        if states[job.name] not in FINISHED:
            found[job.name] = f"the second run is {states[job.name]}: {fresh / job.name}.log"
            continue
        one, other = (read_metrics(RunDirectory(folder / job.name).metrics) for folder in (root, fresh))
        packed = root / job.name / PACKED
        if packed.is_file():
            found[job.name] = _difference_from_packed(one, other, json.loads(packed.read_text())["sha256"])
        else:
            found[job.name] = first_difference(one, other)
    return found


def digest(records: Sequence[Mapping[str, Any]]) -> str:
    """SHA-256 of all metrics of a run, times apart."""
    lines = (json.dumps(encode_record(_without_times(record)), sort_keys=True) + "\n" for record in records)
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def _difference_from_packed(
    one: Sequence[Mapping[str, Any]], other: Sequence[Mapping[str, Any]], all_of_one: str
) -> str | None:
    if digest(other) == all_of_one:
        return None
    kept = {key for record in one for key in record}
    narrowed = [{key: record[key] for key in record if key in kept} for record in other]
    return first_difference(one, narrowed) or "a metric differs that the file of runs did not keep"


def drawn(jobs: Sequence[Job], number: int, sha256: str) -> list[Job]:
    """``number`` of ``jobs`` at random, the same ones whoever asks: drawn from the study's hash."""
    return random.Random(sha256).sample(list(jobs), min(number, len(jobs)))


def first_difference(one: Sequence[Mapping[str, Any]], other: Sequence[Mapping[str, Any]]) -> str | None:
    """The first metric in which two lists of records differ, bit for bit, times apart; None where none does."""
    for a, b in zip(one, other, strict=False):
        a, b = (_without_times(record) for record in (a, b))
        for key in [*a, *(b.keys() - a.keys())]:
            # repr: NaN is itself, and 0.0 is not -0.0.
            if repr(a.get(key)) != repr(b.get(key)):
                return f"step {a['step']}: {key} is {a.get(key)!r} in the first run and {b.get(key)!r} in the second"
    if len(one) != len(other):
        return f"{len(one)} records in the first run and {len(other)} in the second"
    return None


def _without_times(record: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in record.items() if key != "time" and not key.startswith("perf/")}
