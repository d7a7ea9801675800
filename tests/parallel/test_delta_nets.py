"""Models of gated delta nets on packed rows: transformers' torch form, layouts, both types of a model in bf16."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_rl.checkpoint import conversion
from megatron_rl.checkpoint.hf_folder import HFFolder
from megatron_rl.learner import compare_logits
from megatron_rl.model.architecture import read_architecture
from tests.parallel.pool import Jobs
from tests.parallel.programs.delta_nets import LENGTHS, tokens_of
from tests.parallel.programs.learner import largest_difference
from tests.support.families import DELTA_NETS, save_family, save_wrapper
from tests.support.plain_training import load
from tests.support.rounding import bound_from_double

BF16 = {"learner": {"dtype": "bf16", "optimizer": {"lr": 1e-3}}, "rollout": {"dtype": "bf16"}}


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Path]:
    """Of smaller weights than other tests': log-probs are then of the order that trained models have."""
    return {
        family: save_family(tmp_path_factory.mktemp(family), family, initializer_range=0.06) for family in DELTA_NETS
    }


@pytest.fixture(scope="module")
def rows(models):
    jobs: dict[int, dict] = {1: {}, 2: {}}
    for family, path in models.items():
        jobs[1][family] = ("row", {"path": str(path)})
        jobs[1] |= {f"{family} {n}": ("row", {"path": str(path), "numbers": [n]}) for n in range(len(LENGTHS))}
        jobs[2][f"{family} tp2"] = ("row", {"path": str(path), "tensor": 2})
    with Jobs(jobs, module="tests.parallel.programs.delta_nets") as results:
        yield results


@pytest.fixture(scope="module")
def theirs(models):
    """transformers' log-probs in float64, sequence by sequence, and gradients of their sum; how far those in fp32 may
    lie from them ("nats", and "of a gradient" a share of its largest number)."""
    return {
        family: with_bounds(*(of_transformers(path, dtype) for dtype in (torch.float64, torch.float32)))
        for family, path in models.items()
    }


def of_transformers(path: Path, dtype: torch.dtype) -> dict[str, Any]:
    model, logprobs = load(path, dtype), []
    for number, length in enumerate(LENGTHS):
        tokens = tokens_of(length, number)
        own = model(tokens[None], use_cache=False).logits[0, :-1].log_softmax(-1)
        logprobs.append(own.gather(1, tokens[1:, None])[:, 0])
    torch.cat(logprobs).sum().backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {"logprobs": [x.detach() for x in logprobs], "gradients": gradients}


def with_bounds(double: dict[str, Any], single: dict[str, Any]) -> dict[str, Any]:
    nats = [torch.cat(x["logprobs"]) for x in (single, double)]
    wanted = double["gradients"]
    scaled = [
        torch.cat([(g[name] / wanted[name].abs().max()).flatten() for name in wanted])
        for g in (single["gradients"], wanted)
    ]
    return double | {
        "nats": bound_from_double(*nats, max(LENGTHS)),
        "of a gradient": bound_from_double(*scaled, sum(LENGTHS)),
    }


def furthest(a: list[torch.Tensor], b: list[torch.Tensor]) -> float:
    return max(float((x - y).abs().max()) for x, y in zip(a, b, strict=True) if len(x))


def of_experts(name: str) -> tuple[str, int, slice] | None:
    """Where transformers keeps an expert's tensor: the whole, the expert, its rows."""
    block, _, own = name.partition(".experts.")
    if not own:
        return None
    expert, part = own.split(".")[:2]
    rows = {"gate_proj": slice(None, 32), "up_proj": slice(32, None), "down_proj": slice(None)}[part]
    return f"{block}.experts.{'down_proj' if part == 'down_proj' else 'gate_up_proj'}", int(expert), rows


@pytest.mark.parametrize("layout", ["", " tp2"])
@pytest.mark.parametrize("family", DELTA_NETS)
def test_a_packed_row_is_what_transformers_computes(family, layout, rows, theirs):
    bounds = theirs[family]
    for result in rows[f"{family}{layout}"]:
        assert furthest(result["logprobs"], bounds["logprobs"]) <= bounds["nats"]
        for name, ours in result["gradients"].items():
            place = of_experts(name)
            wanted = theirs[family]["gradients"]
            wanted = wanted[name] if place is None else wanted[place[0]][place[1], place[2]]
            assert wanted.abs().max() > 0, name
            assert (ours - wanted).abs().max() <= bounds["of a gradient"] * wanted.abs().max(), name


@pytest.mark.parametrize("family", DELTA_NETS)
def test_a_packed_row_is_its_sequences_alone(family, rows, theirs):
    alone = [rows[f"{family} {n}"][0] for n in range(len(LENGTHS))]
    (packed,) = rows[family]
    bounds = theirs[family]
    assert furthest(packed["logprobs"], [x for result in alone for x in result["logprobs"]]) <= 2 * bounds["nats"]
    for name, together in packed["gradients"].items():
        apart = sum(result["gradients"][name] for result in alone)
        assert (together - apart).abs().max() <= 2 * bounds["of a gradient"] * apart.abs().max(), name


