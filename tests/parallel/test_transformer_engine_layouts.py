"""TransformerEngine's layers on several ranks, with all that their modules decide beside an update.

Against Megatron's own on one rank: gradient norms and clipping, router replay, fp32 head
and router, ring attention, adapters, checkpoints between both kinds of layers, conversion.
"""

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_rl.patching.releases import Target
from megatron_rl.patching.series import Series, tree_hash
from megatron_rl.patching.states import examine
from tests.parallel.transformer_engine import (
    convert,
    learner,
    load,
    lora,
    other_weights,
    over_local,
    over_te,
    replayed,
    same_adapters,
    same_continuation,
    same_weights,
    save_after,
    worst,
)
from tests.support import te
from tests.support.plain_training import float32_limits, relative_gradient_error, relative_norm_error
from tests.support.routes import random_routes
from tests.support.slow import slow_but
from tests.support.tiny import MODEL, stored_rollouts

pytestmark = pytest.mark.skipif(te.MISSING is not None, reason=str(te.MISSING))

LAYOUTS = {
    "dp2": (2, {}),
    "tp2ep2": (2, {"tensor": 2, "expert": 2}),
    "tp2etp2": (2, {"tensor": 2, "expert_tensor": 2}),
    "pp2ep2": (4, {"pipeline": 2, "expert": 2}),
}
# Together they cut heads, experts, each expert and layers: for what a replica does not change.
CUT_MODELS = ("tp2etp2", "pp2ep2")
SPLIT_EXPERTS = ("tp2ep2", "tp2etp2")  # over tensor-parallel ranks: without marks most of them do not count
ADAPTERS = {"dp2": {}, "pp2": {"pipeline": 2}}
ADAPTERS_OF_EXPERTS = {"ep2": {"expert": 2}, "tp2ep2": {"tensor": 2, "expert": 2}}
NORMS = {"num_batches": 8, "num_sequences": 8}
PRECISION = 1e-5  # relative, of a gradient norm
METRICS = ("actor/grad_norm", "actor/entropy", "mismatch/rho_std")


def norms(parallel: dict, **numbers: int) -> tuple[str, dict]:
    return "gradient_norm.norms_and_clipped_update", {**NORMS, **numbers, **parallel}


@pytest.fixture(scope="module")
def other(tmp_path_factory) -> Path:
    return other_weights(tmp_path_factory.mktemp("other"))


@pytest.fixture(scope="module")
def local(tmp_path_factory, dense):
    """Megatron's own layers on one rank."""
    with over_local(
        {
            "norms": norms({}),
            "r3": replayed(random_routes(stored_rollouts(0))),
            "head": ("precision.fp32_parts", {"dtype": "bf16"}),
            "r3, bf16": replayed(random_routes(stored_rollouts(0)), dtype="bf16"),
            "lora": lora(dense),
            "lora, experts": lora(str(MODEL)),
            "saved": save_after(tmp_path_factory.mktemp("run"), learner()),
        }
    ) as results:
        yield results.of_rank(0)


