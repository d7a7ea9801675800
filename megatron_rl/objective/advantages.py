"""Advantages of one prompt group each (algorithms.md §1). Shapes: ``B`` responses of the whole batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rl.errors import InputError
from megatron_rl.objective.guards import MIN_WHITENING_VARIANCE, STD_EPSILON


@dataclass(frozen=True)
class Groups:
    """Rewards with the sizes and means of their groups, gathered back to the responses; all [B] float64."""

    rewards: Tensor
    size: Tensor
    centred: Tensor  # R - group mean; exactly 0 throughout a group of equal rewards
    sum_of_squares: Tensor  # Σ over the group of centred²
    lengths: Tensor  # trained tokens


def grpo(groups: Groups) -> Tensor:
    """(R - mean) / (std + 1e-6), std with n - 1 [OH Eq 3; arXiv 2402.03300]. A group of one has 0."""
    std = (groups.sum_of_squares / (groups.size - 1).clamp(min=1)).sqrt()
    return groups.centred / (std + STD_EPSILON)


def dr_grpo(groups: Groups) -> Tensor:
    """R - mean [arXiv 2503.20783]. A group of one has 0."""
    return groups.centred


def rloo(groups: Groups) -> Tensor:
    """R minus the mean of the other G - 1 = G/(G - 1) (R - mean) [FP16 Eq 8, LD App. C]. A group of one is an error."""
    if bool((groups.size == 1).any()):
        alone = int((groups.size == 1).sum())
        raise InputError(
            f"advantage rloo compares a response with the others of its group, and {alone} group(s) hold one response; "
            "sample at least 2 per prompt, or use dr_grpo"
        )
    return groups.centred * groups.size / (groups.size - 1)


def reinforce_pp(groups: Groups) -> Tensor:
    """R - group mean, whitened over the global batch: mean and variance weighted by tokens [arXiv 2501.03262].

    The variance is the population's. Groups of equal rewards take part with 0 before whitening, and with minus the
    batch mean after it.
    """
    share = groups.lengths / groups.lengths.sum().clamp(min=1)
    centred = groups.centred - (share * groups.centred).sum()
    variance = (share * centred.square()).sum()
    return centred / variance.clamp(min=MIN_WHITENING_VARIANCE).sqrt()


def reinforce(groups: Groups) -> Tensor:
    """R, no baseline."""
    return groups.rewards


ADVANTAGES: dict[str, Callable[[Groups], Tensor]] = {
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "rloo": rloo,
    "reinforce_pp": reinforce_pp,
    "reinforce": reinforce,
}


def compute_advantages(rewards: Tensor, group_ids: Tensor, name: str, lengths: Tensor | None = None) -> Tensor:
    """[B] rewards, [B] integer group ids (any values, any order) → [B] advantages in the dtype of the rewards.

    Computed in float64 over the whole batch of a step, before it is split over ranks. `lengths` [B], the
    number of trained tokens of each response, matters to reinforce_pp alone; without it all responses weigh alike.

    Raises InputError for an unknown name, shapes that disagree, or rloo on a group of one.
    """
    if name not in ADVANTAGES:
        raise InputError(f"unknown advantage {name!r}; allowed: {', '.join(ADVANTAGES)}")
    rewards = torch.as_tensor(rewards)
    dtype = rewards.dtype if rewards.is_floating_point() else torch.float32
    return ADVANTAGES[name](group_rewards(rewards, group_ids, lengths)).to(dtype)


def group_rewards(rewards: Tensor, group_ids: Tensor, lengths: Tensor | None = None) -> Groups:
    """Sizes, means and spreads of the groups, gathered back to their members."""
    rewards = torch.as_tensor(rewards).double()
    ids = torch.as_tensor(group_ids, device=rewards.device)
    if rewards.dim() != 1 or ids.shape != rewards.shape:
        raise InputError(f"rewards {list(rewards.shape)} and group_ids {list(ids.shape)} must both be [B]")
    weights = torch.ones_like(rewards) if lengths is None else torch.as_tensor(lengths).to(rewards)
    if weights.shape != rewards.shape:
        raise InputError(f"lengths {list(weights.shape)} must be [B] = {list(rewards.shape)} like the rewards")
    unique, member = torch.unique(ids, return_inverse=True)
    zeros = rewards.new_zeros(unique.numel())
    size = zeros.index_add(0, member, torch.ones_like(rewards))[member]
    mean = zeros.index_add(0, member, rewards)[member] / size
    highest = zeros.scatter_reduce(0, member, rewards, "amax", include_self=False)[member]
    lowest = zeros.scatter_reduce(0, member, rewards, "amin", include_self=False)[member]
    # The mean of equal numbers may miss them by a rounding, which GRPO's division would blow up.
    centred = (rewards - mean).masked_fill(highest == lowest, 0.0)
    squares = zeros.index_add(0, member, centred.square())[member]
    return Groups(rewards, size, centred, squares, weights)
