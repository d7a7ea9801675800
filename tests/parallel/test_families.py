"""Families beside Qwen3-MoE on several ranks: log-probs, gradients, weights and conversion of one rank."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from megatron_rl.checkpoint import conversion
from megatron_rl.checkpoint.hf_folder import HFFolder
from megatron_rl.model.architecture import read_architecture
from megatron_rl.model.names import extra_states, stored_tensors
from tests.parallel.pool import Jobs
from tests.parallel.programs.learner import largest_difference
from tests.support.families import DENSE, MOE, save_family
from tests.support.plain_routers import watched_routers
from tests.support.plain_training import float32_limits, load, logits, run
from tests.support.slow import slow_but
from tests.support.tiny import stored_rollouts

FAMILIES = (*MOE, *DENSE)
LAYOUTS = {
    "tp2": {"tensor": 2},  # and two expert-parallel ranks where there are experts
    "pp3": {"pipeline": 3},
    "recompute": {},
}
QUICK = tuple(f for f in FAMILIES if f not in ("olmoe", "bailing_moe", "qwen3_next", "qwen3_5_moe_text"))
"""Of the first two, replay and conversion are quick tests; for the last two see test_delta_nets.py."""
STORED = ("olmoe", "bailing_moe", "deepseek_v3", "qwen3_next")
"""Of experts, whose routes are replayed and checkpoints converted in `make test`."""
RATE = 0.03125  # of biases: sums with it are exact enough to compare
ADAPTED = tuple(f"{name}.weight" for name in ("_proj", "kv_a_proj_with_mqa", "query_key_value", "attention.dense"))
ADAPTED += (".gate_up_proj", ".down_proj")  # of experts that a checkpoint has in one tensor
ADAPTED += tuple(f"linear_attn.in_proj_{part}.weight" for part in ("qkvz", "ba", "qkv", "z", "b", "a"))
RANK, PRECISION = 4, 1e-5  # of adapters; PRECISION: see test_learner_lora.py
STEPS, EPS = 2, 1e-3  # of Adam: see test_learner_layouts.py


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Path]:
    return {family: save_family(tmp_path_factory.mktemp(family), family) for family in FAMILIES}


@pytest.fixture(scope="module")
def runs(models, tmp_path_factory):
    jobs: dict[int, dict] = {1: {}, 2: {}, 3: {}}
    for family, path in models.items():

        def train(parallel: dict, path: Path = path, **learner) -> tuple[str, dict]:
            section = {"optimizer": {"lr": 1e-4, "eps": EPS}, "parallel": parallel} | learner
            return "train_on_stored_rollouts", {"num_steps": STEPS, "model": {"path": str(path)}, "learner": section}

        two = LAYOUTS["tp2"] | ({"expert": 2} if family in MOE else {})
        folder = str(tmp_path_factory.mktemp("checkpoint"))
        jobs[1][f"{family} one"] = train({})
        jobs[1][f"{family} recompute"] = train({}, recompute="selective")
        jobs[2][f"{family} tp2"] = train(two)
        jobs[3][f"{family} pp3"] = train(LAYOUTS["pp3"])
        kind, call = train(two)
        jobs[2][f"{family} r2"] = kind, call | {"routing": {"replay": "r2"}}
        moved = {"num_steps": 1, "routing": {"replay": "r2", "bias_update_rate": RATE}}
        jobs[1][f"{family} moved"] = (kind, train({})[1] | moved)
        jobs[2][f"{family} moved tp2"] = (kind, call | moved)
        bf16 = {"learner": {"dtype": "bf16"}, "rollout": {"dtype": "bf16"}, "precision": {"fp32_router": True}}
        jobs[1][f"{family} bf16"] = ("starting_weights", {"path": str(path), **bf16})
        adapters = {"lora": {"rank": RANK, "alpha": 8.0}, "optimizer": {"lr": 1e-2, "eps": EPS}}
        jobs[1][f"{family} lora"] = train({}, **adapters)
        jobs[2][f"{family} lora tp2"] = train(two, **adapters)
        call = train(two, **adapters)[1] | {"folder": folder + "-lora", "num_steps": 1}
        jobs[2][f"{family} lora saved"] = ("save_after", call)
        sections = {key: value for key, value in train({}, **adapters)[1].items() if key != "num_steps"}

        def resume(saved: str = f"{family} lora saved", sections: dict = sections) -> tuple[str, dict]:
            return "load_and_continue", sections | {"path": results[saved][0]["path"]}

        jobs[1][f"{family} lora resumed"] = resume
        call = train(two)[1] | {"folder": folder, "num_steps": 1}
        jobs[2][f"{family} saved"] = ("save_after", call)
    with Jobs(jobs, module="tests.parallel.programs.learner") as results:
        yield results


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


@pytest.mark.parametrize("family", slow_but(QUICK, FAMILIES))
def test_first_step_equals_hugging_face(family, runs, models):
    one, plain = runs[f"{family} one"][0], run(torch.float64, STEPS, eps=EPS, path=str(models[family]))
    limits = float32_limits(STEPS, eps=EPS, path=str(models[family]))
    assert np.abs(np.concatenate(one["before"]) - plain.before).max() <= limits.logprobs
    norm = np.linalg.norm(plain.gradients[0])
    assert abs(one["metrics"][0]["actor/grad_norm"] - norm) <= limits.of_metric("actor/grad_norm", 0)


@pytest.mark.parametrize("layout", slow_but(["tp2"], LAYOUTS))
@pytest.mark.parametrize("family", slow_but(QUICK, FAMILIES))
def test_layout_equals_one_rank(family, layout, runs, models):
    one, others = runs[f"{family} one"][0], runs[f"{family} {layout}"]
    limits = float32_limits(STEPS, eps=EPS, path=str(models[family]))
    for result in others:
        for when in ("before", "after"):
            assert np.abs(np.concatenate(result[when]) - np.concatenate(one[when])).max() <= limits.logprobs
        for step, (got, want) in enumerate(zip(result["metrics"], one["metrics"], strict=True)):
            assert abs(got["actor/grad_norm"] - want["actor/grad_norm"]) <= limits.of_metric("actor/grad_norm", step)
        assert largest_difference(result["weights"], one["weights"]) <= limits.weights


@pytest.mark.parametrize("family", slow_but(STORED, MOE))
def test_routes_of_the_first_pass_are_replayed_in_the_update(family, runs):
    for metrics in runs[f"{family} r2"][0]["metrics"]:
        assert (metrics["router/replay_coverage"], metrics["router/agree_frac"]) == (1.0, 1.0)


@pytest.mark.parametrize("family", slow_but(["deepseek_v3"], FAMILIES))
def test_adapters_of_every_linear_layer_move_as_on_one_rank(family, runs, models):
    """Those of shared experts and of latent vectors are among them. Routers and norms stay."""
    one, others = runs[f"{family} lora"][0], runs[f"{family} lora tp2"]
    start = dict(HFFolder(models[family]).items())
    for name, before in start.items():
        moved = one["weights"][name].double() - before.double()
        if not name.endswith(ADAPTED):
            assert not moved.any(), name
            continue
        values = torch.linalg.svdvals(moved)
        assert values[0] > 0, name
        # Beyond the rank is what rounding to the weight's type leaves: half a unit of each of its numbers.
        assert all(values[RANK:] <= 2**-24 * before.abs().max() * moved.numel() ** 0.5), name
    for result in others:
        for got, want in zip(result["metrics"], one["metrics"], strict=True):
            assert abs(got["actor/grad_norm"] - want["actor/grad_norm"]) <= PRECISION * want["actor/grad_norm"]
        # The projections into a delta net are one in Megatron, with one adapter: the smallest has four rows of it.
        kinds = {name.split(".")[-2] for name in start if name.endswith(ADAPTED)}
        for kind in sorted({"in_proj_" if kind.startswith("in_proj_") else f"{kind}." for kind in kinds}):
            names = [name for name in start if f".{kind}" in name]
            whole = sum(float((one["weights"][n] - start[n]).double().square().sum()) for n in names) ** 0.5
            apart = sum(float((one["weights"][n] - result["weights"][n]).double().square().sum()) for n in names)
            assert apart**0.5 <= PRECISION * whole, kind


@pytest.mark.parametrize("family", slow_but(["deepseek_v3"], FAMILIES))
def test_adapters_of_two_ranks_go_on_on_one(family, runs):
    resumed, saved = runs[f"{family} lora resumed"][0], runs[f"{family} lora saved"][0]
    for got, want in zip(resumed["metrics"], saved["metrics"], strict=True):
        assert abs(got["actor/grad_norm"] - want["actor/grad_norm"]) <= PRECISION * want["actor/grad_norm"]


def test_the_bias_of_a_router_is_neither_rounded_nor_moved(runs, models):
    """A model in bf16 is cast twice after its weights are loaded; Megatron-Core can move the bias in an update."""
    stored = tensors(models["glm4_moe"])
    biases = [name for name in stored if name.endswith("e_score_correction_bias")]
    assert len(biases) == 2
    assert any((stored[name] != stored[name].bfloat16().float()).any() for name in biases)
    for exported in (runs["glm4_moe bf16"][0], runs["glm4_moe tp2"][1]["weights"]):
        assert all(torch.equal(exported[name], stored[name]) for name in biases)


def test_biases_that_are_to_move_follow_the_load(runs, models):
    """Experts that transformers' routers choose often get a lower bias. Its counts leave out a token a sequence."""
    path = models["glm4_moe"]
    start, moved = tensors(path), runs["glm4_moe moved"][0]["weights"]
    batch, seen = stored_rollouts(0), []
    model = load(path, torch.float32)
    with torch.no_grad(), watched_routers(model, batch, seen):
        logits(model, batch)
    biases = [name for name in start if name.endswith("e_score_correction_bias")]
    for name, router_logits in zip(biases, seen, strict=True):
        scores = torch.from_numpy(router_logits).sigmoid() + start[name].double()
        load_of_each = scores.topk(2, dim=-1).indices.flatten().bincount(minlength=len(start[name]))
        away = load_of_each.double() - load_of_each.double().mean()
        sure = away.abs() > 2 * len(batch.sequences)
        change = (moved[name] - start[name]) / RATE
        assert sure.any()
        assert torch.allclose(change[sure].double(), -away.sign()[sure], atol=1e-4)
        assert all(torch.equal(result["weights"][name], moved[name]) for result in runs["glm4_moe moved tp2"])


@pytest.mark.parametrize("family", slow_but([*STORED, DENSE[0]], FAMILIES))
def test_a_checkpoint_of_two_ranks_becomes_the_weights_that_were_trained(family, runs, models, tmp_path):
    saved = Path(runs[f"{family} saved"][0]["path"])
    stored = conversion.MegatronFolder(saved).reader.read_metadata().state_dict_metadata
    a = read_architecture(models[family])
    assert {entry.key for entry in stored_tensors(a)} | set(extra_states(a)) == {
        key for key in stored if not key.startswith("optimizer.")
    }
    conversion.to_hf(saved, tmp_path / "hf", models[family])
    conversion.to_megatron(tmp_path / "hf", tmp_path / "megatron")
    conversion.to_hf(tmp_path / "megatron", tmp_path / "again", models[family])
    first, second = (tensors(tmp_path / name) for name in ("hf", "again"))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    start = tensors(models[family])
    still = [name for name in start if torch.equal(start[name], first[name])]
    assert all(name.endswith(("e_score_correction_bias", "expert_bias")) for name in still), still
