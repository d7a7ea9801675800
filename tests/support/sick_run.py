"""A made-up run whose reward falls, with its checkpoints, for branches of it."""

import json
from pathlib import Path

from megatron_rl.checkpoint.manifest import TRAINER_FILE, checkpoint_name, hash_files, write_manifest
from megatron_rl.instruments.branch.arms import CONTROL
from megatron_rl.instruments.branch.plan import Branch
from megatron_rl.monitor.run_directory import JsonlSink, RunDirectory
from megatron_rl.run.identity import keep_recipe
from tests.support.tiny import tiny_recipe

ONSET, STEPS = 20, 40
SICK = {"batch": {"minibatches": 4}, "learner": {"optimizer": {"lr": 3e-3}}}


def rows(steps: int = STEPS, healthy: bool = False) -> list[dict[str, float]]:
    """A run with updates that are too large, whose reward falls from 0.6 to 0.1 at `ONSET`, or does not."""
    usual = {"actor/grad_norm": 0.5, "mismatch/rho_std": 1e-6, "actor/ppo_kl": 0.0, "actor/entropy": 0.3}
    usual |= {"noise/relative_update": 5e-4 if healthy else 4e-3, "perf/time/step": 36.0}
    reward = [0.6 if healthy or step < ONSET else 0.1 for step in range(steps)]
    return [
        {"step": step, "critic/rewards/mean": value, "critic/score/mean": value} | usual
        for step, value in enumerate(reward)
    ]


def checkpoint(folder: Path, step: int, complete: bool = True) -> Path:
    path = folder / "checkpoints" / checkpoint_name(step)
    path.mkdir(parents=True)
    (path / TRAINER_FILE).write_text(json.dumps({"learner": {"step": step}}))
    if complete:
        write_manifest(path, hash_files(path, [TRAINER_FILE]))
    return path


def write(folder: Path, records: list[dict[str, float]], recipe) -> Path:
    directory = RunDirectory(folder).create()
    keep_recipe(directory, recipe, 0)
    sink = JsonlSink(directory.metrics)
    for record in records:
        sink.write(record["step"], {name: value for name, value in record.items() if name != "step"})
    return folder


def make_run(folder: Path, records=None, checkpoints=(10, 20, 30), **keys) -> Path:
    """A run's folder with checkpoints after ``checkpoints`` steps."""
    write(folder, records or rows(), tiny_recipe(name="sick", num_steps=STEPS, **(SICK | keys)))
    for step in checkpoints:
        checkpoint(folder, step)
    return folder


PLANTED = {
    CONTROL: (0.10, 0.12, 0.08, 0.11),
    "third-rate": (0.60, 0.61, 0.59, 0.60),
    "one-update": (0.11, 0.10, 0.10, 0.11),
}


def finish(branch: Branch, root: Path, planted=PLANTED, only=None) -> None:
    """Finished runs whose outcome is the planted value of their arm and seed."""
    for job in branch.jobs(root):
        if only is not None and job.name not in only:
            continue
        value = planted[job.arm][job.seed]
        records = rows()[branch.begin : branch.begin + branch.steps]
        if job.arm != CONTROL or job.seed:
            records = [record | {"critic/score/mean": value} for record in records]
        write(root / job.name, records, branch.recipe(job))
        (root / job.name / "DONE").write_text(f"{STEPS}")
