"""Layouts that people run: pipelines that do not divide the layers, engines of more GPUs than key/value heads."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.config.learner import ParallelConfig
from megatron_rl.config.model_rules import layout_problems, rollout_problems, stage_layers
from megatron_rl.config.rollout import RolloutConfig
from megatron_rl.model.architecture import shape_of

LARGE = shape_of(Path("models/Qwen3-235B-A22B"))[0]


@given(st.integers(1, 200), st.integers(1, 64))
def test_stages_share_all_layers_and_the_ends_have_fewest(layers, stages):
    shared = stage_layers(layers, stages)
    assert (len(shared), sum(shared)) == (stages, layers)
    assert all(size == shared[1] for size in shared[1:-1])
    assert max(shared[0], shared[-1]) <= max(shared)
    assert abs(shared[0] - shared[-1]) <= 1


def test_the_published_pipeline_is_legal():
    """NeMo-RL's: 94 layers over 8 stages, 11 on the first and the last."""
    assert stage_layers(94, 8) == [11, 12, 12, 12, 12, 12, 12, 11]
    assert layout_problems(ParallelConfig(tensor=2, pipeline=8, context=2, expert=16), LARGE, 128) == []


@given(st.integers(1, 100), st.integers(1, 64))
def test_a_stage_without_layers_is_refused_with_the_largest_number_that_has_none(layers, stages):
    shape = replace(LARGE, num_layers=layers, moe_layers=(True,) * layers)
    problems = layout_problems(ParallelConfig(pipeline=stages), shape, None)
    assert bool(problems) == (min(stage_layers(layers, stages)) < 1)
    for problem in problems:
        most = int(problem.split("; ")[1].split()[0])
        assert layout_problems(ParallelConfig(pipeline=most), shape, None) == []


@pytest.mark.parametrize(
    ("heads", "keys", "size", "told"),
    [
        (64, 4, 1, None),
        (64, 4, 4, None),
        (64, 4, 8, None),  # vLLM copies each key/value head to two GPUs
        (64, 4, 16, None),
        (64, 4, 3, "does not divide the 64 attention heads"),
        (12, 4, 6, "neither divides the 4 key/value heads nor is a multiple of them"),
    ],
)
def test_engines_hold_or_copy_key_value_heads(heads, keys, size, told):
    shape = replace(LARGE, num_heads=heads, num_kv_heads=keys)
    problems = rollout_problems(RolloutConfig(tensor_parallel=size, max_response_length=64), shape, 64)
    assert [told in problem for problem in problems] == [True] * (told is not None)
