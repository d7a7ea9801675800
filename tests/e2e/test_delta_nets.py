"""vLLM's engine on models with gated delta nets, against transformers' own torch form: before and after an update, in
every type, from a checkpoint of text alone and from one that also reads pictures."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_rl.checkpoint.hf_folder import HFFolder, model_weights, write_hf_checkpoint
from megatron_rl.config import load_recipe
from megatron_rl.config.rollout import RolloutConfig
from megatron_rl.model.architecture import read_architecture, shape_of
from megatron_rl.rollout import Sampling
from megatron_rl.rollout.vllm_engine import VllmGenerator
from megatron_rl.types import Group, Prompt
from tests.e2e.hf_reference import flat, load, rounding_bound, score
from tests.e2e.in_flight import (
    TOKEN,
    assert_sampled_as_said,
    cut,
    generator_on,
    prompts,
    runs_of,
    served_recipe,
    two_models,
    update,
)
from tests.e2e.in_flight import flat as flat_pairs
from tests.parallel.gloo import run_ranks
from tests.support.families import DELTA_NETS, save_family, save_wrapper
from tests.support.forked_servers import ForkedServers
from tests.support.slow import slow_but
from tests.support.tiny import REPOSITORY
from tests.support.twins import STEPS, twin

pytestmark = pytest.mark.usefixtures("cheap_engines")
LENGTHS = (1, 3, 70, 130)  # around a chunk of 64, and around the convolution's width


@contextmanager
def engine(model: Path, dtype: str = "fp32", **keys: Any):
    keys = {"max_response_length": 12, "kv_cache_gib": 0.25, "max_num_seqs": 8} | keys
    config = RolloutConfig(dtype=dtype, **keys)
    generator = VllmGenerator(config, model, max_prompt_length=max(LENGTHS), record_routes=True)
    try:
        yield generator
    finally:
        generator.close()


def asked(vocabulary: int) -> list[Prompt]:
    draw = np.random.default_rng(0)
    return [Prompt(id=str(n), tokens=draw.integers(3, vocabulary, n).tolist(), answer="") for n in LENGTHS]


def error(groups: list[Group], model: Path, logprobs: list[np.ndarray] | None = None) -> float:
    """Largest distance of the engine's log-probs, or of ``logprobs``, from transformers' in float64, where 1 is what
    another order of sums in fp32 may give."""
    theirs, _ = score(load(model, torch.float64), groups, Sampling(12))
    own = flat(groups, "inference_logprobs") if logprobs is None else logprobs
    furthest = max(float(np.abs(a - b).max()) for a, b in zip(own, theirs, strict=True))
    return furthest / rounding_bound(groups, Sampling(12), model)


@pytest.mark.parametrize("family", slow_but(DELTA_NETS[:1], DELTA_NETS))
def test_log_probs_are_transformers_before_and_after_an_update(family, tmp_path):
    first, second = (save_family(tmp_path / str(seed), family, seed) for seed in range(2))
    a = read_architecture(first)
    with engine(first) as generator:  # whose start has compared every tensor after an update with its own weights
        prompts = asked(a.vocab_size)
        before = generator.rollout(prompts, 2, policy_version=0, step=0)
        assert error(before, first) <= 1
        generator.refit(model_weights(HFFolder(second), a), 1)
        after = generator.rollout(prompts, 2, policy_version=1, step=1)
        assert error(after, second) <= 1
        assert error(after, first) > 100
    for rollout in (rollout for group in before + after for rollout in group.rollouts):  # all layers have experts
        assert rollout.routed_experts.shape[1:] == (a.num_layers, a.experts_per_token)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_a_checkpoint_that_also_reads_pictures_is_a_twin_of_its_text(dtype, tmp_path):
    """In bf16 vLLM's own kernel runs. The start of each engine compares all tensors after an update."""
    whole, text, outputs = save_wrapper(tmp_path / "whole"), tmp_path / "text", []
    write_hf_checkpoint(text, model_weights(HFFolder(whole), read_architecture(whole)), whole)
    for model in (text, whole):
        with engine(model, dtype) as generator:
            prompts = asked(read_architecture(model).vocab_size)
            first = generator.rollout(prompts, 2, policy_version=0, step=0)
            again = generator.rollout(prompts[:1], 2, policy_version=0, step=0)
        assert flat(again, "tokens") == flat(first, "tokens")[:2], "a prompt of one token begins with an empty state"
        outputs.append(first)
    for field in ("tokens", "inference_logprobs"):
        assert [list(x) for x in flat(outputs[0], field)] == [list(x) for x in flat(outputs[1], field)]


