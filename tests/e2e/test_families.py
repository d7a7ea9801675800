"""Families beside Qwen3-MoE: vLLM and the learner compute the same, with routes replayed (R3) where there are experts.

An MoE has one layer without experts before those that have them, so that rows of routes and layers do not coincide.
"""

import math

import pytest

from tests.parallel.gloo import run_ranks
from tests.support.families import DENSE, MOE, save_family
from tests.support.slow import slow_but


@pytest.fixture(scope="module")
def compared(tmp_path_factory, request):
    """By family, what `programs.replay` found in the dtypes that the selected tests read."""
    results = {}
    asked = {
        (item.callspec.params["family"], "bf16" if item.originalname.endswith("bf16") else "fp32")
        for item in request.session.items
        if item.module is request.module and "family" in getattr(getattr(item, "callspec", None), "params", ())
    }

    def compare(family: str) -> dict:
        if family not in results:
            model = save_family(tmp_path_factory.mktemp(family), family)
            call = {"model": str(model), "dtypes": [dtype for dtype in ("fp32", "bf16") if (family, dtype) in asked]}
            # In 16 bits router and head are in fp32 on both sides. The reference in float64 is the cost.
            call |= {"num_prompts": 8, "num_samples": 4, "fp32_router": family in MOE, "fp32_head": family in MOE}
            (results[family],) = run_ranks("tests.e2e.programs.replay", "in_each_dtype", 1, **call)
        return results[family]

    return compare


QUICK = tuple(family for family in MOE if family not in ("olmoe", "gpt_oss"))


@pytest.mark.parametrize("family", slow_but(QUICK, MOE + DENSE))
def test_engines_agree_in_fp32_before_and_after_an_update(family, compared):
    distances = compared(family)["fp32"]
    for scores in (distances, distances["after refit"]):
        assert scores["replayed"] <= math.expm1(2 * distances["bound"]) < 0.01  # two engines, neither in float64
        if family in DENSE:
            continue
        assert scores["metrics"]["router/replay_coverage"] == 1.0
        assert scores["metrics"]["router/fallback_frac"] == 0.0
        assert scores["metrics"]["router/agree_frac"] >= 1 - scores["longest"]  # near ties of one sequence


@pytest.mark.parametrize("family", slow_but(MOE[:1], MOE))
def test_every_row_is_replayed_in_bf16(family, compared):
    distances = compared(family)["bf16"]
    assert (distances["router"], distances["head"]) == ("fp32", "fp32")
    for scores in (distances, distances["after refit"]):
        assert scores["metrics"]["router/replay_coverage"] == 1.0
        assert scores["metrics"]["router/fallback_frac"] == 0.0
    # In bf16 rounding alone is between the engines: far less than another function would give.
    assert distances["replayed"] < 0.1
