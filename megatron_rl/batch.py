"""Builds the learner's batch from scored groups."""

from __future__ import annotations

import numpy as np
import torch

from megatron_rl.config import ObjectiveConfig
from megatron_rl.config.sections import BatchConfig, FilterMetric
from megatron_rl.objective import compute_advantages
from megatron_rl.objective.advantages import group_filter_metrics, informative_groups
from megatron_rl.types import Batch, Group, Rollout


def build_batch(step: int, groups: list[Group], config: BatchConfig, objective: ObjectiveConfig) -> Batch:
    """Compute advantages over whole groups and return their rollouts, split into mini-batches in order.

    Groups stay together: if `batch.minibatches` divides the number of prompts, a mini-batch has all samples of a group.
    A response without a score leaves the loss and its group's statistics; so does one that is alone in what is left.
    """
    batch = build_unscored_batch(step, groups, config)
    give_scores(groups, objective)
    return batch


def build_unscored_batch(step: int, groups: list[Group], config: BatchConfig) -> Batch:
    """Return the rollouts of ``groups`` as a batch. Rewards and advantages are not known yet: see `give_scores`."""
    for number, group in enumerate(groups):
        for rollout in group.rollouts:
            rollout.group = number
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    parts = np.array_split(np.arange(len(rollouts)), min(config.minibatches, len(rollouts) or 1))
    return Batch(step=step, sequences=rollouts, minibatches=[part.tolist() for part in parts if len(part)])


def give_scores(groups: list[Group], objective: ObjectiveConfig) -> None:
    """Give the rollouts of ``groups`` their advantages, and take those that do not count out of the loss. Their arrays
    may have gone to another rank since the batch was built."""
    counted = [(i, rollout) for i, group in enumerate(groups) for rollout in _counted(group)]
    advantages: dict[int, float] = {}
    if counted:
        values = compute_advantages(
            torch.tensor([rollout.reward - rollout.kl_penalty for _, rollout in counted]),
            torch.tensor([i for i, _ in counted]),
            objective.advantage,
            lengths=torch.tensor([rollout.num_trained for _, rollout in counted]),
        )
        advantages = {id(rollout): float(value) for (_, rollout), value in zip(counted, values, strict=True)}
    for rollout in (rollout for group in groups for rollout in group.rollouts):
        rollout.masked = rollout.masked or id(rollout) not in advantages
        rollout.advantage = advantages.get(id(rollout), 0.0)


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
