"""Advantages of responses within their prompt groups (algorithms.md §1). Shapes: ``B`` responses of the batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rl.config.base import is_function_path
from megatron_rl.errors import InputError
from megatron_rl.objective.inputs import MIN_WHITENING_VARIANCE, STD_EPSILON
from megatron_rl.process.user_functions import load_function


@dataclass(frozen=True)
class Groups:
    """Rewards with the sizes and means of their groups, gathered back to the responses; all [B], float64 but
    for the ids."""

    rewards: Tensor
    size: Tensor
    centred: Tensor  # R - group mean; exactly 0 in a group of equal rewards
    sum_of_squares: Tensor  # Σ over the group of centred²
    lengths: Tensor  # trained tokens
    ids: Tensor  # int64: the number of the response's group, from 0
    weights: Tensor  # w² |∇ log pi|², of `min_variance` alone; else 1


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
            f"advantage rloo compares a response with the others of its group, but {alone} group(s) have one response; "
            "sample at least 2 per prompt, or use dr_grpo"
        )
    return groups.centred * groups.size / (groups.size - 1)


def reinforce_pp(groups: Groups) -> Tensor:
    """R - group mean, whitened over the global batch: mean and variance weighted by tokens [arXiv 2501.03262].

    It uses the population variance. Groups of equal rewards are included: they are 0 before whitening, and minus the
    batch mean after it.
    """
    share = groups.lengths / groups.lengths.sum().clamp(min=1)
    centred = groups.centred - (share * groups.centred).sum()
    variance = (share * centred.square()).sum()
    return centred / variance.clamp(min=MIN_WHITENING_VARIANCE).sqrt()


def min_variance(groups: Groups) -> Tensor:
    """R - b, b = Σ w² |g|² R / Σ w² |g|² over the group, g = ∇ Σ_t log pi_t [arXiv 2602.17616].

    Of all baselines this one makes the squared norm of the terms w g (R - b) smallest. Responses without a weight do
    not count; in a group where none has one, A is 0.
    """
    zeros = torch.zeros_like(groups.rewards)
    total = zeros.index_add(0, groups.ids, groups.weights)[groups.ids]
    # Of rewards centred before, so that equal rewards have A = 0 exactly.
    shift = zeros.index_add(0, groups.ids, groups.weights * groups.centred)[groups.ids] / total
    return (groups.centred - shift).masked_fill(total == 0, 0.0)


def reinforce(groups: Groups) -> Tensor:
    """R, no baseline."""
    return groups.rewards


def none(groups: Groups) -> Tensor:
    """0: nothing is learned from rewards."""
    return torch.zeros_like(groups.rewards)


ADVANTAGES: dict[str, Callable[[Groups], Tensor]] = {
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "rloo": rloo,
    "reinforce_pp": reinforce_pp,
    "min_variance": min_variance,
    "reinforce": reinforce,
    "none": none,
}


def compute_advantages(
    rewards: Tensor,
    group_ids: Tensor,
    name: str,
    lengths: Tensor | None = None,
    weights: Tensor | None = None,
) -> Tensor:
    """Return advantages [B], in the rewards' dtype, from rewards [B] and integer group ids [B] in any order.

    They are computed in float64 over the whole batch of a step, before it is split over ranks. Only reinforce_pp uses
    `lengths` [B], the number of trained tokens of each response, and only min_variance `weights` [B], w² |∇ log pi|²;
    without them all responses have equal weight.

    Raises InputError for an unknown name, shapes that disagree, or rloo on a group of one.
    """
    if name not in ADVANTAGES and not is_function_path(name):
        raise InputError(f"unknown advantage {name!r}; allowed: {', '.join(ADVANTAGES)}, path/to/file.py:function")
    rewards = torch.as_tensor(rewards)
    dtype = rewards.dtype if rewards.is_floating_point() else torch.float32
    advantage = ADVANTAGES.get(name) or load_function(name)
    return advantage(group_rewards(rewards, group_ids, lengths, weights)).to(dtype)


def group_rewards(
    rewards: Tensor, group_ids: Tensor, lengths: Tensor | None = None, weights: Tensor | None = None
) -> Groups:
    """Return sizes, means and spreads of the groups, repeated on their members."""
    rewards = torch.as_tensor(rewards).double()
    ids = torch.as_tensor(group_ids, device=rewards.device)
    if rewards.dim() != 1 or ids.shape != rewards.shape:
        raise InputError(f"rewards {list(rewards.shape)} and group_ids {list(ids.shape)} must both be [B]")
    lengths, weights = (
        torch.ones_like(rewards) if x is None else torch.as_tensor(x).to(rewards) for x in (lengths, weights)
    )
    for name, values in (("lengths", lengths), ("weights", weights)):
        if values.shape != rewards.shape:
            raise InputError(f"{name} {list(values.shape)} must be [B] = {list(rewards.shape)} like the rewards")
    unique, member = torch.unique(ids, return_inverse=True)
    zeros = rewards.new_zeros(unique.numel())
    size = zeros.index_add(0, member, torch.ones_like(rewards))[member]
    mean = zeros.index_add(0, member, rewards)[member] / size
    highest = zeros.scatter_reduce(0, member, rewards, "amax", include_self=False)[member]
    lowest = zeros.scatter_reduce(0, member, rewards, "amin", include_self=False)[member]
    # The mean of equal numbers may differ by a rounding error, which GRPO's division would amplify.
    centred = (rewards - mean).masked_fill(highest == lowest, 0.0)
    squares = zeros.index_add(0, member, centred.square())[member]
    return Groups(rewards, size, centred, squares, lengths, member, weights)


# Which groups carry a gradient [DAPO; LD App. C]. Shapes: ``B`` responses of the groups at hand.
#
# Only pure functions are here. The training loop samples further prompts until enough groups are left, and the room
# `rewards` applies the soft penalty of length.


def informative_groups(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """Return, per response, whether its group has different rewards: [B] bool from rewards [B] and group ids [B].

    Other groups have zero advantage under every group baseline. A group of one is never informative.
    """
    groups = group_rewards(rewards, group_ids)
    return groups.sum_of_squares > 0


def group_filter_metrics(rewards: Tensor, group_ids: Tensor, solved: float = 1.0) -> dict[str, float]:
    """Return the fractions of groups that filtering keeps, and that it drops because all (none) reach `solved`.

    Groups of equal rewards below `solved` count as unsolved. Without groups, all fractions are 0.
    """
    rewards = torch.as_tensor(rewards)
    if rewards.numel() == 0:
        return {f"groups/{name}": 0.0 for name in ("informative_frac", "all_solved_frac", "none_solved_frac")}
    groups = group_rewards(rewards, group_ids)
    share = 1 / groups.size  # every group has a total weight of 1
    num_groups, informative = share.sum(), groups.sum_of_squares > 0
    reached = groups.rewards >= solved
    return {
        "groups/informative_frac": float((share * informative).sum() / num_groups),
        "groups/all_solved_frac": float((share * (~informative & reached)).sum() / num_groups),
        "groups/none_solved_frac": float((share * (~informative & ~reached)).sum() / num_groups),
    }
