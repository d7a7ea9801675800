"""Finished runs of a study in one file, for the repository or for another machine.

The file has xz-compressed lines of JSON: a head with the study's fixed parts, then one line per run. From a run's
metrics.jsonl it keeps the metrics of the study's outcomes and figure. It has no names of folders, and only hardware and
versions of a machine.
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
from megatron_rl.instruments.lab.jobs import FINISHED, LoadedStudy, State, without_folders
from megatron_rl.instruments.lab.results import Results, read_results
from megatron_rl.instruments.lab.runner import PACKED, REUSED, Registration, StudyRunner, read_registration
from megatron_rl.instruments.lab.study import DEFAULT_METRICS, Study
from megatron_rl.monitor.run_directory import RunDirectory, encode_record, read_metrics


def first_difference(one: Sequence[Mapping[str, Any]], other: Sequence[Mapping[str, Any]]) -> str | None:
    """Return the first metric (except times) in which two lists of records differ bit for bit; None if equal."""
    for a, b in zip(one, other, strict=False):
        a, b = ({k: v for k, v in r.items() if k != "time" and not k.startswith("perf/")} for r in (a, b))
        for key in [*a, *(b.keys() - a.keys())]:
            # repr: NaN equals itself, and 0.0 differs from -0.0.
            if repr(a.get(key)) != repr(b.get(key)):
                return f"step {a['step']}: {key} is {a.get(key)!r} in the first run and {b.get(key)!r} in the second"
    if len(one) != len(other):
        return f"{len(one)} records in the first run and {len(other)} in the second"
    return None


FORMAT = 1
ENVIRONMENT = ("python", "versions", "hardware")  # kept keys of environment.json


def pack(loaded: LoadedStudy, root: Path, file: Path) -> int:
    """Write all finished runs below ``root`` to ``file`` and return their number. Equal runs give equal bytes.

    Raises `InputError` if no run is finished, or a run's recipe is not the study's.
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
    metric_names = metrics_of(loaded.study)
    lines = [head, *(_packed(root / job.name, state, metric_names) for job, state in finished)]
    text = "".join(json.dumps(line, allow_nan=False) + "\n" for line in lines)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(lzma.compress(text.encode(), preset=9 | lzma.PRESET_EXTREME))
    return len(finished)


def metrics_of(study: Study) -> set[str]:
    """Return the metrics that outcomes and figure use."""
    return {"step"} | {how.metric for how in study.outcomes.values()} | set(study.panels or DEFAULT_METRICS)


def _packed(run: Path, state: State, kept: set[str]) -> dict[str, Any]:
    directory = RunDirectory(run)
    environment = json.loads(directory.environment.read_text()) if directory.environment.is_file() else {}
    records = read_metrics(directory.metrics)
    return {
        "run": run.name,
        "reused": (run / REUSED).is_file(),
        "status": EXIT_ENDED_BY_LIMIT if state == "ended" else EXIT_DONE,
        "recipe": without_folders(parse(directory.recipe.read_text())[0]),
        "environment": {key: environment[key] for key in ENVIRONMENT if key in environment} | _starts(environment),
        "records": [encode_record({key: record[key] for key in record if key in kept}) for record in records],
    }


def _starts(environment: Mapping[str, Any]) -> dict[str, Any]:
    """Return the code of a run's first start, and of each later start with other code."""
    codes: list[dict[str, Any] | None] = []
    for start in (environment, *environment.get("resumed", [])):
        git = start.get("git")
        code = git and {"commit": git["commit"], "changed": git["changed"]}
        if not codes or code != codes[-1]:
            codes.append(code)
    later = [{"git": code} for code in codes[1:]]
    return {"git": codes[0]} | ({"resumed": later} if later else {})


def unpack(file: Path, folder: Path) -> Registration | None:
    """Unpack the runs of ``file`` below ``folder`` for `StudyRunner.reuse`, and return the registration in the file.

    Raises `InputError` if ``file`` was not written by `pack`.
    """
    try:
        head, *runs = (json.loads(line) for line in lzma.decompress(file.read_bytes()).splitlines())
        if head["format"] != FORMAT:
            raise ValueError(f"format {head['format']!r}, this release reads {FORMAT}")
        for run in runs:
            _unpack(run, {"study": head["study"], "file": str(file)}, folder)
        return None if head["registration"] is None else Registration.of(head["registration"])
    except (OSError, lzma.LZMAError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(
            f"{file}: cannot be read as runs that `lab pack` wrote ({type(error).__name__}: {error})"
        ) from error


def read_packed(loaded: LoadedStudy, file: Path) -> Results:
    """Return the results in ``file``. Raises `InputError` if `pack` did not write it, or it has other recipes."""
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
    (directory.root / PACKED).write_text(json.dumps(origin) + "\n")
    if run.get("reused"):
        (directory.root / REUSED).write_text("as the file of runs says\n")
    if run["status"] == EXIT_DONE:
        directory.done.write_text(f"{len(run['records'])}\n")
    else:
        (folder / f"{run['run']}.exit.json").write_text(json.dumps({"status": run["status"]}) + "\n")


def adopt(loaded: LoadedStudy, root: Path, registrations: Sequence[Registration | None]) -> None:
    """Copy the registration of this study from elsewhere, if ``root`` has none yet."""
    if read_registration(root) is None:
        commitment = loaded.study.commitment()
        for registration in registrations:
            if registration is not None and registration.study == commitment:
                registration.save(root)
                return
