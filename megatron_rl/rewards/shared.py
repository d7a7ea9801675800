"""Rewards of a step over all ranks: each scores its share, all hold the result."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_rl.process.ranks import gather_objects, together, world_rank, world_size
from megatron_rl.rewards.failures import MAX_KINDS, Failure, merge
from megatron_rl.rewards.rewarder import Rewarder
from megatron_rl.types import Group

_FAILURES = ("reward/timeouts", "reward/worker_failures", "reward/errors")


@dataclass(frozen=True)
class Scores:
    """``metrics``: `reward/*`. ``failures``: an example of each kind of failure."""

    metrics: dict[str, float]
    failures: list[Failure]
    num_scored: int

    @property
    def num_failed(self) -> int:
        return int(sum(self.metrics[name] for name in _FAILURES))


def score_shared(rewarder: Rewarder, groups: list[Group]) -> Scores:
    """Reward every rollout: each rank scores its share, all ranks hold the result."""
    mine = groups[world_rank() :: world_size()]
    counts = together("rewards could not be computed", lambda: rewarder.score(mine))
    scored = [(r.raw_reward, r.reward, r.masked) for group in mine for r in group.rollouts]
    shares = gather_objects((scored, counts, rewarder.failures[:MAX_KINDS]))
    for rank, (values, _, _) in enumerate(shares):
        rollouts = [r for group in groups[rank :: len(shares)] for r in group.rollouts]
        for rollout, (raw, reward, masked) in zip(rollouts, values, strict=True):
            rollout.raw_reward, rollout.reward, rollout.masked = raw, reward, masked
    rollouts = [r for group in groups for r in group.rollouts]
    metrics = {name: sum(share[name] for _, share, _ in shares) for name in _FAILURES} | {
        "reward/masked_frac": sum(r.masked for r in rollouts) / max(1, len(rollouts))
    }
    return Scores(metrics, merge(failure for _, _, found in shares for failure in found), len(rollouts))
