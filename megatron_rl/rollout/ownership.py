"""Responses that lie on one rank each, known to all: metadata goes around, arrays stay."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_rl.process.arrays import gather_rows
from megatron_rl.process.ranks import world_rank
from megatron_rl.rollout.payload import elsewhere
from megatron_rl.rollout.requests import Request
from megatron_rl.types import FINISH_REASONS, Rollout


def known_everywhere(requests: Sequence[Request], owners: Sequence[int], held: Sequence[Rollout]) -> list[Rollout]:
    """All responses in the order of the requests: whole on their owner, with length and end on the others.

    ``owners``: the rank that holds each, the same list on every rank. ``held``: this rank's, in order. Collective.
    """
    mine = iter(held)
    rollouts = [next(mine) if owner == world_rank() else None for owner in owners]
    rows = [(r.length, FINISH_REASONS.index(r.finish_reason)) for r in held]
    about = gather_rows(rows, owners, width=2).astype(int).tolist()
    for number, (request, owner, (length, reason)) in enumerate(zip(requests, owners, about, strict=True)):
        if rollouts[number] is None:
            rollouts[number] = elsewhere(request, length, FINISH_REASONS[reason])
        rollouts[number].owner = owner
    return rollouts
