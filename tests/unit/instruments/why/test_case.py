"""What the causes ask of a run."""

from __future__ import annotations

from megatron_rl.instruments.why.case import Case, two
from megatron_rl.instruments.why.departures import Change
from tests.unit.instruments.why.test_onset import records

SIGNAL, FALL = Change("groups/no_signal_frac", 20, 0.1, 0.9, 3.0), Change("critic/rewards/mean", 21, 0.6, 0.2)


def test_a_jump_comes_before_what_departs_later_and_a_drift_by_more_than_three_records():
    for change, comes in ((SIGNAL, True), (Change(SIGNAL.metric, 20, 0.1, 0.9, 1.0), False)):
        assert (Case(records(), {}, 40, [change, FALL]).upstream(FALL) is change) == comes
    early = Change(SIGNAL.metric, 16, 0.1, 0.9, 1.0)
    case = Case(records(), {}, 40, [early, FALL])
    assert (case.upstream(FALL), case.upstream(early)) == (early, None)


def test_an_unmeasured_metric_has_no_values():
    case = Case([{"step": 0, "actor/lr": float("nan")}], {"rollout": {"seed": None}})
    assert (case.values("actor/lr"), case.first("actor/lr"), case.values("x")) == ([], None, [])
    assert case.setting("rollout.seed", 7) == 7


def test_large_numbers_have_no_exponent():
    assert [two(value) for value in (250.0, 704.2, 1.234, 2.9e-13)] == ["250", "700", "1.2", "2.9e-13"]