@pytest.fixture(scope="module")
def runs(transformer_engine, local, other, dense, tmp_path_factory):
    """Result of every job on every rank: ``runs[job][rank]``."""
    jobs: dict[int, dict] = {2: {}, 4: {}}
    routes = random_routes(stored_rollouts(0))

    def load_saved(parallel: dict) -> tuple[str, dict]:
        return load(local["saved"]["path"], learner(parallel))

    for layout, (ranks, parallel) in LAYOUTS.items():
        section = {"parallel": parallel}
        jobs[ranks] |= {
            f"norms, {layout}": norms(parallel),
            f"r3, {layout}": replayed(routes, **section),
            f"r2, {layout}": ("replay.gradients", {"mode": "r2", "routes": None, **section}),
            f"off, {layout}": ("replay.gradients", {"mode": "off", "routes": None, **section}),
            f"head, {layout}": ("precision.fp32_parts", {"dtype": "bf16", **parallel}),
            f"saved, {layout}": save_after(tmp_path_factory.mktemp("run"), learner(parallel)),
            f"loaded, {layout}": partial(load_saved, parallel),
            f"converted, {layout}": convert(other, tmp_path_factory.mktemp("converted"), parallel),
        }
    for layout in SPLIT_EXPERTS:
        jobs[2][f"upstream {layout}"] = norms(LAYOUTS[layout][1], num_batches=2)
    jobs[2] |= {
        "ring, cp2": replayed(routes, dtype="bf16", parallel={"context": 2}),
    }
    jobs[2] |= {f"lora, {name}": lora(dense, parallel=parallel) for name, parallel in ADAPTERS.items()}
    jobs[2] |= {
        f"lora, experts {name}": lora(str(MODEL), parallel=parallel) for name, parallel in ADAPTERS_OF_EXPERTS.items()
    }
    with over_te(transformer_engine, jobs) as results:
        yield results


@pytest.fixture(scope="module")
def error() -> float:
    """How far rounding may take two float32 norms apart: less than what is asked for."""
    bound = relative_norm_error(**NORMS)
    assert bound < PRECISION
    return bound


def same_norms(got: dict, want: dict, error: float) -> None:
    np.testing.assert_allclose(got["norms"], want["norms"][: len(got["norms"])], rtol=error, atol=0)


def same_clipped_update(got: dict, want: dict, error: float) -> None:
    """Its norm is what clipping leaves of it, and it is the same gradient."""
    wanted = want["norms"][0] / (want["norms"][0] + 1e-6)  # Megatron's guard against a norm of zero
    assert got["clipped norm"] == pytest.approx(wanted, rel=error)
    assert min(want["norms"]) > 2, "no proof: nothing would be clipped"
    pairs = [(got["clipped"][name], gradient) for name, gradient in want["clipped"].items()]
    largest = max(float((a - b).norm() / b.norm()) for a, b in pairs if b.norm() > 0)
    assert largest <= float32_limits(1).tensor_gradients + 2 * error


@pytest.mark.parametrize("layout", slow_but(["tp2etp2"], LAYOUTS))
def test_gradient_norms_and_clipping(runs, local, error, layout):
    for rank in runs[f"norms, {layout}"]:
        same_norms(rank, local["norms"], error)
        same_clipped_update(rank, local["norms"], error)


@pytest.mark.parametrize("layout", slow_but(["tp2etp2"], SPLIT_EXPERTS))
def test_the_patch_for_upstream_marks_experts_as_well_as_we_do(runs, local, error, layout):
    for rank in runs[f"upstream {layout}"]:
        same_norms(rank, local["norms"], error)
        same_clipped_update(rank, local["norms"], error)


def test_the_patch_for_upstream_fits_the_release():
    patches = te.REPOSITORY / "patches"
    ours, upstream = (Series.read(patches / name) for name in ("transformer-engine", "transformer-engine-upstream"))
    pristine = examine(ours, Target(te.FOLDER, None)).pristine
    released = {path: pristine.get(path, (te.FOLDER / path).read_bytes()) for path in upstream.paths}
    assert tree_hash(released) == upstream.pins["Tree-Before"]
    assert upstream.patched(released) != released


@pytest.mark.parametrize("layout", slow_but(["tp2etp2"], LAYOUTS))
def test_replayed_routes_give_the_gradients_of_one_rank(runs, local, layout):
    for rank in runs[f"r3, {layout}"]:
        assert worst(rank, local["r3"]) <= float32_limits(1).tensor_gradients
        assert np.abs(rank["logprobs"] - local["r3"]["logprobs"]).max() <= float32_limits(1).logprobs
        assert rank["metrics"]["router/replay_coverage"] == 1.0


