"""A schedule replayed on a recorded run: its steps, its rates, and what happened when."""

from __future__ import annotations

from itertools import pairwise

from megatron_rl.config.learner import ScheduleConfig
from megatron_rl.instruments.explain_schedule import replay

PEAK = 1e-6


def replayed(records: list[dict[str, float]], **keys):
    return replay(records, ScheduleConfig(style="length-decay", mode="manual", decay_period=4, **keys), PEAK, 20)


def test_the_rate_is_that_of_the_step_that_the_schedule_counts():
    records = [{"step": step, "response_length/mean": 10.0, "actor/lr": PEAK} for step in range(10)]
    steps = replayed(records)
    assert [(each.step, each.t, each.length) for each in steps] == [(step, step, 10.0) for step in range(10)]
    assert {each.recorded_lr for each in steps} == {PEAK}
    moved = [each.t for before, each in pairwise(steps) if each.lr != before.lr]
    assert [each.t for each in steps if "lr 1e-06 -> 5e-07" in each.event] == moved[:1] != []
    assert all(bool(each.event) == (each.t in moved) for each in steps)
    skipped = replayed([{**record, "lr_sched/step": record["step"] + 3} for record in records])
    assert [each.lr for each in skipped[:7]] == [each.lr for each in steps[3:]]


def test_the_detectors_own_length_counts_before_the_mean_of_the_batch():
    (step,) = replayed([{"step": 0, "response_length/mean": 10.0, "lr_sched/length": 7.0, "lr_sched/lr": 3.0}])
    assert (step.length, step.recorded_lr) == (7.0, 3.0)
    (step,) = replayed([{"step": 0}])
    assert (step.length, step.recorded_lr) == (None, None)


def test_an_alarms_halvings_stop_at_the_floor():
    (once, often) = (replayed([{"step": 0, "lr_sched/extra_halvings": n}], min_lr=3e-7)[0] for n in (1, 9))
    assert (once.lr, often.lr) == (PEAK / 2, 3e-7)
