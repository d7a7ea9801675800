"""Rewards of a step over all ranks: each rank scores a share, and all ranks get the result."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby

from megatron_rl.process.ranks import gather_objects, gather_rows, together, world_rank, world_size
from megatron_rl.rewards.rewarder import MAX_KINDS, Failure, Rewarder, merge
from megatron_rl.types import Group, Rollout

_FAILURES = ("reward/timeouts", "reward/worker_failures", "reward/errors")
_COUNTS = (*_FAILURES, "reward/retries")
_SHARES = ("reward/masked_frac", "reward/unscored_frac")


@dataclass(frozen=True)
class Scores:
    """Scores of a batch. ``metrics``: `reward/*`. ``failures``: an example of each kind of failure."""

    metrics: dict[str, float]
    failures: list[Failure]
    num_scored: int

    @property
    def num_failed(self) -> int:
        return int(sum(self.metrics[name] for name in _FAILURES))


def merged(shares: list[Scores]) -> Scores:
    """Return the scores of several calls as one."""
    if len(shares) == 1:
        return shares[0]
    count = sum(share.num_scored for share in shares)
    metrics = {name: sum(share.metrics[name] for share in shares) for name in _COUNTS}
    if count:
        for name in _SHARES:
            metrics[name] = sum(share.metrics[name] * share.num_scored for share in shares if share.num_scored) / count
    return Scores(metrics, merge(failure for share in shares for failure in share.failures), count)


def score_shared(rewarder: Rewarder, groups: list[Group]) -> Scores:
    """Score every rollout and return the scores of all ranks; each rank scores its own rollouts.

    Groups that all ranks have are divided among the ranks. A reward uses one response at a time, so a rank may have
    part of a group.
    """
    pairs = [(number, group, rollout) for number, group in enumerate(groups) for rollout in group.rollouts]
    places = [number % world_size() if r.owner is None else r.owner for number, _, r in pairs]
    rank = world_rank()
    held = [(group, r) for (_, group, r), place in zip(pairs, places, strict=True) if place == rank]
    groups_here = [Group(group.prompt, [r for _, r in members]) for group, members in _runs(held)]
    counts = together("rewards could not be computed", lambda: rewarder.score(groups_here))
    rows = gather_rows([(r.raw_reward, r.reward, r.masked, r.unscored) for _, r in held], places, width=4).tolist()
    for (_, _, rollout), (raw, reward, masked, unscored) in zip(pairs, rows, strict=True):
        rollout.raw_reward, rollout.reward = raw, reward
        rollout.masked, rollout.unscored = bool(masked), bool(unscored)
    shares = gather_objects((counts, rewarder.failures[:MAX_KINDS]))
    metrics = {name: sum(share[name] for share, _ in shares) for name in _COUNTS}
    if pairs:
        metrics["reward/masked_frac"] = sum(r.masked for _, _, r in pairs) / len(pairs)
        metrics["reward/unscored_frac"] = sum(r.unscored for _, _, r in pairs) / len(pairs)
    return Scores(metrics, merge(failure for _, failures in shares for failure in failures), len(pairs))


def _runs(held: list[tuple[Group, Rollout]]) -> list[tuple[Group, list[tuple[Group, Rollout]]]]:
    """Return consecutive rollouts of the same group together."""
    return [(members[0][0], members) for _, it in groupby(held, key=lambda pair: id(pair[0])) if (members := list(it))]
