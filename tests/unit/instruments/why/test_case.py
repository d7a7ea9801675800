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


def test_a_weak_drift_does_not_make_a_jump_an_effect():
    drift, jump = Change("actor/grad_norm", 10, 0.3, 0.6, 1.1), Change(FALL.metric, 21, 0.6, 0.1, 3.0)
    case = Case(records(), {}, 40, [drift, jump])
    assert (case.upstream(jump), case.upstream(drift)) == (None, None)
    assert (case.departed(drift.metric), case.departed(jump.metric)) == (drift, jump)
    weak = Case(records(), {}, 40, [drift, FALL])
    assert (weak.upstream(FALL), weak.departed(FALL.metric)) == (drift, None)


def test_what_departs_soon_after_the_sign_counts_where_nothing_did_before():
    case = Case(records(), {}, 20, [FALL, Change("actor/entropy", 30, 0.3, 0.9)])
    assert (case.departed(FALL.metric), case.departed("actor/entropy")) == (FALL, None)


def test_records_far_apart_make_nothing_at_once():
    assert not Case(records(), {}).is_sparse
    assert Case([row | {"step": 10 * row["step"]} for row in records()], {}).is_sparse


def test_an_unmeasured_metric_has_no_values():
    case = Case([{"step": 0, "actor/lr": float("nan")}], {"rollout": {"seed": None}})
    assert (case.values("actor/lr"), case.first("actor/lr"), case.values("x")) == ([], None, [])
    assert case.setting("rollout.seed", 7) == 7


def test_large_numbers_have_no_exponent():
    assert [two(value) for value in (250.0, 704.2, 1.234, 2.9e-13)] == ["250", "700", "1.2", "2.9e-13"]
