"""What was measured of a study: outcomes by arm and seed, and the effects that they show."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_rl.errors import InputError
from megatron_rl.lab.runner import FINISHED, REUSED, StudyRunner
from megatron_rl.lab.statistics import Effect, outcome_of, paired_effect
from megatron_rl.lab.study import LoadedStudy
from megatron_rl.monitor.jsonl import read_metrics
from megatron_rl.monitor.run_directory import RunDirectory

Records = list[dict[str, float]]


@dataclass
class Results:
    """Finished runs of a study. ``outcomes``: arm → outcome → seed → value, without what is not defined."""

    study: LoadedStudy
    records: dict[str, dict[int, Records]]  # arm → seed → metrics.jsonl
    outcomes: dict[str, dict[str, dict[int, float]]]
    num_steps: int
    environment: dict[str, Any]  # of the first run
    ended: list[str] = field(default_factory=list)  # runs that an alarm or limit ended
    unfinished: list[str] = field(default_factory=list)
    reused: list[str] = field(default_factory=list)  # taken over from another study's run of the same recipe

    def effect(self, arm: str, outcome: str) -> Effect | None:
        """``arm`` against its control; None for a control and where seeds or values are missing."""
        control = self.study.study.arms[arm].control
        if control is None:
            return None
        ratio = self.study.study.outcomes[outcome].ratio
        return paired_effect(self.outcomes[arm][outcome], self.outcomes[control][outcome], ratio)

    def as_json(self) -> str:
        """Outcomes of every run, one arm a line."""
        rows = [f"  {json.dumps(arm)}: {json.dumps(_rounded(found))}" for arm, found in self.outcomes.items()]
        return "{\n" + ",\n".join(rows) + "\n}\n"


def _rounded(outcomes: dict[str, dict[int, float]]) -> dict[str, dict[int, float]]:
    return {
        name: {seed: float(f"{value:.6g}") for seed, value in by_seed.items()} for name, by_seed in outcomes.items()
    }


def read_results(loaded: LoadedStudy, root: Path) -> Results:
    """Read what is finished below ``root``; runs made with other recipes than the study's are refused.

    Raises `InputError` where nothing is finished.
    """
    runner, jobs = StudyRunner(loaded, root, num_parallel=1), loaded.jobs(root)
    runner.refuse_other_recipes(jobs)
    records: dict[str, dict[int, Records]] = {arm: {} for arm in loaded.study.arms}
    ended, unfinished, reused, first = [], [], [], None
    for job in jobs:
        state = runner.state(job)
        if state not in FINISHED:
            unfinished.append(job.name)
            continue
        if state == "ended":
            ended.append(job.name)
        directory = RunDirectory(root / job.name)
        first = first or directory
        if (directory.root / REUSED).is_file():
            reused.append(job.name)
        records[job.arm][job.seed] = read_metrics(directory.metrics)
    if first is None:
        raise InputError(f"{root}: no finished run of study {loaded.study.name}; start it with `megatron-rl lab run`")
    outcomes = {
        arm: {
            name: {
                seed: value
                for seed, records_of_run in by_seed.items()
                if (value := outcome_of(records_of_run, outcome)) is not None
            }
            for name, outcome in loaded.study.outcomes.items()
        }
        for arm, by_seed in records.items()
    }
    num_steps = loaded.recipe(jobs[0]).num_steps
    environment = json.loads(first.environment.read_text()) if first.environment.is_file() else {}
    return Results(loaded, records, outcomes, num_steps, environment, ended, unfinished, reused)
