"""What the ranks of test_sequences.py run: sequences on their way between ranks, without engines and models."""

from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist

from megatron_rl.batch import build_batch
from megatron_rl.config import ObjectiveConfig
from megatron_rl.config.data import RewardConfig
from megatron_rl.learner.packing import minibatch_denominators
from megatron_rl.learner.passes import Replicas, distribute, hand_over_logprobs, hand_over_routes, tokens_at
from megatron_rl.monitor.samples import rollout_metrics, share_repetition, share_samples
from megatron_rl.process import ranks
from megatron_rl.rewards import Rewarder
from megatron_rl.rewards.rewarder import score_shared
from megatron_rl.routing import route_checksums
from megatron_rl.run.recorded_batches import record_batch
from megatron_rl.types import Batch, Group, Prompt, Rollout
from tests.support.groups import whole_sequence
from tests.support.tiny import tiny_recipe

LAYERS, TOPK = 3, 2
ARRAYS = (
    "tokens",
    "inference_logprobs",
    "exact_logprobs",
    "sampled",
    "policy_versions",
    "routed_experts",
    "route_checksums",
    "kept_tokens",
    "head_tokens",
    "head_logprobs",
    "teacher_tokens",
    "teacher_set_logprobs",
)


def whole(
    num_sequences: int, seed: int, routes: bool, mean: int = 40, exact: bool = False, turns: bool = False
) -> Batch:
    """Sequences of unequal length, all of them here. ``turns``: with loss masks of a part of each."""
    random = np.random.default_rng(seed)
    sequences = []
    for i in range(num_sequences):
        prompt, response = int(random.integers(1, 9)), 1 + int(random.exponential(mean))
        s = whole_sequence(
            id=f"p:{i}/0",
            tokens=random.integers(0, 2**31, prompt + response),
            prompt_length=prompt,
            inference_logprobs=-random.random(response).astype(np.float32),
            loss_mask=np.arange(response) % 3 != 1 if turns else np.full(response, i % 5 != 2),
            advantage=float(random.normal()),
            reward=float(i % 2),
            policy_versions=np.full(response, i, dtype=np.int32),
        )
        if routes:
            s.routed_experts = random.integers(0, 8, (s.whole_length - 1, LAYERS, TOPK), dtype=np.uint8)
            s.route_checksums = route_checksums(s.id, s.whole, s.routed_experts)
        if exact:
            s.exact_logprobs = s.inference_logprobs - np.float32(i)
            s.kept_tokens = random.integers(-1, 99, (response, 5), dtype=np.int32)  # the other optional arrays
            s.head_tokens = random.integers(0, 99, (response, 3), dtype=np.int32)
            s.head_logprobs = -random.random((response, 3), np.float32)
            s.teacher_tokens = random.integers(-1, 99, (response, 4), dtype=np.int32)
            s.teacher_set_logprobs = -random.random((response, 4), np.float32)
        sequences.append(s)
    return Batch(0, sequences, [list(range(num_sequences))])


def held_by(batch: Batch, owners: list[int]) -> Batch:
    """``batch`` as the rank knows it that holds what ``owners`` says."""
    absent = dict.fromkeys(ARRAYS)
    return replace(
        batch,
        sequences=[
            replace(s, owner=owner) if owner == dist.get_rank() else replace(s, **absent, owner=owner)
            for s, owner in zip(batch.sequences, owners, strict=True)
        ],
    )


def replicas(num_replicas: int) -> Replicas:
    """``num_replicas`` of as many ranks as there are for each, the last of them speaking."""
    size = dist.get_world_size() // num_replicas
    groups = [dist.new_group(list(range(first * size, (first + 1) * size))) for first in range(num_replicas)]
    own = dist.get_rank() // size
    return Replicas(own, tuple(first * size + size - 1 for first in range(num_replicas)), groups[own])


