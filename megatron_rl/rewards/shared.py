"""Rewards of a step over all ranks: each scores its share, all hold the result."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby

from megatron_rl.process.arrays import gather_rows
from megatron_rl.process.ranks import gather_objects, together, world_rank, world_size
from megatron_rl.rewards.failures import MAX_KINDS, Failure, merge
from megatron_rl.rewards.rewarder import Rewarder
from megatron_rl.types import Group, Rollout

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


def merged(shares: list[Scores]) -> Scores:
    """The scores of several calls as those of one."""
    count = sum(share.num_scored for share in shares)
    metrics = {name: sum(share.metrics[name] for share in shares) for name in _FAILURES}
    masked = sum(share.metrics["reward/masked_frac"] * share.num_scored for share in shares)
    metrics["reward/masked_frac"] = masked / max(1, count)
    return Scores(metrics, merge(failure for share in shares for failure in share.failures), count)


def score_shared(rewarder: Rewarder, groups: list[Group]) -> Scores:
    """Reward every rollout: each rank scores what it holds, all ranks hold the result.

    What all ranks hold is shared out by groups. A reward sees one response at a time, so a group need not be whole.
    """
    pairs = [(number, group, rollout) for number, group in enumerate(groups) for rollout in group.rollouts]
    places = [number % world_size() if r.owner is None else r.owner for number, _, r in pairs]
    rank = world_rank()
    held = [(group, r) for (_, group, r), place in zip(pairs, places, strict=True) if place == rank]
    mine = [Group(group.prompt, [r for _, r in members]) for group, members in _runs(held)]
    counts = together("rewards could not be computed", lambda: rewarder.score(mine))
    rows = gather_rows([(r.raw_reward, r.reward, r.masked) for _, r in held], places, width=3).tolist()
    for (_, _, rollout), (raw, reward, masked) in zip(pairs, rows, strict=True):
        rollout.raw_reward, rollout.reward, rollout.masked = raw, reward, bool(masked)
    shares = gather_objects((counts, rewarder.failures[:MAX_KINDS]))
    metrics = {name: sum(share[name] for share, _ in shares) for name in _FAILURES} | {
        "reward/masked_frac": sum(r.masked for _, _, r in pairs) / max(1, len(pairs))
    }
    return Scores(metrics, merge(failure for _, found in shares for failure in found), len(pairs))


def _runs(held: list[tuple[Group, Rollout]]) -> list[tuple[Group, list[tuple[Group, Rollout]]]]:
    """Neighbours of one group together."""
    return [(members[0][0], members) for _, it in groupby(held, key=lambda pair: id(pair[0])) if (members := list(it))]
