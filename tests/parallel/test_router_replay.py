"""Router replay on every layout: exact, with gradients, and never of routes that are not those of the tokens.

fp32, stored rollouts, routes made without an engine. Ranks start once per number of ranks and run all their jobs.
"""

import re
from functools import partial

import numpy as np
import pytest

from tests.parallel.pool import Jobs
from tests.parallel.programs.replay import H
from tests.support.plain_training import Limits, float32_limits
from tests.support.rounding import rounded
from tests.support.slow import slow_but

LAYOUTS = {
    "one": (1, {}),
    "tp2": (2, {"parallel": {"tensor": 2}}),
    "ep2": (2, {"parallel": {"expert": 2}}),
    "tp2ep2": (2, {"parallel": {"tensor": 2, "expert": 2}}),
    "pp2": (2, {"parallel": {"pipeline": 2}}),
    "cp2": (2, {"parallel": {"context": 2}}),
    "cp2ep2, recompute full": (2, {"parallel": {"context": 2, "expert": 2}, "recompute": "full"}),
    # Several microbatches in flight, recomputed when later ones have already been routed.
    "pp2, recompute full": (2, {"parallel": {"pipeline": 2}, "recompute": "full", "max_tokens_per_microbatch": 128}),
    "tp2ep2, recompute selective": (2, {"parallel": {"tensor": 2, "expert": 2}, "recompute": "selective"}),
    "one, recompute full": (1, {"recompute": "full", "max_tokens_per_microbatch": 128}),
    "one, recompute selective": (1, {"recompute": "selective"}),
}
QUICK = ("tp2", "pp2")
WITHOUT_RECOMPUTATION = [name for name, (_, section) in LAYOUTS.items() if "recompute" not in section]
SLICE_MUTATIONS = {"permute ranks": "tp2", "swap local layers": "pp2", "other stage's layers": "pp2"}


@pytest.fixture(scope="module")
def tiny_with_a_dense_layer(tmp_path_factory) -> str:
    from tests.support.routes import save_random_model

    return str(save_random_model(tmp_path_factory.mktemp("model"), mlp_only_layers=[1]))


@pytest.fixture(scope="module")
def runs(tiny_with_a_dense_layer):
    """Result of every job on every rank: ``runs[job][rank]``."""

    def gradients(mode: str, routes: str, section: dict) -> tuple[str, dict]:
        return "gradients", {"mode": mode, "routes": results[routes][0] if routes else None, **section}

    jobs: dict[int, dict] = {1: {"native": ("native_routes", {}), "random": ("some_routes", {})}, 2: {}}
    for name, (ranks, section) in LAYOUTS.items():
        jobs[ranks] |= {
            f"{name}: off": partial(gradients, "off", "", section),
            f"{name}: native": partial(gradients, "r3", "native", section),
            f"{name}: random": partial(gradients, "r3", "random", section),
        }
        if "recompute" not in section:
            jobs[ranks] |= {
                f"{name}: r2": partial(gradients, "r2", "", section),
                f"{name}: watch": partial(gradients, "off", "random", {"telemetry": True, **section}),
            }
    for name in ("one", "pp2", "tp2"):
        ranks, section = LAYOUTS[name]
        jobs[ranks][f"{name}: dense"] = ("dense_layer", {"model": tiny_with_a_dense_layer, **section})
    jobs[2]["shift, ep2"] = ("mutated_payload", LAYOUTS["ep2"][1])
    for mutation, layout in SLICE_MUTATIONS.items():
        jobs[2][mutation] = ("mutated_slice", {"mutation": mutation, **LAYOUTS[layout][1]})
    jobs[1]["finite differences"] = ("finite_differences", {})
    jobs[1]["fallback"] = ("with_missing_rows", {})
    jobs[1]["refused"] = ("refused_options", {})
    with Jobs(jobs, module="tests.parallel.programs.replay") as results:
        yield results


def worst(result: dict, reference: dict) -> float:
    """Largest relative difference of a gradient, over the tensors of the model."""
    pairs = [(result["gradients"][name], gradient) for name, gradient in reference["gradients"].items()]
    return max(float((a - b).norm() / b.norm()) for a, b in pairs if b.norm() > 0)


@pytest.fixture(scope="module")
def limits() -> Limits:
    """How far rounding may take two layouts apart: that of the model's own routes, as replayed ones cost the same."""
    return float32_limits(1)


def of_padding(layout: str, limit: float) -> float:
    """How far replay of the same routes may move a result. Sequences cut over context-parallel ranks have padding,
    which replay spreads over the experts: products then have other numbers of rows, and round otherwise."""
    return limit if "context" in LAYOUTS[layout][1].get("parallel", {}) else 0.0


@pytest.mark.parametrize("layout", slow_but([*QUICK, "pp2, recompute full"], LAYOUTS))
def test_replaying_native_routes_is_native_routing(runs, layout, limits):
    for off, native in zip(runs[f"{layout}: off"], runs[f"{layout}: native"], strict=True):
        assert worst(native, off) <= of_padding(layout, limits.tensor_gradients)
        assert np.abs(native["logprobs"] - off["logprobs"]).max() <= of_padding(layout, limits.logprobs)
        assert native["metrics"]["router/agree_frac"] == 1.0
        assert native["metrics"]["router/replay_coverage"] == 1.0
        assert native["metrics"]["router/fallback_frac"] == 0.0