def same(got: Rollout, expected: Rollout) -> bool:
    for name in {*ARRAYS, "loss_mask"} - {"sampled"}:
        left, right = getattr(got, name), getattr(expected, name)
        if (left is None) != (right is None):
            return False
        if left is not None and (left.dtype != right.dtype or not np.array_equal(left, right)):
            return False
    return True


def exchange(
    num_replicas: int, num_sequences: int, owners: str, routes: bool, exact: bool, turns: bool
) -> dict[str, Any]:
    """Every sequence to one or two replicas: is all that is wanted there right, and nothing else there?"""
    world, here = dist.get_world_size(), replicas(num_replicas)
    expected = whole(num_sequences, seed=num_sequences, routes=routes, exact=exact, turns=turns)
    random = np.random.default_rng(1)
    owner = {
        "in turn": [i % world for i in range(num_sequences)],
        "all on one": [world - 1] * num_sequences,
        "any": random.integers(0, world, num_sequences).tolist(),
    }[owners]
    source, target = (random.integers(0, num_replicas, num_sequences).tolist() for _ in range(2))
    batch = held_by(expected, owner)
    distribute(batch, [list({*pair}) for pair in zip(source, target, strict=True)], here)
    wrong = []
    for i, (received, want) in enumerate(zip(batch.sequences, expected.sequences, strict=True)):
        wanted = here.own in (source[i], target[i])
        absent = all(getattr(received, name) is None for name in ARRAYS)
        if not (same(received, want) if wanted else absent):
            wrong.append(i)
        if (received.length, received.num_trained, received.whole_length) != (
            want.length,
            want.num_trained,
            want.whole_length,
        ):
            wrong.append(i)
    for sequence, home in zip(batch.sequences, target, strict=True):
        sequence.holder = here.speakers[home]
    other = random.integers(0, num_replicas, num_sequences).tolist()
    fetched = tokens_at(batch, other, here)
    if fetched.keys() != {i for i in range(num_sequences) if other[i] == here.own}:
        wrong.append("fetched")
    wrong += [i for i, tokens in fetched.items() if not np.array_equal(tokens, expected.sequences[i].tokens)]
    mine = {i: want.inference_logprobs * 2 for i, want in enumerate(expected.sequences) if source[i] == here.own}
    moved = hand_over_logprobs(batch, mine, source, target, here)
    for i, want in enumerate(expected.sequences):
        due = want.inference_logprobs * 2 if target[i] == here.own else None
        if (i in moved) != (due is not None) or (i in moved and not np.array_equal(moved[i], due)):
            wrong.append(i)
    if routes:
        for i, s in enumerate(batch.sequences):  # as a pass of R2 leaves them: with the replica that made it
            s.routed_experts = expected.sequences[i].routed_experts + 1 if source[i] == here.own else None
        hand_over_routes(batch, source, target, here)
        for i, s in enumerate(batch.sequences):
            if target[i] == here.own and not np.array_equal(s.routed_experts, expected.sequences[i].routed_experts + 1):
                wrong.append(i)
    return {"wrong": wrong, "held": sum(s.tokens is not None for s in batch.sequences)}


def numbers(num_items: int) -> list[list[float]]:
    """`gather_rows` where some ranks know of nothing."""
    places = [(i * i) % 3 % dist.get_world_size() for i in range(num_items)]
    rows = [(i, -i / 3) for i in range(num_items) if places[i] == dist.get_rank()]
    return ranks.gather_rows(rows, places, width=2).tolist()


