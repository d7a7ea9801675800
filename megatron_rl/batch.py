"""Builds the learner's batch from scored groups."""

from __future__ import annotations

import numpy as np
import torch

from megatron_rl.config import ObjectiveConfig
from megatron_rl.config.sections import BatchConfig, FilterMetric
from megatron_rl.objective import compute_advantages
from megatron_rl.objective.advantages import group_filter_metrics, informative_groups
from megatron_rl.types import Batch, Group, Rollout, Sequence


def build_batch(step: int, groups: list[Group], config: BatchConfig, objective: ObjectiveConfig) -> Batch:
    """Compute advantages over whole groups and return one `Sequence` per rollout, split into mini-batches in order.

    Groups stay together: if `batch.minibatches` divides the number of prompts, a mini-batch has all samples of a group.
    A response without a score leaves the loss and its group's statistics; so does one that is alone in what is left.
    """
    batch = build_unscored_batch(step, groups, config)
    give_scores(batch, groups, objective)
    return batch


def build_unscored_batch(step: int, groups: list[Group], config: BatchConfig) -> Batch:
    """Return the batch as `give_scores` takes it: every reward and advantage is 0, every sampled token is trained."""
    sequences = [_sequence(number, group, r) for number, group in enumerate(groups) for r in group.rollouts]
    parts = np.array_split(np.arange(len(sequences)), min(config.minibatches, len(sequences) or 1))
    return Batch(step=step, sequences=sequences, minibatches=[part.tolist() for part in parts if len(part)])


def give_scores(batch: Batch, groups: list[Group], objective: ObjectiveConfig) -> None:
    """Give the sequences of ``batch`` the rewards and advantages of ``groups``, and take those that do not count out
    of the loss. The arrays of a sequence may have gone to another rank since the batch was built."""
    counted = [(i, rollout) for i, group in enumerate(groups) for rollout in _counted(group)]
    advantages: dict[int, float] = {}
    if counted:
        values = compute_advantages(
            torch.tensor([rollout.reward for _, rollout in counted]),
            torch.tensor([i for i, _ in counted]),
            objective.advantage,
            lengths=torch.tensor([0 if rollout.masked else rollout.num_sampled for _, rollout in counted]),
        )
        advantages = {id(rollout): float(value) for (_, rollout), value in zip(counted, values, strict=True)}
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    for sequence, rollout in zip(batch.sequences, rollouts, strict=True):
        rollout.masked = rollout.masked or id(rollout) not in advantages
        sequence.reward = rollout.reward
        sequence.advantage = advantages.get(id(rollout), 0.0) * sequence.prompt_weight
        if rollout.masked:
            sequence.mask_elsewhere = 0
            if sequence.loss_mask is not None:
                sequence.loss_mask = np.full(sequence.response_length, False)


def _counted(group: Group) -> list[Rollout]:
    """Return the responses with a score; none if failed rewards leave one that has nothing to be compared with."""
    scored = group.scored
    return [] if len(scored) == 1 < len(group.rollouts) else scored


def keep_informative(groups: list[Group], metric: FilterMetric = "reward") -> list[Group]:
    """Return the groups whose rewards are not all equal [DAPO]. ``metric``: the reward (`batch.filter_metric`)."""
    if not groups:
        return []
    rewards, ids = _rewards_and_ids(groups, metric)
    informative = set(ids[informative_groups(rewards, ids)].tolist()) if len(ids) else set()
    return [group for i, group in enumerate(groups) if i in informative]


def group_metrics(groups: list[Group], metric: FilterMetric = "reward") -> dict[str, float]:
    """Return `groups/*` of all groups sampled for a step, before any is left out."""
    return {"groups/sampled": float(len(groups)), **group_filter_metrics(*_rewards_and_ids(groups, metric))}


def _rewards_and_ids(groups: list[Group], metric: FilterMetric) -> tuple[torch.Tensor, torch.Tensor]:
    rewards = torch.tensor([getattr(rollout, metric) for group in groups for rollout in group.scored])
    return rewards, torch.tensor([i for i, group in enumerate(groups) for _ in group.scored])


def _sequence(number: int, group: Group, rollout: Rollout) -> Sequence:
    num_prompt, is_here = len(group.prompt.tokens), rollout.tokens is not None
    mask = np.full(rollout.length, True) if rollout.sampled is None else rollout.sampled
    return Sequence(
        id=rollout.id,
        tokens=np.concatenate([group.prompt.tokens, rollout.tokens]).astype(np.int64) if is_here else None,
        prompt_length=num_prompt,
        inference_logprobs=rollout.inference_logprobs,
        loss_mask=mask if is_here else None,
        advantage=0.0,
        reward=0.0,
        group=number,
        prompt_weight=group.prompt.weight,
        policy_versions=rollout.policy_versions,
        exact_logprobs=rollout.exact_logprobs,
        routed_experts=rollout.routed_experts,
        route_checksums=rollout.route_checksums,
        kept_tokens=rollout.kept_tokens,
        length=num_prompt + rollout.length,
        mask_elsewhere=rollout.num_sampled,
        owner=rollout.owner,
    )


def release_routes(groups: list[Group]) -> None:
    """Drop the groups' references to routes and kept sets: only the batch keeps them, and frees them when it sends them
    away."""
    for group in groups:
        for rollout in group.rollouts:
            rollout.routed_experts = rollout.route_checksums = rollout.kept_tokens = None
