"""Finished runs of a study in one file, to be kept with the repository or carried to another machine.

xz-compressed lines of JSON: a head with what the study fixed, then one line a run. Of a run's metrics.jsonl it keeps
what the study's outcomes and figure read, and the SHA-256 of all of it, so that `lab verify` still compares every
metric. Folders' names are left out; nothing of a machine but its hardware and versions is kept.
"""

from __future__ import annotations

import json
import lzma
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from megatron_rl.config.yaml12 import parse
from megatron_rl.errors import EXIT_DONE, EXIT_ENDED_BY_LIMIT, InputError
from megatron_rl.lab.figure import DEFAULT_METRICS
from megatron_rl.lab.jobs import LoadedStudy, without_folders
from megatron_rl.lab.on_disk import FINISHED, State
from megatron_rl.lab.registration import Registration, read_registration
from megatron_rl.lab.results import Results, read_results
from megatron_rl.lab.runner import PACKED, REUSED, StudyRunner
from megatron_rl.lab.study import Study
from megatron_rl.lab.verify import digest
from megatron_rl.monitor.jsonl import encode_record, read_metrics
from megatron_rl.monitor.run_directory import RunDirectory

FORMAT = 1
ENVIRONMENT = ("python", "versions", "hardware")  # of environment.json


def pack(loaded: LoadedStudy, root: Path, file: Path) -> int:
    """Write all finished runs below ``root`` to ``file``; returns their number. The same runs make the same bytes.

    Raises `InputError` where nothing is finished, and where a run's recipe is not the study's.
    """
    runner, jobs = StudyRunner(loaded, root, num_parallel=1), loaded.jobs(root)
    runner.refuse_other_recipes(jobs)
    finished = [(job, state) for job in jobs if (state := runner.state(job)) in FINISHED]
    if not finished:
        raise InputError(f"{root}: no finished run of study {loaded.study.name}; `megatron-rl lab run` makes them")
    registration = read_registration(root)
    head = {
        "format": FORMAT,
        "study": loaded.study.name,
        "registration": None if registration is None else vars(registration),
    }
    kept = metrics_of(loaded.study)
    lines = [head, *(_packed(root / job.name, state, kept) for job, state in finished)]
    text = "".join(json.dumps(line, allow_nan=False) + "\n" for line in lines)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(lzma.compress(text.encode(), preset=9 | lzma.PRESET_EXTREME))
    return len(finished)


def metrics_of(study: Study) -> set[str]:
    """What outcomes and figure read."""
    return {"step"} | {how.metric for how in study.outcomes.values()} | set(study.panels or DEFAULT_METRICS)


def _packed(run: Path, state: State, kept: set[str]) -> dict[str, Any]:
    directory = RunDirectory(run)
    environment = json.loads(directory.environment.read_text()) if directory.environment.is_file() else {}
    records = read_metrics(directory.metrics)
    marked = run / PACKED
    return {
        "run": run.name,
        "reused": (run / REUSED).is_file(),
        "status": EXIT_ENDED_BY_LIMIT if state == "ended" else EXIT_DONE,
        "recipe": without_folders(parse(directory.recipe.read_text())[0]),
        "environment": {key: environment[key] for key in ENVIRONMENT if key in environment} | _starts(environment),
        "sha256": json.loads(marked.read_text())["sha256"] if marked.is_file() else digest(records),
        "records": [encode_record({key: record[key] for key in record if key in kept}) for record in records],
    }


def _starts(environment: Mapping[str, Any]) -> dict[str, Any]:
    """The code of a run's start, and of each later one whose code is another than that of the one before."""
    found: list[dict[str, Any] | None] = []
    for start in (environment, *environment.get("resumed", [])):
        git = start.get("git")
        code = git and {"commit": git["commit"], "changed": git["changed"]}
        if not found or code != found[-1]:
            found.append(code)
    later = [{"git": code} for code in found[1:]]
    return {"git": found[0]} | ({"resumed": later} if later else {})


def unpack(file: Path, folder: Path) -> Registration | None:
    """Make a folder for each run of ``file`` below ``folder``, as `StudyRunner.reuse` reads them; what was registered.

    Raises `InputError` where ``file`` is none of `pack`.
    """
    try:
        head, *runs = (json.loads(line) for line in lzma.decompress(file.read_bytes()).splitlines())
        if head["format"] != FORMAT:
            raise ValueError(f"format {head['format']!r}, this release reads {FORMAT}")
        for run in runs:
            _unpack(run, {"study": head["study"], "file": str(file)}, folder)
        return None if head["registration"] is None else Registration(**head["registration"])
    except (OSError, lzma.LZMAError, ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"{file}: cannot be read as runs that `lab pack` wrote ({type(error).__name__}: {error})"
        ) from error


def read_packed(loaded: LoadedStudy, file: Path) -> Results:
    """What ``file`` has of a study. Raises `InputError` where it is no file of `pack`, or of other recipes."""
    with tempfile.TemporaryDirectory() as folder:
        registration = unpack(file, Path(folder))
        if registration is not None:
            registration.save(Path(folder))
        return read_results(loaded, Path(folder))


def _unpack(run: Mapping[str, Any], origin: dict[str, str], folder: Path) -> None:
    if Path(run["run"]).name != run["run"]:
        raise ValueError(f"run {run['run']!r}: expected a name without folders")
    directory = RunDirectory(folder / run["run"])
    directory.root.mkdir(parents=True)
    directory.recipe.write_text(yaml.safe_dump(run["recipe"], sort_keys=False))
    directory.environment.write_text(json.dumps(run["environment"]))
    directory.metrics.write_text("".join(json.dumps(record) + "\n" for record in run["records"]))
    (directory.root / PACKED).write_text(json.dumps({"sha256": run["sha256"]} | origin) + "\n")
    if run.get("reused"):
        (directory.root / REUSED).write_text("as the file of runs says\n")
    if run["status"] == EXIT_DONE:
        directory.done.write_text(f"{len(run['records'])}\n")
    else:
        (folder / f"{run['run']}.exit.json").write_text(json.dumps({"status": run["status"]}) + "\n")


def adopt(loaded: LoadedStudy, root: Path, registrations: Sequence[Registration | None]) -> None:
    """Take over what was registered elsewhere before the first run of this very study, if ``root`` has nothing yet."""
    if read_registration(root) is None:
        commitment = loaded.study.commitment()
        for found in registrations:
            if found is not None and found.in_force == commitment:
                found.save(root)
                return
