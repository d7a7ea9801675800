"""A study on a Slurm cluster: every run is a job of slurm/train.sbatch."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

from megatron_rl.errors import InputError
from megatron_rl.lab.jobs import Job
from megatron_rl.lab.on_disk import FINISHED
from megatron_rl.lab.runner import StudyRunner
from megatron_rl.shipped import checkout


def job_name(runner: StudyRunner, job: Job) -> str:
    """Of the Slurm job: two studies may have arms of one name."""
    return f"{runner.study.study.name}-{job.name}"


def submit(
    runner: StudyRunner, jobs: Sequence[Job], options: Sequence[str], say: Callable[[str], None] = print
) -> dict[str, str]:
    """Submit what is neither finished nor in the queue; run → state, or "in the queue".

    ``options`` are sbatch's: nodes, GPUs, time, account. Raises `InputError` where slurm/submit.sh refuses a run, or
    where there is no Slurm.
    """
    repository = checkout()
    if repository is None:
        raise InputError("--slurm: the scripts are in slurm/ of a checkout; this is the installed package")
    runner.refuse_other_recipes(jobs)
    runner.root.mkdir(parents=True, exist_ok=True)
    queued, states = set(_output(["squeue", "--me", "--noheader", "--format=%j"]).split()), {}
    for job in jobs:
        state = runner.state(job)
        if job_name(runner, job) in queued or state in FINISHED:
            states[job.name] = state if state in FINISHED else "in the queue"
            continue
        said = _output(_command(repository, runner, job, options))
        states[job.name] = "in the queue"
        say(f"{job}: {said.strip().splitlines()[-1]}")
    return states


def _command(repository: Path, runner: StudyRunner, job: Job, options: Sequence[str]) -> list[str]:
    scripts = repository / "slurm"
    settings = [part for override in job.overrides for part in ("--set", override)]
    named = [f"--job-name={job_name(runner, job)}", *options]
    return [
        str(scripts / "submit.sh"),
        *named,
        str(scripts / "train.sbatch"),
        str(runner.study.base.resolve()),
        *settings,
    ]


def _output(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError:
        raise InputError(f"--slurm: {command[0]}: no such program here; run this on a login node") from None
    if done.returncode:
        raise InputError(f"{' '.join(command[:3])} … ended with status {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout
