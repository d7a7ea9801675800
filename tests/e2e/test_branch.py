"""A real run and two real arms of it: the control repeats the run bit for bit, the other arm differs in one key."""

import json
from pathlib import Path

import pytest

from tests.support.zygote import run_command

SETTINGS = (
    "name=run",
    "num_steps=10",
    "batch.minibatches=4",
    "learner.optimizer.lr=1e-3",
    "checkpoint.every=2",
    "checkpoint.keep_last=0",
    "validation.every=0",
    "monitor.plots=false",
    "monitor.tensorboard=false",
)


@pytest.mark.slow
def test_the_control_repeats_the_run_and_an_arm_has_its_own_rate(tmp_path: Path):
    arguments = [part for setting in (f"run_root={tmp_path}", *SETTINGS) for part in ("--set", setting)]
    done = run_command("megatron_rl", ("train", "recipes/tiny/grpo.yaml", *arguments), tmp_path)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    branch = ("run", "branch", str(tmp_path / "run"), "--from", "2", "--steps", "5", "--seeds", "1", "--jobs", "1")
    asked = (*branch, "--arms", "third-rate", "--outcome", "reward", "--json")
    told = run_command("megatron_rl", asked, tmp_path)
    assert told.returncode == 0, told.stderr
    judgement = json.loads(told.stdout)
    assert judgement["control"]["repeated_steps"] == 5
    assert judgement["control"]["difference"] is None
    root = tmp_path / "run" / "branch" / "step_00000002"
    rates = {
        arm: {json.loads(line).get("actor/lr") for line in (root / arm / "metrics.jsonl").read_text().splitlines()}
        for arm in ("control-seed0", "third-rate-seed0")
    }
    assert rates == {"control-seed0": {1e-3}, "third-rate-seed0": {3.33e-4}}
    again = run_command("megatron_rl", asked, tmp_path)
    assert "2 runs, 2 already finished" in again.stderr
    assert json.loads(again.stdout) == judgement
