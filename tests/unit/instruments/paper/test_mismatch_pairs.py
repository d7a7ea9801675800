"""Figures of one pair of dtypes, by hand, and the recipe of a pair."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_rl.errors import InputError
from megatron_rl.instruments.paper.mismatch_pairs import PairResult, refuse_several_engines, with_dtypes
from tests.support.rounding import rounded
from tests.support.tiny import tiny_recipe


def test_figures_of_two_sequences_by_hand():
    mu = np.log([0.5, 0.5, 0.25])
    ratio = np.array([1.0, -2.0, 4.0])
    routes = np.array([[True, False], [False, False], [False, False]])
    figures = PairResult("bf16", "fp8", mu, mu + ratio, np.array([2, 1]), routes).figures()
    # The sequences differ by 1 - 2 and by 4.
    assert figures["sequence_log_ratio_std"] == rounded(2.5)
    assert figures["sequence_log_ratio_max_abs"] == rounded(4.0)
    assert figures["token_log_ratio_std"] == rounded(np.sqrt(6.0))  # mean 1, deviations 0, -3 and 3
    assert (figures["routes_differ_frac"], figures["tokens_with_other_route_frac"]) == (1 / 6, 1 / 3)
    assert (figures["mean_length"], figures["num_sequences"]) == (1.5, 2)


def test_a_pair_without_routes_has_no_figures_of_them():
    mu = np.log([0.5, 0.25])
    result = PairResult("fp32", "fp32", mu, mu, np.array([2]), None)
    assert result.name == "fp32/fp32"
    assert not any("route" in name for name in result.figures())
    assert result.figures()["token_log_ratio_std"] == 0.0


def test_a_pair_changes_the_types_alone():
    recipe = tiny_recipe()
    pair = with_dtypes(recipe, "fp32", "bf16+fp8")
    assert (pair.learner.dtype, pair.rollout.dtype, pair.rollout.quantization.weights) == ("fp32", "bf16", "fp8")
    plain = with_dtypes(recipe, "bf16", "fp32")
    assert (plain.learner.dtype, plain.rollout.dtype) == ("bf16", "fp32")
    assert plain.rollout.quantization.weights == recipe.rollout.quantization.weights
    assert plain.objective == recipe.objective


def test_a_gpu_has_one_type_of_engine_in_a_command():
    several = [("bf16", "bf16"), ("fp16", "bf16"), ("bf16", "fp16")]
    with pytest.raises(InputError, match=r"--pairs has 2 types of the engine \(bf16, fp16\).*once for each"):
        refuse_several_engines(several, "cuda")
    refuse_several_engines(several, "cpu")
    refuse_several_engines(several[:2], "cuda")
