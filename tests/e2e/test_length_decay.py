"""The length-decay schedule in a run on both engines: a surge seen in real response lengths halves the rate."""

import json
from pathlib import Path

import torch

from tests.support.rounding import CLOSED_FORM, adam_largest_update, gamma
from tests.support.zygote import run_command

# The first rise of the mean length counts, whatever its size: five steps are enough for a surge and a halving.
DETECTOR = "{smoothing_steps: 1, surge_ratio: 1.0001, confirm_steps: 1, min_step: 1, baseline_window: 5}"
BETAS = (0.9, 0.95)  # learner.optimizer's defaults


def run(folder: Path, *arguments: str) -> str:
    done = run_command("megatron_rl", arguments, folder)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def test_a_surge_of_real_responses_sets_the_clock(tmp_path):
    settings = [f"run_root={tmp_path}", "name=run", "num_steps=6", "batch.prompts=4", "validation.every=0"]
    settings += ["learner.max_tokens_per_microbatch=400", f"schedule.detector={DETECTOR}", "monitor.plots=false"]
    arguments = [argument for setting in settings for argument in ("--set", setting)]
    run(tmp_path, "train", "recipes/tiny/length_decay.yaml", *arguments)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    lengths = [row["response_length/mean"] for row in rows]
    surge = next(t for t in range(1, 6) if lengths[t] >= 1.0001 * min(lengths[: t + 1]))
    period = round(1.8 * surge)
    assert [row["lr_sched/surge_step"] for row in rows] == [-1.0] * surge + [surge] * (6 - surge)
    expected = [1e-4 if t < surge else max(1e-4 / 2 ** (t // period), 1e-5) for t in range(6)]
    assert [row["actor/lr"] for row in rows] == expected
    assert expected[-1] < expected[0]
    for number, row in enumerate(rows, start=1):  # the rate in force bounds what an update does
        largest = adam_largest_update(number, row["actor/lr"], *BETAS)
        # What the weights did is a difference of two weights that are rounded themselves, each by up to u.
        roundings = CLOSED_FORM + 4 / row["noise/relative_update"]
        assert 0 < row["noise/update_rms"] <= largest * (1 + gamma(roundings, torch.float32))
        assert 0 < row["noise/batch_small"] < row["noise/batch_big"] == 32
        assert min(row["noise/sq_small"], row["noise/sq_big"]) > 0
    told = run(tmp_path, "explain-schedule", str(tmp_path / "run"))
    assert f"surge confirmed at step {surge}: T_decay = {period}" in told
    assert "recorded rate equals the formula at 6 of 6 steps" in told
