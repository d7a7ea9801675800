"""Rank programs of exact mode: generate with the learner's forward pass, compare with the update's."""

from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import (
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)

from megatron_rl.batch import build_batch
from megatron_rl.config.learner import ParallelConfig
from megatron_rl.data import load_tokenizer
from megatron_rl.errors import RunEnded
from megatron_rl.exact.decode import GIB, CacheShape
from megatron_rl.exact.generator import ExactGenerator
from megatron_rl.exact.invariant import BatchInvariant
from megatron_rl.exact.step import StepForward
from megatron_rl.learner.learner import Learner
from megatron_rl.learner.process_groups import initialize
from megatron_rl.process.ranks import gather_objects
from megatron_rl.rollout import Generator, Sampling
from megatron_rl.rollout.requests import everywhere
from megatron_rl.run.engines import make_learner, start_generator
from megatron_rl.types import Group, Prompt
from tests.support.tiny import tiny_recipe


def start(
    dtype: str, parallel: dict[str, int] | None = None, options: dict[str, Any] | None = None, **sections: Any
) -> tuple[Learner, Generator]:
    """``options``: of `Learner`."""
    recipe = tiny_recipe(
        rollout={
            "engine": "exact",
            "dtype": dtype,
            "max_num_seqs": sections.pop("max_num_seqs", 256),
            **sections.pop("rollout", {}),
        },
        learner={"dtype": dtype, "parallel": parallel or {}, **sections.pop("learner", {})},
        **sections,
    )
    learner = make_learner(recipe) if options is None else Learner(recipe, **options)
    return learner, generator_of(learner)


def generator_of(learner: Learner) -> Generator:
    return start_generator(learner.recipe, load_tokenizer(str(learner.recipe.model.path)), learner)


def prompts(number: int) -> list[Prompt]:
    """Random prompts of 2 to 13 tokens, each the same whatever ``number`` is."""
    results = []
    for i in range(number):
        random = np.random.default_rng(i)
        results.append(
            Prompt(id=f"p:{i}", tokens=random.integers(3, 98, int(random.integers(2, 14))).tolist(), answer="")
        )
    return results


def sample(generator: Generator, number: int, num_samples: int = 1, step: int = 0) -> list[Group]:
    return rewarded(generator.rollout(prompts(number), num_samples, policy_version=0, step=step))


def rewarded(groups: list[Group]) -> list[Group]:
    """With rewards that every rank knows, whoever holds the response."""
    for group in groups:
        for rollout in group.rollouts:
            rollout.reward = float(rollout.length % 2)
    return groups


def batch_of(learner: Learner, groups: list[Group]):
    return build_batch(0, groups, learner.recipe.batch, learner.recipe.objective)


def bits_over_batches(dtype: str, parallel: dict[str, int], sizes: list[int], **sections: Any) -> dict[str, Any]:
    """Differing tokens between generation and passes over other packings, for batches of ``sizes`` prompts."""
    learner, generator = start(dtype, parallel, **sections)
    differing, lengths, alone = {}, [], {}
    for number in sizes:
        groups = everywhere(sample(generator, number))
        batch = batch_of(learner, groups)
        lengths += [s.whole_length for s in batch.sequences]
        for group in groups:  # the same request, in every batch that has it
            seen = (group.rollouts[0].tokens.tolist(), group.rollouts[0].inference_logprobs.tolist())
            differing[f"{number} in another batch"] = differing.get(f"{number} in another batch", 0) + (
                alone.setdefault(group.prompt.id, seen) != seen
            )
        for limit in (1, 70, 4096)[number > 16 :]:
            learner.config.max_tokens_per_microbatch = limit
            logprobs = learner.compute_logprobs(batch)
            pairs = zip(batch.sequences, logprobs, strict=True)
            differing[f"{number} prompts, {limit} tokens"] = sum(int((s.exact_logprobs != f).sum()) for s, f in pairs)
    return {"differing": differing, "lengths": lengths}