def test_the_text_model_of_a_wrapper_is_what_transformers_computes(tmp_path):
    path = save_wrapper(tmp_path / "model")
    said = compare_logits.witness(path, read_architecture(path), [5, 6], free_gib=8.0)
    assert said.startswith("log-probs of the prompt (63 tokens, all 2 layers, fp32) under transformers and the")


# -- the learner


@pytest.fixture(scope="module")
def runs(models, tmp_path_factory):
    jobs: dict[int, dict] = {1: {}, 2: {}}
    for family, path in models.items():
        fp32 = {"num_steps": 2, "model": {"path": str(path)}, "learner": {"optimizer": {"lr": 1e-4, "eps": 1e-3}}}
        jobs[1][f"{family} one"] = ("train_on_stored_rollouts", fp32)
        cut = fp32 | {"learner": fp32["learner"] | {"parallel": {"context": 2}}}
        jobs[2][f"{family} cp2"] = ("train_on_stored_rollouts", cut)
        folder = str(tmp_path_factory.mktemp("checkpoint"))
        bf16 = {"model": {"path": str(path)}, **BF16}
        two = bf16 | {"learner": BF16["learner"] | {"parallel": {"tensor": 2}}}
        jobs[1][f"{family} saved"] = ("save_after", bf16 | {"folder": folder, "num_steps": 1})
        jobs[2][f"{family} saved dp2"] = ("save_after", bf16 | {"folder": folder + "-dp2", "num_steps": 1})

        def resume(saved: str, sections: dict):
            return lambda: ("load_and_continue", sections | {"path": results[saved][0]["path"]})

        jobs[1][f"{family} resumed"] = resume(f"{family} saved", bf16)
        jobs[2][f"{family} resumed dp2"] = resume(f"{family} saved dp2", bf16)
        jobs[2][f"{family} resumed tp2"] = resume(f"{family} saved", two)
    with Jobs(jobs, module="tests.parallel.programs.learner") as results:
        yield results


@pytest.mark.parametrize("family", DELTA_NETS)
def test_sequences_are_cut_over_ranks_by_heads_of_delta_nets(family, runs, theirs):
    (one,) = runs[f"{family} one"]
    for result in runs[f"{family} cp2"]:
        for when in ("before", "after"):
            assert np.abs(np.concatenate(result[when]) - np.concatenate(one[when])).max() <= 2 * theirs[family]["nats"]
        for got, want in zip(result["metrics"], one["metrics"], strict=True):
            assert got["actor/grad_norm"] == pytest.approx(want["actor/grad_norm"], rel=2e-5)
        assert largest_difference(result["weights"], one["weights"]) <= 1e-6


@pytest.mark.parametrize("layout", ["", " dp2"])
@pytest.mark.parametrize("family", DELTA_NETS)
def test_a_model_of_two_types_goes_on_bit_for_bit(family, layout, runs):
    """In bf16 with A_log in fp32: states of Adam are those of the same parameter."""
    for saved, resumed in zip(runs[f"{family} saved{layout}"], runs[f"{family} resumed{layout}"], strict=True):
        assert resumed["metrics"] == saved["metrics"]
        assert largest_difference(resumed["weights"], saved["weights"]) == 0.0
        assert any((w != w.bfloat16()).any() for name, w in saved["weights"].items() if name.endswith("A_log"))


@pytest.mark.parametrize("family", DELTA_NETS)
def test_a_model_of_two_types_goes_on_in_another_layout(family, runs):
    saved = runs[f"{family} saved"][0]
    for resumed in runs[f"{family} resumed tp2"]:
        assert np.abs(resumed["logprobs"] - saved["logprobs"]).mean() <= 0.02  # of bf16
        assert resumed["metrics"][0]["actor/grad_norm"] == pytest.approx(
            saved["metrics"][0]["actor/grad_norm"], rel=0.05
        )


def test_a_conversion_to_16_bits_leaves_the_decay_in_fp32(runs, models, tmp_path):
    family, megatron = "qwen3_next", tmp_path / "megatron"
    saved, model = Path(runs[f"{family} saved"][0]["path"]), models[family]
    conversion.to_hf(saved, tmp_path / "hf", model, dtype=torch.bfloat16, master=True)
    folder = HFFolder(tmp_path / "hf")
    in_fp32 = {name for name in folder.names if folder.dtype(name) == torch.float32}
    assert in_fp32 == {f"model.layers.{layer}.linear_attn.A_log" for layer in (0, 2)}
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["dtype"] == "bfloat16"
    conversion.to_megatron(tmp_path / "hf", megatron, dtype=torch.bfloat16)
    again = dict(conversion.MegatronFolder(megatron).hf_weights(read_architecture(model)))
    assert all(torch.equal(again[name], folder(name)) for name in folder.names)
