"""The table of causes: what counts for a row, and what speaks against it."""

from __future__ import annotations

import pytest

from megatron_rl.instruments.why.causes import CAUSES, Case, suspects, two
from megatron_rl.instruments.why.departures import WATCHED, Change
from tests.unit.instruments.why.test_onset import records


def test_every_measure_is_watched():
    assert {metric for cause in CAUSES for metric in cause.measures} <= WATCHED.keys()


@pytest.mark.parametrize(("step", "is_suspect"), [(20, True), (23, True), (30, False), (41, False)])
def test_a_measure_counts_among_the_first_departures_up_to_the_sign(step, is_suspect):
    changes = [Change("actor/entropy", 20, 0.3, 0.9), Change("mismatch/rho_std", step, 1e-6, 0.2)]
    found = suspects(Case(records(), {}, 40, changes))
    assert ("mismatch" in [suspect.name for suspect in found]) == is_suspect


def test_two_scales_are_not_divided():
    rows = [row | {"critic/score/mean": -0.5, "val/reward/mean": 0.3} for row in records()]
    assert "data" not in [suspect.name for suspect in suspects(Case(rows, {}, 40))]


def test_a_share_that_nobody_measured_is_not_zero():
    rows = [
        {k: v for k, v in row.items() if "clip_ratio" not in k}
        for row in records(response_length__mean=lambda s: s + 9.0)
    ]
    (length,) = [suspect for suspect in suspects(Case(rows, {}, 40)) if suspect.name == "length"]
    assert "how many were cut is not known" in length.observation


@pytest.mark.parametrize(("term", "is_suspect"), [("gspo", True), ("vespo", False)])
def test_a_mismatch_that_includes_the_updates_is_no_rounding(term, is_suspect):
    """Without a pass for po, mu is compared with a pi that has moved."""
    types = {"learner": {"dtype": "bf16"}, "rollout": {"dtype": "bf16"}, "batch": {"minibatches": 4}}
    case = Case(records(**{"mismatch/rho_std": 0.2}), types | {"objective": {"policy_term": term}})
    assert ("rounding" in [suspect.name for suspect in suspects(case)]) == is_suspect
    beyond = Case(records(**{"mismatch/rho_std": 0.4}), types | {"objective": {"policy_term": term}})
    assert ("mismatch" in [suspect.name for suspect in suspects(beyond)]) == is_suspect  # more than bf16 explains


def test_a_run_without_metrics_has_no_suspect():
    assert suspects(Case([{"step": 0}], {})) == []


@pytest.mark.parametrize(
    ("rates", "sign", "is_suspect"),
    [((1e-4, 1e-3), 25, True), ((1e-4, 1e-3), 15, False), ((1e-4, 1e-4), 25, False)],
)
def test_a_rate_that_was_raised_counts_from_the_raise_on(rates, sign, is_suspect):
    """Up to the sign alone: updates that grow at the same rate are a symptom."""
    sizes = {"noise/relative_update": lambda step: 3e-4 if step < 20 else 4e-3}
    rows = records(**sizes, **{"actor/lr": lambda step: rates[step >= 20]})
    found = [suspect.observation for suspect in suspects(Case(rows, {}, sign)) if suspect.name == "learning rate"]
    assert found == ["one update changes the weights by 0.40% of their size"] * is_suspect


def test_large_numbers_have_no_exponent():
    assert [two(value) for value in (250.0, 704.2, 1.234, 2.9e-13)] == ["250", "700", "1.2", "2.9e-13"]
