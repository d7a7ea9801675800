"""Rank programs of exact mode: generate with the learner's forward pass, compare with the update's."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from megatron_rl.batch import build_batch
from megatron_rl.data import load_tokenizer
from megatron_rl.errors import RunEnded
from megatron_rl.learner.learner import Learner
from megatron_rl.rollout import Generator
from megatron_rl.run.engines import start_generator
from megatron_rl.types import Group, Prompt
from tests.support.tiny import tiny_recipe


def start(dtype: str, parallel: dict[str, int] | None = None, **sections: Any) -> tuple[Learner, Generator]:
    recipe = tiny_recipe(
        rollout={"engine": "exact", "dtype": dtype, "max_num_seqs": sections.pop("max_num_seqs", 256)},
        learner={"dtype": dtype, "parallel": parallel or {}},
        **sections,
    )
    learner = Learner(recipe)
    return learner, generator_of(learner)


def generator_of(learner: Learner) -> Generator:
    return start_generator(learner.recipe, load_tokenizer(str(learner.recipe.model.path)), learner)


def prompts(number: int) -> list[Prompt]:
    """Random prompts of 2 to 13 tokens, each the same whatever ``number`` is."""
    found = []
    for i in range(number):
        random = np.random.default_rng(i)
        found.append(
            Prompt(id=f"p:{i}", tokens=random.integers(3, 98, int(random.integers(2, 14))).tolist(), answer="")
        )
    return found


def sample(generator: Generator, number: int, num_samples: int = 1, step: int = 0) -> list[Group]:
    groups = generator.rollout(prompts(number), num_samples, policy_version=0, step=step)
    for group in groups:
        for rollout in group.rollouts:
            rollout.reward = float(rollout.tokens[0] % 2)
    return groups


def batch_of(learner: Learner, groups: list[Group]):
    return build_batch(0, groups, learner.recipe)


def bits_over_batches(dtype: str, parallel: dict[str, int], sizes: list[int]) -> dict[str, Any]:
    """Differing tokens between generation and passes over other packings, for batches of ``sizes`` prompts."""
    learner, generator = start(dtype, parallel)
    differing, lengths, alone = {}, [], {}
    for number in sizes:
        groups = sample(generator, number)
        batch = batch_of(learner, groups)
        lengths += [len(s.tokens) for s in batch.sequences]
        for group in groups:  # the same request, in every batch that has it
            seen = (group.rollouts[0].tokens.tolist(), group.rollouts[0].inference_logprobs.tolist())
            differing[f"{number} in another batch"] = differing.get(f"{number} in another batch", 0) + (
                alone.setdefault(group.prompt.id, seen) != seen
            )
        for limit in (1, 70, 4096)[number > 16 :]:
            learner.config.max_tokens_per_microbatch = limit
            found = learner.compute_logprobs(batch)
            pairs = zip(batch.sequences, found, strict=True)
            differing[f"{number} prompts, {limit} tokens"] = sum(int((s.exact_logprobs != f).sum()) for s, f in pairs)
    return {"differing": differing, "lengths": lengths}


def cache_and_waves(dtype: str) -> dict[str, Any]:
    """The same responses with and without a cache, at once and a few at a time."""
    learner, generator = start(dtype)
    results = [sample(generator, 12, 2)]
    learner.recipe.exact.kv_cache = False
    results.append(sample(generator_of(learner), 12, 2))
    learner.recipe.exact.kv_cache = True
    learner.recipe.rollout.max_num_seqs = 5
    results.append(sample(generator_of(learner), 12, 2))
    rollouts = [[r for group in groups for r in group.rollouts] for groups in results]
    return {
        "tokens": [[r.tokens.tolist() for r in some] for some in rollouts],
        "logprobs": [[r.inference_logprobs.tolist() for r in some] for some in rollouts],
    }


def update_with_gate(dtype: str, parallel: dict[str, int], minibatches: int) -> list[float]:
    """`exact/max_abs_prob_diff` and the spread of rho in two updates on fresh rollouts."""
    learner, generator = start(dtype, parallel, batch={"minibatches": minibatches})
    found = []
    for step in range(2):
        groups = generator.rollout(prompts(12), 4, policy_version=learner.num_updates, step=step)
        for group in groups:
            for rollout in group.rollouts:
                rollout.reward = float(rollout.tokens[0] % 2)
        metrics = learner.update(batch_of(learner, groups))
        generator.refit(iter(()), learner.num_updates)
        found += [metrics["exact/max_abs_prob_diff"], metrics["mismatch/rho_std"], metrics["mismatch/rho_max"] - 1]
    return found


def broken_layer(parallel: dict[str, int], layer: int, wave: int = 0) -> str:
    """What the gate says of a layer whose output depends on how many rows it is given.

    Without ``wave`` it breaks after generation, for more than 64 rows; with it before, for the steps of a wave.
    """
    learner, generator = start("fp32", parallel, max_num_seqs=wave or 256)

    def depends_on_the_batch(_module, _args, output):
        hidden = output[0] if isinstance(output, tuple) else output
        changed = hidden + 1e-3 * (hidden.size(0) <= wave if wave else hidden.size(0) > 64)
        return (changed, *output[1:]) if isinstance(output, tuple) else changed

    def break_it():
        return learner.module.decoder.layers[layer].register_forward_hook(depends_on_the_batch)

    handle = break_it() if wave else None
    groups = sample(generator, 8, 2)
    handle = handle or break_it()
    before = [p.detach().clone() for p in learner.module.parameters()]
    try:
        learner.update(batch_of(learner, groups))
    except RunEnded as error:
        moved = any(not torch.equal(a, b) for a, b in zip(before, learner.module.parameters(), strict=True))
        return f"{error}{' THE WEIGHTS MOVED' * moved}"
    finally:
        handle.remove()
    return "no difference was found"


def changed_weights() -> str:
    """What the gate says when the weights moved between generation and update."""
    learner, generator = start("bf16")
    groups = sample(generator, 4, 2)
    with torch.no_grad():
        learner.module.decoder.final_layernorm.weight.mul_(1.01)
    try:
        learner.update(batch_of(learner, groups))
    except RunEnded as error:
        return str(error)
    return "no difference was found"


def doses(kinds: dict[str, dict[str, Any]], parallel: dict[str, int] | None = None) -> dict[str, dict[str, Any]]:
    """Per dose its size, and the gate, which looks at what is computed without it."""
    found = {}
    for name, noise in kinds.items():
        learner, generator = start("fp32", parallel, exact={"noise": noise}, objective={"mismatch_detail": True})
        own = [p.detach().clone() for p in learner.module.parameters()]
        generator.refit(iter(()), 0)
        if noise["kind"] == "stale":
            learner.update(batch_of(learner, sample(generator, 4, 4)))
            learner.num_updates = 0  # for the age of what the next update learns from
            generator.refit(iter(()), 1)
            generator.refit(iter(()), 2)
        weights = [p.detach().clone() for p in learner.module.parameters()]
        found[name] = _dose(learner, generator, own)
        found[name]["same weights"] = all(map(torch.equal, weights, found[name].pop("weights")))
    return found


def _dose(learner: Learner, generator: Generator, own: list[torch.Tensor]) -> dict[str, Any]:
    version = generator._policy_version
    groups = generator.rollout(prompts(8), 4, policy_version=version, step=0)
    stats = generator.stats()
    learner.recipe.exact.kv_cache = False
    learner.recipe.rollout.max_num_seqs = 7
    other = generator_of(learner)
    other._dose = generator._dose
    other._policy_version = version
    twice = other.rollout(prompts(8), 4, policy_version=version, step=0)
    for group in groups:
        for rollout in group.rollouts:
            rollout.reward = float(rollout.tokens[0] % 2)
    rollouts = [r for group in groups for r in group.rollouts]
    batch = batch_of(learner, groups)
    weights = [p.detach().clone() for p in learner.module.parameters()]
    under_dose = None
    if generator._dose.config.kind in ("weights", "stale"):  # mu is what passes with the sampler's weights compute
        with generator._dose.on(learner.module):
            under_dose = learner.compute_logprobs(batch)
        if generator._dose.config.kind == "stale":
            with torch.no_grad():
                for parameter, value in zip(learner.module.parameters(), own, strict=True):
                    parameter.copy_(value)
                under_dose = learner.compute_logprobs(batch)
                for parameter, value in zip(learner.module.parameters(), weights, strict=True):
                    parameter.copy_(value)
    metrics = learner.update(batch)
    differences = np.concatenate([r.exact_logprobs.astype(np.float64) - r.inference_logprobs for r in rollouts])
    return {
        "std": float(differences.std(ddof=1)),
        "stats": [stats["exact/log_rho_std"], stats["exact/abs_log_rho_sum"]],
        "metrics": [metrics["mismatch/log_rho_std"], metrics["mismatch/abs_log_rho_sum"]],
        "gate": metrics["exact/max_abs_prob_diff"],
        "rho_std": metrics["mismatch/rho_std"],
        "weights": weights,
        "bits of mu": under_dose and all(map(np.array_equal, under_dose, [r.inference_logprobs for r in rollouts])),
        "same in other batches": [(r.tokens.tolist(), r.inference_logprobs.tolist()) for r in rollouts]
        == [(r.tokens.tolist(), r.inference_logprobs.tolist()) for group in twice for r in group.rollouts],
    }
