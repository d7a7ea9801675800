"""Which groups carry a gradient [DAPO; LD App. C]. Shapes: ``B`` responses of the groups at hand.

Only the pure parts live here: a loop that samples further prompts until enough groups are left is the training
loop's, and the soft punishment of length is the rewards'.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_rl.objective.advantages import group_rewards


def informative_groups(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """[B] rewards, [B] integer group ids → [B] bool: whether the response's group has different rewards.

    The others have zero advantage under every group baseline; a group of one is never informative.
    """
    groups = group_rewards(rewards, group_ids)
    return groups.sum_of_squares > 0


def group_filter_metrics(rewards: Tensor, group_ids: Tensor, solved: float = 1.0) -> dict[str, float]:
    """Fractions of groups [0, 1] that filtering keeps, and that it drops because all (none) reach `solved`.

    Groups of equal rewards strictly below `solved` count as unsolved. Of no groups at all: zeros.
    """
    rewards = torch.as_tensor(rewards)
    if rewards.numel() == 0:
        return {f"groups/{name}": 0.0 for name in ("informative_frac", "all_solved_frac", "none_solved_frac")}
    groups = group_rewards(rewards, group_ids)
    share = 1 / groups.size  # every group weighs 1 in total
    num_groups, informative = share.sum(), groups.sum_of_squares > 0
    reached = groups.rewards >= solved
    return {
        "groups/informative_frac": float((share * informative).sum() / num_groups),
        "groups/all_solved_frac": float((share * (~informative & reached)).sum() / num_groups),
        "groups/none_solved_frac": float((share * (~informative & ~reached)).sum() / num_groups),
    }