def schedules(
    dtype: str,
    parallel: dict[str, int] | None = None,
    names: Sequence[str] = (),
    number: int = 6,
    longest: int = 100,
    **sections: Any,
) -> dict[str, Any]:
    """The same responses from every schedule: a few rows at a time, several steps between two
    looks, a cache so small that sequences give way to each other, the module itself in the place of `StepForward`, and
    steps that are captured and repeated. ``names``: of the schedules; none: all. ``number``: of prompts, of which each
    has two samples of up to ``longest`` tokens.
    """
    learner, _ = start(dtype, parallel, **sections)

    def long_ones(generator: ExactGenerator) -> list[Group]:
        generator._stop = frozenset({STOP})
        sampling = Sampling(longest)
        return everywhere(generator.rollout(prompts(number), 2, policy_version=0, step=0, sampling=sampling))

    plain = generator_of(learner)
    groups_of, counts = {"plain": long_ones(plain)}, {"plain": plain.stats()}
    for name in names or SCHEDULES:
        changes, generator = SCHEDULES[name], generator_of(learner)
        decoder = generator.policy
        for key, value in changes.items():
            setattr(decoder.passes if key == "step_forward" else decoder, key, value)
        if name == "small cache":  # twelve sequences of up to four pages
            decoder.cache_gib = 8 * CacheShape.of(learner.module).page_bytes / GIB
        groups_of[name], counts[name] = long_ones(generator), generator.stats()
    rollouts = {name: [r for group in groups for r in group.rollouts] for name, groups in groups_of.items()}
    for one in counts.values():
        one.pop("perf/tokens_per_s/rollout")  # a time, which ranks do not share
    return {
        "counts": counts,
        "lengths": [r.length for r in rollouts["plain"]],
        "found": {
            name: [(r.tokens.tolist(), r.inference_logprobs.tolist(), r.exact_logprobs.tolist()) for r in some]
            for name, some in rollouts.items()
        },
    }


def run_again(body: Callable[[], None], _memory: list) -> Callable[[], None]:
    """In the place of `exact.turns.captured_on_cuda`: repeating is running, on the buffers of the graph."""
    return body


STOP = 6  # not the tokenizer's: some responses end by it, others are cut
SCHEDULES = {
    "five rows": {"max_sequences": 5},
    "seven steps": {"steps": 7},
    "small cache": {"steps": 3},
    "module": {"step_forward": None},
    "graphs": {"capture": run_again, "steps": 5},
    "one prompt a pass": {"max_tokens": 1},
}


def update_with_gate(dtype: str, parallel: dict[str, int], minibatches: int, **sections: Any) -> list[float]:
    """`exact/max_abs_prob_diff` and the spread of rho in two updates on fresh rollouts."""
    learner, generator = start(dtype, parallel, batch={"minibatches": minibatches}, **sections)
    results = []
    for step in range(2):
        groups = generator.rollout(prompts(12), 4, policy_version=learner.num_updates, step=step)
        metrics = learner.update(batch_of(learner, rewarded(groups)))
        generator.refit(iter(()), learner.num_updates)
        results += [metrics["exact/max_abs_prob_diff"], metrics["mismatch/rho_std"], metrics["mismatch/rho_max"] - 1]
    return results


def gate_over_sizes(dtype: str, sizes: list[int]) -> list[float]:
    """`exact/max_abs_prob_diff` of updates in a row, on so many fresh responses each."""
    learner, generator = start(dtype)
    results = []
    for step, number in enumerate(sizes):
        groups = generator.rollout(prompts(number), 1, policy_version=learner.num_updates, step=step)
        results.append(learner.update(batch_of(learner, rewarded(groups)))["exact/max_abs_prob_diff"])
        generator.refit(iter(()), learner.num_updates)
    return results


def who_holds_what(parallel: dict[str, int]) -> dict[str, Any]:
    """Of every response the owner, the ranks that hold it after generation, those of the replica that learns from it,
    and the ranks that hold it in the update."""
    learner, generator = start("fp32", parallel, batch={"minibatches": 1})
    groups = sample(generator, 6, 2)
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    sampled = gather_objects([r.tokens is not None and r.exact_logprobs is not None for r in rollouts])
    batch = batch_of(learner, groups)
    learner.update(batch)
    learned = gather_objects([s.tokens is not None and s.exact_logprobs is not None for s in batch.sequences])
    home = learner.passes.homes(batch, batch.minibatches)
    homes = gather_objects([i == learner.replicas.own for i in home])
    return {
        "owners": [r.owner for r in rollouts],
        "sampled": _ranks_of(sampled),
        "learned": _ranks_of(learned),
        "homes": _ranks_of(homes),
    }


def _ranks_of(flags: list[list[bool]]) -> list[list[int]]:
    """[ranks][items] → of each item the ranks that say yes."""
    return [[rank for rank, flag in enumerate(column) if flag] for column in zip(*flags, strict=True)]


def broken_layer(parallel: dict[str, int], layer: int, **sections: Any) -> str:
    """What the gate says of a layer whose output depends on how many rows it is given, once responses are there."""
    learner, generator = start("fp32", parallel, **sections)

    def depends_on_the_batch(_module, _args, output):
        hidden = output[0] if isinstance(output, tuple) else output
        changed = hidden + 1e-3 * (hidden.size(0) > 64)
        return (changed, *output[1:]) if isinstance(output, tuple) else changed

    groups = sample(generator, 8, 2)
    here = [part for part in learner.module.decoder.layers if part.layer_number == layer + 1]
    handles = [part.register_forward_hook(depends_on_the_batch) for part in here]
    before = [p.detach().clone() for p in learner.module.parameters()]
    try:
        learner.update(batch_of(learner, groups))
    except RunEnded as error:
        moved = any(not torch.equal(a, b) for a, b in zip(before, learner.module.parameters(), strict=True))
        return f"{error}{' THE WEIGHTS MOVED' * moved}"
    finally:
        for handle in handles:
            handle.remove()
    return "no difference was found"