@pytest.mark.parametrize("layout", slow_but(["tp2etp2"], LAYOUTS))
def test_r2_replays_what_it_recorded(runs, local, layout):
    for rank, off in zip(runs[f"r2, {layout}"], runs[f"off, {layout}"], strict=True):
        assert worst(rank, off) <= float32_limits(1).tensor_gradients
        assert worst(rank, local["r3"]) > 0.1, "no proof: other routes give the same gradients"
        assert rank["metrics"]["router/agree_frac"] == 1.0


@pytest.mark.parametrize("layout", slow_but(["tp2etp2"], CUT_MODELS))
def test_fp32_head_and_router(runs, local, layout):
    ranks = runs[f"head, {layout}"]
    heads = [rank["description"]["head"] for rank in ranks if rank["found"]["head"]]  # of the last stage's ranks
    assert set(heads) == {"fp32"}
    for rank in ranks:
        assert rank["found"]["router"]
        assert {dtype for kind in rank["found"].values() for dtype, _ in kind} == {torch.float32}
        assert rank["description"]["router"] == "fp32"
        for name in METRICS:
            ratio = rank["metrics"][name] / local["head"]["metrics"][name]
            assert abs(ratio - 1) <= relative_gradient_error(torch.bfloat16), name


def test_a_learner_with_ring_attention(runs, local):
    """In 16 bits, for which alone TransformerEngine has it, with routes that rounding does not change."""
    one = local["r3, bf16"]
    for rank in runs["ring, cp2"]:
        for name in METRICS:
            ratio = rank["metrics"][name] / one["metrics"][name]
            assert abs(ratio - 1) <= relative_gradient_error(torch.bfloat16), name
        assert rank["metrics"]["router/replay_coverage"] == 1.0


@pytest.mark.parametrize("layout", slow_but(["pp2"], ADAPTERS))
def test_adapters(runs, local, dense, layout):
    for rank in runs[f"lora, {layout}"]:
        assert any("lora_" in name for name in rank["adapters"])
        same_adapters(rank, local["lora"], dense)


@pytest.mark.parametrize("layout", slow_but(["ep2"], ADAPTERS_OF_EXPERTS))
def test_adapters_of_grouped_experts(runs, local, layout):
    """Layers that hold all experts of a rank have the adapters of Megatron's layers of one expert each."""
    want = local["lora, experts"]
    for rank in runs[f"lora, experts {layout}"]:
        assert "decoder.layers.0.mlp.experts.linear_fc1.lora_A3" in rank["adapters"]
        for got, expected in zip(rank["metrics"], want["metrics"], strict=True):
            assert abs(got["actor/grad_norm"] - expected["actor/grad_norm"]) <= PRECISION * expected["actor/grad_norm"]
        assert all(torch.equal(rank["exported before"][name], t) for name, t in want["exported before"].items())
        differences = [rank["exported"][name].double() - t for name, t in want["exported"].items()]
        moved = [t.double() - want["exported before"][name] for name, t in want["exported"].items()]
        error, size = (torch.cat([part.flatten() for part in parts]).norm() for parts in (differences, moved))
        assert size > 0
        assert error <= PRECISION * size


@pytest.mark.parametrize("layout", slow_but(["tp2etp2"], CUT_MODELS))
def test_a_layout_continues_a_run_of_megatrons_own_layers(runs, local, layout):
    for rank in runs[f"loaded, {layout}"]:
        same_continuation(rank, local["saved"])


@pytest.mark.parametrize("layout", slow_but(["tp2etp2"], CUT_MODELS))
def test_megatrons_own_layers_continue_runs_of_layouts(runs, layout):
    saved = runs[f"saved, {layout}"][0]
    with over_local({"loaded": load(saved["path"], learner())}) as results:
        same_continuation(results["loaded"][0], saved)


@pytest.mark.parametrize("layout", slow_but(["tp2etp2"], CUT_MODELS))
def test_conversion_both_ways(runs, other, tmp_path, layout):
    same_weights(runs[f"converted, {layout}"][0], other, tmp_path / "hf")
