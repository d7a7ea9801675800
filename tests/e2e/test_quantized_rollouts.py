"""Rounded rollouts on the real engine: every stored weight, after the start and after an update, and what the learner
sees of it. What is right is rounded by `tests.support.plain_rounding`, in numpy."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from megatron_rl.checkpoint.hf_folder import HFFolder
from megatron_rl.config.model_rules import _has_fp8_cache, confirm_contract, contract
from megatron_rl.config.rollout import OWN_BLOCK, RolloutConfig
from megatron_rl.errors import InputError
from megatron_rl.instruments.paper.mismatch_pairs import measure_pair
from megatron_rl.learner.learner import Learner
from megatron_rl.learner.process_groups import shutdown
from megatron_rl.rollout.generator import Sampling
from megatron_rl.rollout.vllm_engine import VllmGenerator
from megatron_rl.rollout.weights import parameter_checksums
from megatron_rl.types import Group, Prompt
from tests.e2e import hf_reference
from tests.e2e.hf_reference import Keeping
from tests.support.families import ROUNDED, save_family
from tests.support.plain_rounding import rounded_checkpoint
from tests.support.rounding import bound_from_double
from tests.support.slow import slow_but
from tests.support.tiny import MODEL, stored_rollouts, tiny_recipe
from tools.dev.make_tiny_checkpoint import build_tokenizer

pytestmark = pytest.mark.usefixtures("cheap_engines")

PROBLEMS = ("^12345=", "^9=", "^604=", "^7171=", "^88=", "^20=", "^5550=", "^31=")


def prompts() -> list[Prompt]:
    tokenizer = build_tokenizer()
    return [Prompt(id=text, tokens=tokenizer.encode(text), answer="0") for text in PROBLEMS]


@contextmanager
def engine(model: Path, dtype: str, quantization: dict[str, str] | str | None) -> Iterator[VllmGenerator]:
    """With `verify_refit`: an update with the own checkpoint has left every stored parameter as it was."""
    config = RolloutConfig(dtype=dtype, quantization=quantization, max_response_length=24, kv_cache_gib=0.0625)
    generator = VllmGenerator(config, model, max_prompt_length=16)
    try:
        yield generator
    finally:
        generator.close()


def stored(generator: VllmGenerator) -> dict[str, int]:
    return generator._llm.apply_model(parameter_checksums)[0]


def sampled(groups: list[Group]) -> list[tuple[list[int], list[float]]]:
    return [(r.tokens.tolist(), r.inference_logprobs.tolist()) for group in groups for r in group.rollouts]


def folder_of(weights: dict[str, torch.Tensor], folder: Path, model: Path = MODEL) -> Path:
    shutil.copytree(model, folder)
    save_file(
        {name: t.contiguous() for name, t in weights.items()}, folder / "model.safetensors", metadata={"format": "pt"}
    )
    return folder


@pytest.fixture(scope="module")
def fp8():
    """A learner two updates on, and what an engine of rounded weights held and sampled with the checkpoint's weights
    and with the learner's; both in fp32."""
    recipe = tiny_recipe(learner={"dtype": "fp32"}, rollout={"dtype": "fp32", "quantization": "fp8"})
    learner, result = Learner(recipe), {"recipe": recipe}
    for step in range(2):
        learner.update(stored_rollouts(step))
    with engine(MODEL, "fp32", "fp8") as generator:
        result["start"] = stored(generator), sampled(generator.rollout(prompts(), 4, policy_version=0, step=0))
        result["own"] = {name: tensor.clone() for name, tensor in learner.export_weights()}
        generator.refit(learner.export_weights(), learner.num_updates)
        result["update"] = (
            stored(generator),
            sampled(generator.rollout(prompts(), 4, policy_version=learner.num_updates, step=0)),
        )
        keeping = Keeping(generator)
        result["measured"] = measure_pair(recipe, learner, keeping, prompts(), learner.num_updates)
        result["groups"] = keeping.groups
        result["contract"] = confirm_contract(
            contract(recipe, learner.architecture), learner.describe_precision(), generator.describe_precision()
        )
        learner.close()
        alike = tiny_recipe(
            learner={"dtype": "fp32", "quantization": "as_rollout"}, rollout={"dtype": "fp32", "quantization": "fp8"}
        )
        learner = Learner(alike)
        generator.wake()
        generator.refit(learner.export_weights(), 3)
        keeping = Keeping(generator)
        result["alike"] = measure_pair(alike, learner, keeping, prompts(), 3), keeping.groups
    yield result
    shutdown()


@pytest.mark.parametrize("family", slow_but(["qwen2_moe"], ROUNDED))
def test_other_families_are_rounded_alike_at_the_start_and_in_an_update(family, tmp_path):
    """Shared experts are rounded, their gates and routers are not."""
    model = save_family(tmp_path / "model", family)
    weights = dict(HFFolder(model).items())
    moved = {name: tensor.flip(-1) for name, tensor in weights.items()}
    with engine(model, "fp32", "fp8") as generator:
        start = stored(generator)
        generator.refit(iter(moved.items()), 1)
        update = stored(generator)
    start_folder = folder_of(rounded_checkpoint(weights, "fp8", OWN_BLOCK["fp8"]), tmp_path / "start", model)
    with engine(start_folder, "fp32", None) as plain:
        assert stored(plain) == start
        plain.refit(iter(rounded_checkpoint(moved, "fp8", OWN_BLOCK["fp8"]).items()), 1)
        assert stored(plain) == update
        assert update != start


