"""Shares of the mismatch that do not depend on the order in which causes are taken away."""

from __future__ import annotations

from itertools import chain, combinations

from megatron_rl.instruments.stored.attribution import CAUSES, _every_set, shapley
from tests.support.rounding import rounded


def subsets(causes):
    return map(frozenset, chain.from_iterable(combinations(causes, n) for n in range(len(causes) + 1)))


def test_causes_that_add_up_get_what_they_add():
    own = {"a": 4.0, "b": 2.0, "c": 1.0}
    left = {taken: 10.0 - sum(own[cause] for cause in taken) for taken in subsets(own)}
    assert shapley(left, own) == rounded(own)


def test_an_interaction_is_shared_equally():
    """Two causes that cancel each other: alone each takes away nothing, together everything."""
    left = {taken: 0.0 if len(taken) == 2 else 6.0 for taken in subsets("ab")}
    assert shapley(left, "ab") == {"a": 3.0, "b": 3.0}


def test_three_causes_by_hand():
    """v(S) is what S takes away: 1 and 2 for a and b alone, 5 for both; c takes away nothing with any of them."""
    gain = {frozenset(): 0.0, frozenset("a"): 1.0, frozenset("b"): 2.0, frozenset("ab"): 5.0}
    left = {taken: 9.0 - gain[taken - {"c"}] for taken in subsets("abc")}
    found = shapley(left, "abc")
    assert found == rounded({"a": 2.0, "b": 3.0, "c": 0.0})
    assert sum(found.values()) == left[frozenset()] - left[frozenset("abc")]


def test_sets_that_need_no_measurement_are_filled_in():
    """fp32 throughout: only routing can be taken away, and it gets all of the difference."""
    measured = _every_set({frozenset(): 5.0, frozenset({"routing"}): 1.0})
    assert set(measured) == set(subsets(CAUSES))
    assert shapley(measured, CAUSES) == {"routing": 4.0, "LM head": 0.0, "body": 0.0}


def test_a_body_in_fp32_has_its_head_in_fp32():
    run = {frozenset(): 8.0, frozenset({"LM head"}): 6.0, frozenset({"LM head", "body"}): 1.0}
    measured = _every_set(run | {taken | {"routing"}: value - 1.0 for taken, value in run.items()})
    assert measured[frozenset({"body"})] == 1.0
    assert measured[frozenset({"body", "routing"})] == 0.0
    found = shapley(measured, CAUSES)
    assert found == rounded({"routing": 1.0, "LM head": 1.0, "body": 6.0})
