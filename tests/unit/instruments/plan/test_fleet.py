"""Servers by events: they equal a simulation token by token."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.instruments.plan.fleet import Fleet, Prompt, Response, ServerCosts
from tests.support.rounding import gamma

COSTS = ServerCosts(slots=64, overhead=0.5, read=[0.25 + n / 64 for n in range(65)], prefill=(1 / 128, 0.0))
"""A step of n responses takes 0.75 + n / 64 seconds: sums of few powers of two, so that equal times are equal."""


def close(value: float) -> object:
    """Sums of up to 1e6 terms in fp64."""
    return pytest.approx(value, rel=gamma(1e6), abs=0)


def token_by_token(lengths: list[int], costs: ServerCosts) -> float:
    """One server, no prefill: seconds until all are complete, first come, first served, a decoding step at a time."""
    waiting, running, seconds = list(lengths), [], 0.0
    while waiting or running:
        while waiting and len(running) < costs.slots:
            running.append(waiting.pop(0))
        seconds += costs.overhead + costs.read[len(running)]
        running = [left - 1 for left in running if left > 1]
    return seconds


@given(st.lists(st.integers(1, 40), min_size=1, max_size=60), st.integers(1, 16))
@settings(max_examples=60)
def test_equals_a_simulation_token_by_token(lengths, slots):
    costs = replace(COSTS, slots=slots, prefill=(0.0, 0.0))
    prompt = Prompt(0.0, len(lengths))
    prompt.responses = [Response(prompt, length) for length in lengths]
    fleet = Fleet(costs, 1, "finish")
    fleet.ask([prompt])
    assert fleet.run(stop=lambda: prompt.is_complete) == close(token_by_token(lengths, costs))
    assert prompt.sampled == {0: close(sum(lengths))}


@given(
    st.integers(0, 64), st.floats(0, 1e5), st.floats(1e-3, 1e3), st.floats(0, 1e-3), st.floats(0, 1e-2), st.floats(0, 1)
)
@settings(max_examples=100)
def test_tokens_is_the_inverse_of_seconds(running, context, tokens, read_token, compute, overhead):
    costs = ServerCosts(64, overhead, [1e-3] * 65, read_token, compute)
    assert costs.tokens(running, context, costs.seconds(running, context, tokens)) == close(tokens)
