"""Rewards of a step over all ranks: each scores its share, all hold the result."""

from __future__ import annotations

from megatron_rl.process.ranks import gather_objects, together, world_rank, world_size
from megatron_rl.rewards.rewarder import Rewarder
from megatron_rl.types import Group


def score_shared(rewarder: Rewarder, groups: list[Group]) -> dict[str, float]:
    """Reward every rollout: each rank scores its share, all ranks hold the result. Returns `reward/*` counts."""
    mine = groups[world_rank() :: world_size()]
    counts = together("rewards could not be computed", lambda: rewarder.score(mine))
    scored = [(r.raw_reward, r.reward, r.masked) for group in mine for r in group.rollouts]
    shares = gather_objects((scored, counts))
    for rank, (values, _) in enumerate(shares):
        rollouts = [r for group in groups[rank :: len(shares)] for r in group.rollouts]
        for rollout, (raw, reward, masked) in zip(rollouts, values, strict=True):
            rollout.raw_reward, rollout.reward, rollout.masked = raw, reward, masked
    failures = ("reward/timeouts", "reward/worker_failures", "reward/errors")
    rollouts = [r for group in groups for r in group.rollouts]
    return {name: sum(share[name] for _, share in shares) for name in failures} | {
        "reward/masked_frac": sum(r.masked for r in rollouts) / max(1, len(rollouts))
    }
