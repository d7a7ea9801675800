"""R3 between the real engines: what it removes of the mismatch, and what it costs nothing to know.

The model is the tiny one before training, with weights wide enough that experts differ. In the trained checkpoint
routing is a small part of the mismatch (docs/router-replay.md), which leaves nothing to remove. bf16 stands for fp16 in
`make test`.
"""

import math

import pytest

from tests.parallel.gloo import run_ranks
from tests.support.slow import asked, slow_but


@pytest.fixture(scope="module")
def results(tmp_path_factory, request) -> dict[str, dict]:
    from tests.support.routes import save_random_model

    model = save_random_model(tmp_path_factory.mktemp("model"), initializer_range=0.12)
    dtypes = [dtype for dtype in ("bf16", "fp16", "fp32") if dtype != "fp16" or (dtype,) in asked(request, "dtype")]
    (result,) = run_ranks("tests.e2e.programs.replay", "in_each_dtype", 1, model=str(model), dtypes=dtypes)
    # `pytest -s` prints the figures of docs/router-replay.md.
    print("\ndtype  std of rho, own routes  replayed  rows alike  tokens with a flip")
    for dtype, run in result.items():
        agree, flips = (run["metrics"][f"router/{name}"] for name in ("agree_frac", "any_flip_frac"))
        print(f"{dtype:<5}  {run['native']:>22.2e}  {run['replayed']:>8.2e}  {agree:>10.4f}  {flips:>18.4f}")
    return result


@pytest.mark.parametrize("dtype", slow_but(["bf16"], ["bf16", "fp16"]))
def test_replay_removes_two_thirds_of_the_mismatch_on_the_same_rollouts(results, dtype):
    # No rounding: that routing is most of this model's mismatch is what docs/router-replay.md says.
    assert results[dtype]["replayed"] <= results[dtype]["native"] / 3


@pytest.mark.parametrize("dtype", slow_but(["bf16", "fp32"], ["bf16", "fp16", "fp32"]))
def test_every_row_is_replayed(results, dtype):
    for metrics in (results[dtype]["metrics"], results[dtype]["after refit"]["metrics"]):
        assert metrics["router/replay_coverage"] == 1.0
        assert metrics["router/fallback_frac"] == 0.0
        assert metrics["router/payload_bytes"] == 4 * 2 * 1 + 8


def test_engines_disagree_in_bf16_and_agree_in_fp32(results):
    assert results["bf16"]["metrics"]["router/agree_frac"] < 1.0
    assert results["bf16"]["metrics"]["router/any_flip_frac"] > 0.0
    assert_only_near_ties_differ(results["fp32"], results["fp32"]["bound"])


def assert_only_near_ties_differ(differences: dict, bound: float) -> None:
    """In fp32 a router's choice can differ only where two experts are as good to seven digits. One sequence of 144 may
    meet that; the others agree to rounding, and all do once their routes are replayed."""
    assert differences["metrics"]["router/agree_frac"] >= 1 - differences["longest"]
    apart = 2 * bound  # two engines, neither of them in float64
    assert differences["replayed"] <= math.expm1(apart) < 0.01
    assert len(differences["native, by sequence"]) == 144
    assert sorted(differences["native, by sequence"])[-2] <= apart
    assert differences["native"] <= math.expm1(apart) or differences["metrics"]["router/agree_frac"] < 1.0


def test_routes_after_a_weight_update_are_those_of_the_new_weights(results):
    """The same prompts again, some longer than a block of the prefix cache: it would still hold the old routes."""
    assert_only_near_ties_differ(results["fp32"]["after refit"], results["fp32"]["bound"])  # weights near the first
