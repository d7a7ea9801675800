"""`lab run --slurm`: a study's runs as jobs of a real Slurm, submitted once and found again."""

from __future__ import annotations

import sys

import pytest
import yaml

from megatron_rl.instruments.lab import load_study
from megatron_rl.instruments.lab.runner import StudyRunner
from tests.slurm.cluster import Job
from tests.support.tiny import REPOSITORY

pytestmark = pytest.mark.slurm


@pytest.mark.slow
def test_a_study_is_submitted_run_by_run_and_not_twice(site):
    base = {
        "extends": str(REPOSITORY / "recipes" / "tiny" / "exact.yaml"),
        "num_steps": 1,
        "runtime": {"device": "cpu"},
        "batch": {"prompts": 2},
        "rollout": {"num_samples": 4},
        "validation": {"every": 0},
        "checkpoint": {"every": 0},
        "monitor": {"plots": False},
    }
    study = {
        "name": "submitted",
        "title": "A study on a cluster",
        "source": "nowhere",
        "claim": "none",
        "setting": "one step",
        "base": "base.yaml",
        "seeds": [0],
        "outcomes": {"reward": {"metric": "critic/rewards/mean", "statistic": "mean"}},
        "arms": {
            "plain": {},
            "large": {
                "set": {"learner.optimizer.lr": 1e-3},
                "control": "plain",
                "differs_in": ["learner.optimizer.lr"],
                "expect": {"reward": "lower"},
            },
        },
        "figure": [{"title": "rate", "arms": ["plain", "large"]}],
    }
    file, root = site.folder / "study.yaml", site.runs / "study"
    file.write_text(yaml.safe_dump(study, sort_keys=False))
    (site.folder / "base.yaml").write_text(yaml.safe_dump(base))

    def lab_run() -> str:
        options = ("--slurm", "--sbatch=--nodes=1", "--other-code", "--out", str(root))
        command = (sys.executable, "-m", "megatron_rl", "lab", "run", str(file), *options)
        environment = site.environment() | {"PYTHONPATH": str(REPOSITORY)}
        return site.cluster.run(*command, cwd=site.folder, env=environment)

    said = lab_run()
    numbers = [line.split()[-1] for line in said.splitlines() if "Submitted batch job" in line]
    assert len(numbers) == 2, said
    jobs = [Job(site.cluster, number, site.folder) for number in numbers]
    assert [job.field("JobName") for job in jobs] == ["submitted-plain-seed0", "submitted-large-seed0"]
    assert "Submitted" not in lab_run()  # in the queue, or done
    for job in jobs:
        assert job.wait() == "COMPLETED", job.log
    assert lab_run().strip() == "done: 2"
    loaded = load_study(file)
    runner = StudyRunner(loaded, root, 1)
    assert {runner.state(job) for job in loaded.jobs(root)} == {"done"}