def broken_step(layer: int) -> str:
    """What the gate says where steps compute a layer otherwise than passes over whole rows do."""
    learner, generator = start("fp32", max_num_seqs=5)
    feed_forward = StepForward._feed_forward

    def wrong(self, part, x):
        return feed_forward(self, part, x) + 1e-3 * (part is learner.module.decoder.layers[layer])

    with patch.object(StepForward, "_feed_forward", wrong):
        groups = sample(generator, 8, 2)
        try:
            learner.update(batch_of(learner, groups))
        except RunEnded as error:
            return str(error)
    return "no difference was found"


def sums_in_order(world_size: int) -> dict[str, bool]:
    """Sums over ranks as Megatron asks for them, against sums from the first rank on in fp32, rounded once."""
    initialize(ParallelConfig(tensor=world_size, expert_tensor=world_size), "cpu", 0, None)
    results: dict[str, bool] = {}
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        terms = torch.randn(world_size, 6 * world_size, 5, generator=torch.Generator().manual_seed(0)).to(dtype)
        total = terms[0].float()
        for term in terms[1:]:
            total = total + term.float()
        expected, rank = total.to(dtype), parallel_state.get_tensor_model_parallel_rank()
        mine, uneven = terms[rank].clone(), [3, 9, *[6] * (world_size - 2)]
        with BatchInvariant():
            results[f"all {dtype}"] = torch.equal(reduce_from_tensor_model_parallel_region(mine.clone()), expected)
            part = reduce_scatter_to_sequence_parallel_region(mine)
            results[f"part {dtype}"] = torch.equal(part, expected.chunk(world_size)[rank])
            part = reduce_scatter_to_sequence_parallel_region(mine, input_split_sizes=uneven)
            results[f"uneven part {dtype}"] = torch.equal(part, expected.split(uneven)[rank])
            replicas = torch.ones(1)
            torch.distributed.all_reduce(replicas, group=parallel_state.get_data_parallel_group())
            results["other groups"] = replicas.item() == 1
    return results


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
    results = {}
    objective = {"mismatch_detail": True, "policy_term": "reinforce", "score_centering": True}
    for name, noise in kinds.items():
        sections = {"exact": {"noise": noise}, "objective": objective, "rollout": {"sampled_head": 5}}
        learner, generator = start("fp32", parallel, **sections)
        own = [p.detach().clone() for p in learner.module.parameters()]
        generator.refit(iter(()), 0)
        if noise["kind"] == "stale":
            learner.update(batch_of(learner, sample(generator, 4, 4, step=1)))  # another step than the measured one
            learner.num_updates = 0  # for the age of what the next update learns from
            generator.refit(iter(()), 1)
            generator.refit(iter(()), 2)
        weights = [p.detach().clone() for p in learner.module.parameters()]
        results[name] = _dose(learner, generator, own)
        results[name]["same weights"] = all(map(torch.equal, weights, results[name].pop("weights")))
    return results


def _dose(learner: Learner, generator: Generator, own: list[torch.Tensor]) -> dict[str, Any]:
    version = generator._policy_version
    groups = everywhere(generator.rollout(prompts(4), 4, policy_version=version, step=0))
    stats = generator.stats()
    learner.recipe.rollout.max_num_seqs = 7
    other = generator_of(learner)
    other._dose = generator._dose
    other._policy_version = version
    twice = everywhere(other.rollout(prompts(4), 4, policy_version=version, step=0))
    rewarded(groups)
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
    in_head = [r.head_tokens == r.tokens[:, None] for r in rollouts]

    def drawn(groups: list[Group]) -> list[list]:
        names = ("tokens", "inference_logprobs", "head_tokens", "head_logprobs")
        return [[getattr(r, name).tolist() for name in names] for group in groups for r in group.rollouts]

    return {
        "std": float(differences.std(ddof=1)),
        "stats": [stats["exact/log_rho_std"], stats["exact/abs_log_rho_sum"]],
        "metrics": [metrics["mismatch/log_rho_std"], metrics["mismatch/abs_log_rho_sum"]],
        "gate": metrics["exact/max_abs_prob_diff"],
        "rho_std": metrics["mismatch/rho_std"],
        "weights": weights,
        "bits of mu": under_dose and all(map(np.array_equal, under_dose, [r.inference_logprobs for r in rollouts])),
        "same in other batches": drawn(groups) == drawn(twice),
        "bits of heads": all(
            np.array_equal(r.head_logprobs[here], r.inference_logprobs[here.any(1)])
            for r, here in zip(rollouts, in_head, strict=True)
        ),
        "coefficients": metrics["score_centering/abs_coeff_sum"],
    }
