"""What the pilots of the lab's studies compute from finished runs."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from megatron_rl.lab.study import load_study
from megatron_rl.monitor.run_directory import RunDirectory
from megatron_rl.stored.batches import record_batch
from tests.support.tiny import stored_rollouts
from tools.dev import lab_pilots


@pytest.mark.parametrize("power", [0.5, 1.0, 1.7])
def test_a_dose_is_matched(power):
    std, dose = lab_pilots.matched(lambda std: 3 * std**power, target=0.6, start=1.0, tolerance=0.02)
    assert dose == 3 * std**power
    assert abs(math.log(dose / 0.6)) <= math.log1p(0.02)


def test_a_dose_is_matched_where_it_does_not_rise_evenly():
    """Responses change with the std, and their dose by some percent with them."""
    std, dose = lab_pilots.matched(lambda std: std * (1 + 0.03 * math.sin(200 * std)), 0.6, 0.1, tolerance=0.02)
    assert dose == std * (1 + 0.03 * math.sin(200 * std))
    assert abs(math.log(dose / 0.6)) <= math.log1p(0.02)


def test_the_nearest_is_taken_where_no_dose_is_near_enough():
    asked = []

    def bounded(std: float) -> float:
        asked.append(std)
        return min(std, 0.3)

    _, dose = lab_pilots.matched(bounded, target=0.6, start=0.1, tolerance=0.02)
    assert dose == 0.3
    assert len(asked) <= lab_pilots.MOST_TRIES


def write_metrics(run: RunDirectory, records: list[dict[str, float]]) -> None:
    run.root.mkdir(parents=True, exist_ok=True)
    run.metrics.write_text("".join(json.dumps(record) + "\n" for record in records))


def test_the_summary_has_what_the_rules_ask(tmp_path):
    run, study = RunDirectory(tmp_path / "run"), load_study("recipes/lab/mismatch").study
    rate = {"lr_sched/surge_step": -1.0, "lr_sched/decay_period": -1.0, "lr_sched/shadow_lr": 4.0}
    records = [{"step": 0, "val/reward/mean": 0.25, "rollout_corr/log_ppl_abs_diff_sum": 0.2} | rate]
    records += [{"step": 1, "val/reward/mean": 0.75, "rollout_corr/log_ppl_abs_diff_sum": 0.4} | rate]
    records += [{"step": 140, "val/reward/mean": 0.5} | rate, {"step": 150} | rate]
    surge = {"lr_sched/surge_step": 40.0, "lr_sched/decay_period": 80.0, "lr_sched/shadow_lr": 2.0}
    write_metrics(run, [*records, {"step": 160} | surge, {"step": 161, "val/reward/mean": 0.25}])
    found = lab_pilots.summary(study, run)
    assert study.outcomes.keys() <= found.keys()
    assert {name: value for name, value in found.items() if name not in study.outcomes.keys() - {"reward", "dose"}} == {
        "start": 0.25,
        "best": 0.75,
        "end": 0.25,
        "reward": 0.375,
        "dose": (0.2 + 0.4) / 2,
        "surge step": 40.0,
        "decay period": 80.0,
        "mean shadow rate": (4 * 4 + 2) / 5,
    }


def test_improbable_tokens_are_counted_where_they_are_trained(tmp_path):
    """One token of each sequence is trained; of the first sequence it is improbable, as all untrained ones are."""
    run = RunDirectory(tmp_path / "run")
    for step in range(lab_pilots.STEPS):
        batch = stored_rollouts(step)
        for number, sequence in enumerate(batch.sequences):
            sequence.loss_mask = np.arange(sequence.response_length) == 0
            sequence.old_logprobs = np.full(sequence.response_length, math.log(0.05), np.float32)
            sequence.old_logprobs[0] = math.log(0.5 if number else 0.05)
        record_batch(run.batches, batch, 0)
    assert lab_pilots.share_of_low(run, low_prob=0.01) == 0.0
    assert lab_pilots.share_of_low(run, low_prob=0.1) == 1 / len(batch.sequences)
    assert lab_pilots.share_of_low(run, low_prob=0.6) == 1.0
