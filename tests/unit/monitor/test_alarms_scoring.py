"""Recorded runs: where they collapse, and how a set of alarm rules does on them."""

from __future__ import annotations

import pytest

from megatron_rl.config.monitor import AlarmRule
from megatron_rl.errors import InputError
from megatron_rl.monitor.alarms import (
    CollapseRule,
    RecordedRun,
    collapse_step,
    distinct,
    read_packed,
    score_run,
    score_set,
)
from tests.support.finished_run import curve, packed


def test_packed_runs_are_read_once_each(tmp_path):
    runs = [{"run": name, "cause": "rate", "records": curve([0.5, 0.1])} for name in ("a", "b")]
    unpacked = read_packed(packed(tmp_path / "x.xz", runs))
    assert [(run.name, run.cause, len(run.records)) for run in unpacked] == [("s/a", "rate", 2), ("s/b", "rate", 2)]
    assert [run.name for run in distinct(unpacked)] == ["s/a"]
    (tmp_path / "bad.xz").write_bytes(b"no xz")
    with pytest.raises(InputError, match="cannot be read as packed runs"):
        read_packed(tmp_path / "bad.xz")


def test_a_set_of_rules_is_scored_by_hand():
    drop = AlarmRule(name="drop", metric="critic/rewards/mean", below=0.3)
    runs = [
        RecordedRun("collapsed", curve([0.8] * 20 + [0.1] * 20)),  # collapse: step 22, the median of five
        RecordedRun("missed", curve([1.6] * 20 + [0.7] * 20)),
        RecordedRun("healthy", curve([0.8] * 10 + [0.2] + [0.8] * 9)),
        RecordedRun("ailing", curve([0.8] * 20 + [0.5] * 20)),  # fell by more than a third, less than half
        RecordedRun("planted", curve([0.2] * 20), cause="reward"),
    ]
    score = score_set([(run, [drop]) for run in runs], CollapseRule())
    assert (score.runs, score.collapses, score.noticed, score.in_time) == (5, 2, 1, 1)
    assert (score.leads, score.missed) == ((2,), ("missed",))
    assert (score.healthy_runs, score.healthy_steps, score.false_alarms) == (1, 20, ("drop",))
    assert score.false_per_thousand == 50.0


@pytest.mark.parametrize("collapses", [True, False])
def test_collapse_is_found_where_the_reward_halves(collapses):
    values = [0.8] * 50 + ([0.8 - 0.01 * i for i in range(1, 81)] if collapses else [0.8] * 80)
    records = [{"step": i, "critic/rewards/mean": v} for i, v in enumerate(values)]
    # 0.4 is reached at step 89; the median of 5 trails by 2.
    assert collapse_step(records, CollapseRule()) == (91 if collapses else None)


def test_a_dip_is_no_collapse_and_nan_is():
    dip = [0.8] * 30 + [0.1] * 4 + [0.8] * 30
    assert collapse_step([{"step": i, "critic/rewards/mean": v} for i, v in enumerate(dip)], CollapseRule()) is None
    nan = [0.8] * 20 + [0.3] + [float("nan")] * 20
    assert collapse_step([{"step": i, "critic/rewards/mean": v} for i, v in enumerate(nan)], CollapseRule()) == 22


def test_lead_and_false_alarms_are_counted():
    rewards = [0.8] * 100 + [0.1] * 20
    signal = [0.0] * 10 + [1.0] * 2 + [0.0] * 68 + [1.0] * 40
    records = [
        {"step": i, "critic/rewards/mean": r, "s": s} for i, (r, s) in enumerate(zip(rewards, signal, strict=True))
    ]
    rule = AlarmRule(name="s", metric="s", above=0.5)
    (score,) = score_run(records, [rule], CollapseRule(), horizon=50)
    assert (score.fired, score.collapse, score.lead, score.false_alarms) == ((10, 80), 102, 22, 1)
    (calm,) = score_run(records[:90], [rule], CollapseRule(), horizon=50)
    assert (calm.collapse, calm.lead, calm.false_alarms) == (None, None, 2)