def test_every_stored_weight_is_the_rounded_one(fp8, tmp_path):
    """Checksums of all parameters, and log-probs to the bit, of an engine that rounds nothing and was given what numpy
    rounds; of one that was given the weights as they are, they differ."""
    weights = dict(HFFolder(MODEL).items())
    start = folder_of(rounded_checkpoint(weights, "fp8", OWN_BLOCK["fp8"]), tmp_path / "start")
    with engine(start, "fp32", None) as plain:
        assert stored(plain) == fp8["start"][0]
        assert sampled(plain.rollout(prompts(), 4, policy_version=0, step=0)) == fp8["start"][1]
        plain.refit(iter(rounded_checkpoint(fp8["own"], "fp8", OWN_BLOCK["fp8"]).items()), 1)
        assert stored(plain) == fp8["update"][0]
        assert sampled(plain.rollout(prompts(), 4, policy_version=1, step=0)) == fp8["update"][1]
        assert stored(plain) != fp8["start"][0]
        plain.refit(iter(fp8["own"].items()), 2)
        unrounded = stored(plain)
        assert sampled(plain.rollout(prompts(), 4, policy_version=2, step=0)) != fp8["update"][1]
    differ = {name for name in unrounded if unrounded[name] != fp8["update"][0][name]}
    # What is not packed away for a kernel: experts differ; head, embedding and norms are kept.
    assert differ == {name for name in unrounded if ".routed_experts." in name}


def test_int4_and_a_cache_in_fp8_in_bf16(tmp_path):
    """Where vLLM has no fp8 cache for this processor, the engine says so, and the weights alone are rounded."""
    cache = "fp8" if _has_fp8_cache() else None
    if cache is None:
        with pytest.raises(InputError, match="only with AVX-512 or AMX"), engine(MODEL, "bf16", {"kv_cache": "fp8"}):
            pass
    weights, block = dict(HFFolder(MODEL).items()), OWN_BLOCK["int4"]
    weights = {name: tensor.bfloat16() for name, tensor in weights.items()}
    moved = {
        name: t + (0.1 * t.std() * torch.randn(t.shape, generator=torch.Generator().manual_seed(1))).bfloat16()
        for name, t in weights.items()
    }
    seen = []
    with engine(MODEL, "bf16", {"weights": "int4", "kv_cache": cache}) as generator:
        assert generator.describe_precision()["weights"] == "int4 [1, 128]"
        assert generator.describe_precision()["kv cache"] == (cache or "auto")
        for version in (0, 1):
            if version:
                generator.refit(iter(moved.items()), version)
            seen.append((stored(generator), generator.rollout(prompts(), 4, policy_version=version, step=0)))
    folder = folder_of(rounded_checkpoint(weights, "int4", block), tmp_path / "start")
    with engine(folder, "bf16", {"kv_cache": cache}) as plain:
        for version, given in ((0, None), (1, moved)):
            if given:
                plain.refit(iter(rounded_checkpoint(given, "int4", block).items()), version)
            groups = plain.rollout(prompts(), 4, policy_version=version, step=0)
            assert (stored(plain), sampled(groups)) == (seen[version][0], sampled(seen[version][1]))


def test_log_probs_and_mismatch_are_those_of_rounded_weights(fp8, tmp_path):
    """mu of transformers' model with weights that numpy rounded, po of the same with the learner's, both in float64."""
    own = folder_of(fp8["own"], tmp_path / "own")
    codes = folder_of(rounded_checkpoint(fp8["own"], "fp8", OWN_BLOCK["fp8"]), tmp_path / "codes")
    result, scored, bounds = fp8["measured"], {}, {}
    for name, folder in (("po", own), ("mu", codes)):
        single, double = (
            np.concatenate(
                hf_reference.score(hf_reference.load(folder, dtype), fp8["groups"], Sampling(result.lengths.max()))[0]
            )
            for dtype in (torch.float32, torch.float64)
        )
        scored[name], bounds[name] = double, bound_from_double(single, double, longest_sum=128)
        assert np.abs(getattr(result, name) - double).max() <= bounds[name], name
    expected, bound = scored["po"] - scored["mu"], bounds["po"] + bounds["mu"]
    figures = result.figures()
    # Mean and standard deviation move by no more than the largest element does.
    assert abs(figures["token_log_ratio_std"] - expected.std()) <= bound
    assert abs(figures["rollout_corr/kl"] + expected.mean()) <= bound
    # A reward of rounding alone is within the bound: this mismatch is another thing.
    assert expected.std() > 100 * bound
    assert result.rollout == "fp32+fp8"


def test_a_learner_that_rounds_alike_has_the_engines_policy(fp8, tmp_path):
    """mu and po are both those of transformers' model with weights that numpy rounded, up to fp32."""
    result, groups = fp8["alike"]
    codes = folder_of(rounded_checkpoint(dict(HFFolder(MODEL).items()), "fp8", OWN_BLOCK["fp8"]), tmp_path / "codes")
    single, double = (
        np.concatenate(hf_reference.score(hf_reference.load(codes, dtype), groups, Sampling(result.lengths.max()))[0])
        for dtype in (torch.float32, torch.float64)
    )
    bound = bound_from_double(single, double, longest_sum=128)
    assert np.abs(result.po - double).max() <= bound
    assert np.abs(result.mu - double).max() <= bound


def test_the_engine_says_what_it_rounded(fp8):
    rows = {row.aspect: row for row in fp8["contract"]}
    assert (rows["weights"].learner, rows["weights"].rollout, rows["weights"].verdict) == (
        "fp32",
        "fp8 [128, 128]",
        "rounding",
    )
    assert "kv cache" not in rows
    assert rows["router"].rollout == "fp32"