@pytest.mark.parametrize("layout", slow_but([*QUICK, "pp2, recompute full"], LAYOUTS))
def test_replaying_any_routes_gives_the_gradients_of_one_rank(runs, layout, limits):
    one = runs["one: random"][0]
    for result in runs[f"{layout}: random"]:
        assert worst(result, one) <= limits.tensor_gradients
        assert np.abs(result["logprobs"] - one["logprobs"]).max() <= limits.logprobs
        for name in ("agree_frac", "any_flip_frac", "replay_coverage", "agree_frac/layer_3"):
            # Shares of counts: only a router whose two experts are equal to all digits may choose another.
            assert result["metrics"][f"router/{name}"] == rounded(one["metrics"][f"router/{name}"])
    # The comparison would prove nothing if replay did not matter.
    assert worst(one, runs["one: off"][0]) > 0.1
    assert one["metrics"]["router/agree_frac"] < 0.2
    assert one["metrics"]["router/any_flip_frac"] > 0.9


@pytest.mark.parametrize("layout", slow_but(QUICK, WITHOUT_RECOMPUTATION))
def test_r2_records_what_one_rank_routes_and_changes_nothing(runs, layout, limits):
    native = runs["one: native"][0]["routes"]
    for rank, result in enumerate(runs[f"{layout}: r2"]):
        for got, want in zip(result["routes"], native, strict=True):
            assert (np.sort(got, -1) == np.sort(want, -1)).all()
        assert worst(result, runs[f"{layout}: off"][rank]) <= of_padding(layout, limits.tensor_gradients)
        assert result["metrics"]["router/agree_frac"] == 1.0


@pytest.mark.parametrize("layout", slow_but(QUICK, WITHOUT_RECOMPUTATION))
def test_watching_measures_and_changes_nothing(runs, layout):
    for rank, result in enumerate(runs[f"{layout}: watch"]):
        assert worst(result, runs[f"{layout}: off"][rank]) == 0.0
        assert 0.0 < result["metrics"]["router/agree_frac"] < 0.2
        assert "router/replay_coverage" not in result["metrics"]


def test_routers_get_the_gradient_of_the_replayed_experts(runs, limits):
    """Directional derivative over all router weights, random routes: autograd against central differences."""
    result = runs["finite differences"][0]
    near, far = result["differences"]
    truncation = abs(far - near)  # that of the far one is four times that of the near one, to the next order
    rounding = limits.mean_advantage * limits.logprobs / H
    assert abs(near - result["autograd"]) <= truncation + rounding < 0.05 * result["autograd"]


@pytest.mark.parametrize("layout", slow_but(["pp2"], ["one", "pp2", "tp2"]))
def test_dense_layers_among_the_others_have_no_routes(runs, layout, limits):
    one = runs["one: dense"][0]
    assert {name for name in one["native"]["metrics"] if "/layer_" in name} == {
        f"router/agree_frac/layer_{i}" for i in (0, 2, 3)
    }
    for result in runs[f"{layout}: dense"]:
        assert worst(result["native"], result["off"]) == 0.0
        assert worst(result["random"], one["random"]) <= limits.tensor_gradients


def test_a_bad_payload_ends_every_rank_with_the_same_message(runs):
    """Only one of the data-parallel ranks holds the sequence; the other must not wait for it."""
    first, second = runs["shift, ep2"]
    assert first["error"] == second["error"]
    assert re.search(r"sequence train:5/0: .*first at token 0 \(.*MoE layer 0", first["error"]), first["error"]
    for result in (first, second):
        assert result["num_updates"] == 0
        assert result["weights_moved"] == 0.0


@pytest.mark.parametrize("mutation", SLICE_MUTATIONS)
def test_wrong_slices_are_refused(runs, mutation):
    for result in runs[mutation]:
        assert "the route sliced for this rank belongs to another token or layer" in result["error"]
        assert re.match(r"routes cannot be replayed: (rank \d+: )?sequence train:", result["error"])
        assert ", layer " in result["error"]
        assert ", token " in result["error"]
        assert result["num_updates"] == 0


def test_missing_rows_fall_back_to_the_router_and_are_counted(runs):
    result = runs["fallback"][0]
    assert result["missing"]["metrics"]["router/fallback_frac"] == rounded(result["fraction"])
    assert result["missing"]["metrics"]["router/replay_coverage"] == rounded(1 - result["fraction"])
    # All rows on record are the router's own: falling back on the others changes nothing.
    assert worst(result["missing"], result["off"]) == 0.0
    assert worst(result["malformed"], result["off"]) == 0.0
    assert result["malformed"]["metrics"]["router/fallback_frac"] == rounded(result["fraction"])


def test_options_that_bypass_replay_are_refused(runs):
    messages = runs["refused"][0]
    assert "moe_router_fusion" in messages["fused"]
    assert "load-balancing loss (aux_loss) computes a top-k of its own" in messages["aux loss"]
    assert "moe_expert_capacity_factor" in messages["capacity"]
    assert messages["none"] is None
