"""What the pilots of the lab's studies compute from finished runs."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import yaml

from megatron_rl.instruments.lab.jobs import load_study
from megatron_rl.monitor.run_directory import RunDirectory
from megatron_rl.run.recorded_batches import record_batch
from tests.support.tiny import stored_rollouts, tiny_recipe
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
    records = [{"step": 0, "val/reward/mean": 0.25, "rollout_corr/log_ppl_abs_diff_sum": 0.2}]
    records += [{"step": 1, "val/reward/mean": 0.75, "rollout_corr/log_ppl_abs_diff_sum": 0.4}]
    records += [{"step": 140, "val/reward/mean": 0.5}, {"step": 161, "val/reward/mean": 0.25}]
    write_metrics(run, records)
    summary = lab_pilots.summary(study, run)
    assert summary == summary | {
        "start": 0.25,
        "best": 0.75,
        "end": 0.25,
        "reward": 0.375,
        "dose": (0.2 + 0.4) / 2,
    }
    assert summary.keys() == {"start", "best", "end"} | study.outcomes.keys()


def run_of_length_decay(folder, lengths: list[float], rewards: list[float]) -> RunDirectory:
    """Steps of four updates at a constant rate of 8, in mode shadow, as metrics.jsonl has them."""
    run = RunDirectory(folder)
    records = [
        {"step": step, "lr_sched/step": 4.0 * step, "lr_sched/lr": 8.0, "response_length/mean": length}
        | {"critic/rewards/mean": reward}
        for step, (length, reward) in enumerate(zip(lengths, rewards, strict=True))
    ]
    write_metrics(run, [*records, {"step": len(records), "val/reward/mean": 0.5}])
    detector = {"smoothing_steps": 1, "confirm_steps": 1, "baseline_window": 5, "min_step": 1}
    schedule = {"style": "length-decay", "mode": "shadow", "detector": detector, "period_factor": 1.4}
    recipe = tiny_recipe(batch={"prompts": 4, "minibatches": 4}, schedule=schedule)
    run.recipe.write_text(yaml.safe_dump(recipe.model_dump(mode="json")))
    return run


def test_the_clock_of_a_run_at_a_constant_rate(tmp_path):
    """A surge of 1.2 at update 16, so that rates are halved every 22 updates from then on, down to a tenth of 8; reward
    is lost in step 9."""
    study = load_study("recipes/lab/length_decay").study
    lengths, rewards = [10.0] * 4 + [12.0] * 22, [1.0] * 7 + [0.0] * 19
    clock = lab_pilots.clock_of(study, run_of_length_decay(tmp_path / "early", lengths, rewards), 1.15)
    rates = [8.0] * 22 + [4.0] * 22 + [2.0] * 22 + [1.0] * 22 + [0.8] * 16
    assert clock == lab_pilots.Clock(surge=16, period=22, collapse=4 * 9, mean_rate=float(np.mean(rates)))
    assert clock.is_early
    late = lab_pilots.clock_of(study, run_of_length_decay(tmp_path / "late", lengths, [1.0] + [0.0] * 25), 1.15)
    assert (late.collapse, late.is_early) == (20, False)
    kept = lab_pilots.clock_of(study, run_of_length_decay(tmp_path / "kept", lengths, [1.0] * 26), 1.15)
    assert (kept.collapse, kept.is_early) == (None, False)
    assert lab_pilots.clock_of(study, run_of_length_decay(tmp_path / "none", lengths, rewards), 1.25) is None
    assert not lab_pilots.Clock(surge=40, period=22, collapse=36, mean_rate=8.0).is_early  # no halving before a surge


def test_the_largest_ratio_and_then_the_largest_rate_is_chosen():
    early, late = lab_pilots.Clock(10, 18, 40, 1.0), lab_pilots.Clock(30, 54, 40, 1.0)
    clocks = {(1.2, 3.0): None, (1.2, 2.0): late, (1.2, 1.0): early}
    clocks |= {(1.1, 3.0): early, (1.1, 2.0): early, (1.1, 1.0): early}
    assert lab_pilots.chosen(clocks, {3.0: True, 2.0: True, 1.0: True}) == (1.2, 1.0)
    assert lab_pilots.chosen(clocks, {3.0: True, 2.0: True, 1.0: False}) == (1.1, 3.0)
    assert lab_pilots.chosen(clocks, {3.0: False, 2.0: True, 1.0: False}) == (1.1, 2.0)
    with pytest.raises(SystemExit, match="no ratio and rate"):
        lab_pilots.chosen(clocks, {3.0: False, 2.0: False, 1.0: False})


def test_improbable_tokens_are_counted_where_they_are_trained(tmp_path):
    """One token of each sequence is trained; of the first sequence it is improbable, as all untrained ones are."""
    run = RunDirectory(tmp_path / "run")
    for step in range(lab_pilots.STEPS):
        batch = stored_rollouts(step)
        for number, sequence in enumerate(batch.sequences):
            sequence.sampled, sequence.num_sampled = np.arange(sequence.length) == 0, 1
            sequence.old_logprobs = np.full(sequence.length, math.log(0.05), np.float32)
            sequence.old_logprobs[0] = math.log(0.5 if number else 0.05)
        record_batch(run.batches, batch, 0)
    assert lab_pilots.share_of_low(run, low_prob=0.01) == 0.0
    assert lab_pilots.share_of_low(run, low_prob=0.1) == 1 / len(batch.sequences)
    assert lab_pilots.share_of_low(run, low_prob=0.6) == 1.0
