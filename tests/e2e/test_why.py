"""A real run that is made to collapse: a rule on levels goes off, and `why` suspects what was done to it."""

import json
from pathlib import Path

from tests.support.zygote import run_command

CAUSE = ("batch.minibatches=4", "rollout.quantization.weights=int4", "learner.optimizer.lr=1e-3")


def test_a_collapse_is_noticed_and_the_rate_is_suspected(tmp_path: Path):
    settings = [f"run_root={tmp_path}", "name=run", "num_steps=24", "monitor.plots=false", "monitor.tensorboard=false"]
    arguments = [part for setting in (*settings, *CAUSE) for part in ("--set", setting)]
    done = run_command("megatron_rl", ("train", "recipes/tiny/grpo.yaml", *arguments), tmp_path)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    said = " ".join(done.stdout.split())
    assert "alarms went off, first at: update-size (step 2)" in said
    assert "reward-drop (step " in said
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert sum(row.get("alarm/reward-drop", 0.0) for row in rows) >= 1
    told = run_command("megatron_rl", ("run", "why", str(tmp_path / "run"), "--json"), tmp_path)
    assert told.returncode == 0, told.stderr
    finding = json.loads(told.stdout)
    assert finding["suspects"][0]["name"] == "learning rate"
    assert not finding["healthy"]
