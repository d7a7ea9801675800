"""Decoding of unequal responses by one law, against closed forms."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.instruments.plan.generation import Decoding, decode_seconds, generation_seconds
from megatron_rl.instruments.plan.memory import memory_plan
from megatron_rl.instruments.plan.workload import Lengths
from tests.support.planned import MOE, work
from tests.support.rounding import rounded


def law(fixed: float = 1.0, sequence: float = 0.0, token_bytes: float = 0.0) -> Decoding:
    return Decoding(fixed, 0.0, 0.0, 0.0, 1.0, token_bytes, 0.0, sequence)


def found(*lengths: float) -> Lengths:
    return Lengths("test", math.inf, np.array(sorted(lengths), dtype=float))


@pytest.mark.parametrize(("number", "slots", "batches"), [(8, 8, 1), (8, 100, 1), (8, 4, 2), (8, 1, 8)])
def test_equal_lengths_end_together(number, slots, batches):
    assert decode_seconds(law(), found(50.0), number, slots, 7.0) == batches * 50


def test_the_longest_response_runs_alone():
    """Of 2 and 10 tokens: two steps of both, eight of one; a step costs 1 s and 0.5 s a sequence."""
    assert decode_seconds(law(1.0, 0.5), found(2.0, 2.0, 10.0, 10.0), 4, 4, 0.0) == rounded(
        sum(1 + 0.5 * n for n in running([2.0, 2.0, 10.0, 10.0]))
    )


def running(lengths: list[float]) -> list[int]:
    """The responses of each step; the quantiles of four lengths in four groups."""
    quantiles = Lengths("", math.inf, np.array(lengths)).quantiles(4)
    return [int((quantiles > step).sum()) for step in range(math.ceil(quantiles.max()))] if whole(quantiles) else []


def whole(values: np.ndarray) -> bool:
    return bool((values == np.round(values)).all())


def test_a_growing_cache_is_read_in_each_step():
    """One response of 3 tokens behind 10: contexts of 10.5, 11.5 and 12.5 on average of a step."""
    assert decode_seconds(law(0.0, token_bytes=1.0), found(3.0), 1, 1, 10.0) == rounded(10.5 + 11.5 + 12.5)


@settings(deadline=None)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=40), st.integers(1, 50))
def test_seconds_are_between_the_longest_and_all_in_turn(lengths, slots):
    """And more room takes no longer."""
    given_lengths = found(*lengths)
    drawn = given_lengths.quantiles(len(lengths))
    seconds = decode_seconds(law(), given_lengths, len(lengths), slots, 1.0)
    assert drawn.max() <= seconds * (1 + 1e-9)
    assert seconds <= drawn.sum() * (1 + 1e-9)
    assert decode_seconds(law(), given_lengths, len(lengths), 50, 1.0) <= seconds * (1 + 1e-9)


def test_servers_that_sample_ahead_are_kept_full():
    """Their seconds fall with staleness, up to the slots; in the mode `finish` they do not."""
    servers = ("rollout.engine=vllm_server", "rollout.servers.count=8", "rollout.gpu_memory_utilization=0.9")

    def seconds(staleness: int, mode: str) -> float:
        w = work(MOE, "h100-80", *servers, f"rollout.max_staleness={staleness}", f"rollout.in_flight.mode={mode}")
        return generation_seconds(w, memory_plan(w).engine)

    kept = [seconds(staleness, "keep") for staleness in (1, 2, 4)]
    assert kept == sorted(kept, reverse=True)
    assert kept[0] < seconds(0, "finish") == seconds(1, "finish") == seconds(4, "finish")


def test_an_engine_over_nodes_and_without_graphs_takes_longer():
    def fixed(*overrides: str, **sizes: int) -> float:
        w = work(MOE, "h100-80", *overrides, **sizes)
        return Decoding.of(w, memory_plan(w).engine).fixed

    one, four, apart = fixed("rollout.tensor_parallel=1"), fixed(), fixed(nodes=16, gpus_per_node=2)
    assert one < four < apart < fixed("rollout.enforce_eager=true")