@pytest.mark.slow
@pytest.mark.parametrize("family", DELTA_NETS)
def test_a_sequence_that_loses_its_place_is_read_again(family, tmp_path, monkeypatch):
    """The cache is too small for all, whose prompts begin alike. As a teacher the engine scores what it sampled."""
    model, lost = save_family(tmp_path / "model", family, initializer_range=0.06), []
    with engine(model, max_response_length=120, kv_cache_gib=0.003, max_num_seqs=16, stop_token_ids=[]) as generator:
        scheduler = generator._llm.llm_engine.engine_core.engine_core.scheduler
        preempt = scheduler._preempt_request
        monkeypatch.setattr(scheduler, "_preempt_request", lambda *of, **how: (lost.append(of), preempt(*of, **how)))
        longest = asked(read_architecture(model).vocab_size)[-1].tokens
        alike = [Prompt(str(n), longest[:n], "") for n in (1, 2, 3, 63, 64, 65, 100, 101, 129)]
        groups = generator.rollout(alike, 3, policy_version=0, step=0)
        scores = generator.score([rollout for group in groups for rollout in group.rollouts])
    scored = [score.logprobs for score in scores]
    assert lost
    assert error(groups, model) <= 1
    assert error(groups, model, scored) <= 1


@pytest.mark.slow
@pytest.mark.parametrize("family", DELTA_NETS)
def test_in_bf16_an_updated_engine_is_a_fresh_one(family, tmp_path):
    """Whose weights differ in every tensor: vLLM packs those of experts, layers and convolutions for its kernels."""
    first, second = two_models(tmp_path, save_family(tmp_path / "first", family))
    groups = []
    for model in (first, second):
        with engine(model, "bf16", verify_refit=False) as generator:
            a = read_architecture(model)
            if model == first:
                generator.refit(model_weights(HFFolder(second), a), 0)
            groups.append(generator.rollout(asked(a.vocab_size), 2, policy_version=0, step=0))
    for field in ("tokens", "inference_logprobs", "routed_experts"):
        for updated, fresh in zip(*(flat(rollouts, field) for rollouts in groups), strict=True):
            assert np.array_equal(updated, fresh)


MODES = [(weights, mode) for weights in ("files", "broadcast") for mode in ("abort_and_resume", "keep")]


@pytest.mark.slow
@pytest.mark.parametrize("family", DELTA_NETS)
def test_servers_sample_each_token_with_the_policy_that_they_say(family, tmp_path):
    """While weights change. With `keep` a state that older weights made goes on, as keys and values do."""
    models = two_models(tmp_path, save_family(tmp_path / "first", family, initializer_range=0.06))
    run_dir = tmp_path / "served"
    recipe, file = served_recipe(run_dir, 96, models[0], verify_refit=True)
    servers, version = ForkedServers(1, file, run_dir, TOKEN), 0
    try:
        for seed, (weights, mode) in enumerate(MODES):
            generator = generator_on(run_dir, recipe, mode, count=1, weights=weights)
            try:
                generator.version = version
                update(generator, models)
                ticket = generator.begin(prompts(4, seed), 2, policy_version=generator.version, step=0)
                cut(generator, models, ticket)
                groups = generator.finish(ticket)
                assert max(len(runs_of(rollout)) for _, rollout in flat_pairs(groups)) > 1
                assert_sampled_as_said(generator, models, groups)
                version = generator.version
            finally:
                generator.close()
    finally:
        servers.close()


RECIPES = sorted((REPOSITORY / "recipes" / "families").glob("*qwen3*.yaml"))


@pytest.mark.parametrize("path", slow_but(RECIPES[:1], RECIPES), ids=lambda path: path.stem)
def test_a_tiny_twin_of_each_recipe_trains_two_steps(path, tmp_path):
    recipe = load_recipe(path)
    model = save_family(tmp_path / "model", shape_of(recipe.model.path)[0].model_type)
    values = twin(recipe, tmp_path, model).model_dump(mode="json")
    values["model"]["path"], values["rollout"]["kv_cache_gib"] = str(model), 0.25
    (result,) = run_ranks("tests.e2e.programs.twin", "run_twins", world_size=1, recipes=[values])
    rows = result["rows"][values["name"]]
    assert len(rows) == STEPS
    for row in rows:
        assert row["router/replay_coverage"] == 1.0
        assert row["training/rollout_probs_diff_mean"] < 0.1, "that of bf16; another function gives more"