def denominators(correction: dict) -> dict[str, list[float]]:
    """What a loss is divided by where ``correction`` is counted: of all, and counted by those that hold them."""
    config = ObjectiveConfig.model_validate({"max_response_length": 999, "correction": [correction]})
    whole_batch = whole(9, seed=2, routes=False)
    random = np.random.default_rng(0)
    for s in whole_batch.sequences:
        noise = random.normal(0, 1, s.length).astype(np.float32)
        s.old_logprobs = np.minimum(s.inference_logprobs + noise, 0.0)
    expected = minibatch_denominators(whole_batch.sequences, config)
    holders = [(i * i) % dist.get_world_size() for i in range(9)]
    batch = held_by(whole_batch, holders)
    for s, holder in zip(batch.sequences, holders, strict=True):
        s.holder = holder
        s.old_logprobs = s.old_logprobs if s.tokens is not None else None
    denominators_here = minibatch_denominators(batch.sequences, config)
    return {"expected": list(astuple(expected)), "found": list(astuple(denominators_here))}


def groups_held(owners: list[int | None]) -> list[Group]:
    """Three prompts with as many responses as there are owners, as this rank knows them."""
    results = []
    for row in range(3):
        prompt, rollouts = Prompt(f"p{row}", [1, 2], f"#{row % 2}"), []
        for sample, owner in enumerate(owners):
            tokens = np.arange(4 + row + sample) % (2 + sample)
            is_here = owner in (None, dist.get_rank())
            rollouts.append(
                Rollout(
                    f"{prompt.id}/{sample}",
                    prompt.tokens,
                    tokens.astype(np.int32) if is_here else None,
                    np.zeros(len(tokens), np.float32) if is_here else None,
                    np.zeros(len(tokens), np.int32) if is_here else None,
                    "length" if sample == 1 else "stop",
                    text=f"#{(row + sample) % 2}" if is_here else "",
                    length=len(tokens),
                    owner=owner,
                )
            )
        results.append(Group(prompt, rollouts))
    return results


def scored(owners: list[int | None]) -> dict[str, Any]:
    """Rewards, repetition, texts and ratios of responses on several ranks."""
    groups = groups_held(owners)
    config = RewardConfig(name="exact", overlong={"buffer": 4, "penalty": 0.5}, mask_truncated=True)
    with Rewarder(config, 8) as rewarder:
        scores = score_shared(rewarder, groups)
    share_repetition(groups, 2)
    recipe = tiny_recipe(rollout={"num_samples": len(owners)})
    batch = build_batch(0, groups, recipe.batch, recipe.objective)
    for s in batch.sequences:
        s.holder = s.owner
        s.current_logprobs = None if s.tokens is None else s.inference_logprobs + np.float32(0.5)
    ratios = share_samples(groups, [0, 4])
    rollouts = [r for group in groups for r in group.rollouts]
    return {
        "rewards": [(r.raw_reward, r.reward, r.masked) for r in rollouts],
        "metrics": scores.metrics | rollout_metrics(groups, 2),
        "advantages": [(s.advantage, s.num_trained, s.whole_length) for s in batch.sequences],
        "ratios": ratios,
        "texts": [rollouts[place].text for place in (0, 4)],
    }


def record(folder: str, routes: bool) -> str:
    """Each rank writes what it learned from; the parts together are the batch."""
    world, here = dist.get_world_size(), replicas(dist.get_world_size())
    expected = whole(7, seed=3, routes=routes)
    batch = held_by(expected, [i % world for i in range(7)])
    home = [(i * i) % world for i in range(7)]
    distribute(batch, [[h] for h in home], here)
    for s, h in zip(batch.sequences, home, strict=True):
        s.holder = here.speakers[h]
        if s.tokens is not None:
            s.current_logprobs = s.inference_logprobs * 3
    return str(record_batch(Path(folder), batch, 5, {"loss": 0.5}, keep=True))


def record_on_a_full_disk(folder: str) -> str:
    """The last rank cannot write; what do all say?"""
    batch = whole(4, seed=3, routes=False)
    last = dist.get_world_size() - 1
    for i, s in enumerate(batch.sequences):
        s.holder = i % (last + 1)
    if dist.get_rank() == last:
        import resource

        resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    try:
        record_batch(Path(folder), batch, 5)
    except OSError as error:
        return str(error)
    return "no error"
