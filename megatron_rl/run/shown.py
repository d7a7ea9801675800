"""What the main rank needs of responses that other ranks hold: a number of each, and the text of the few it shows."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_rl.monitor.samples import REPETITION_NGRAM, repetition_fraction, rho_summary
from megatron_rl.process.ranks import gather_objects, gather_rows, world_rank, world_size
from megatron_rl.types import Batch, Group, Rollout


def share_repetition(groups: Sequence[Group], ngram: int = REPETITION_NGRAM) -> None:
    """Fill `Rollout.repetition` on every rank; each computes it for the responses that it holds. Collective."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    places = [i % world_size() if r.owner is None else r.owner for i, r in enumerate(rollouts)]
    rank = world_rank()
    mine = [r for r, place in zip(rollouts, places, strict=True) if place == rank]
    fractions = gather_rows([[repetition_fraction(r.tokens, ngram)] for r in mine], places, width=1)
    for rollout, value in zip(rollouts, fractions[:, 0].tolist(), strict=True):
        rollout.repetition = value


def share_samples(
    groups: Sequence[Group], batch: Batch | None, places: Sequence[int]
) -> dict[int, dict[str, float] | None]:
    """Bring the texts of the responses ``places`` to the main rank; returns `rho_summary` of each there. Collective.

    ``batch``: of these groups, in the same order, as the learner left it.
    """
    if not places:
        return {}
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    mine: dict[int, tuple[str | None, dict[str, float] | None]] = {}
    for place in places:
        text = rollouts[place].text if _speaks(rollouts[place].owner) else None
        sequence = batch.sequences[place] if batch is not None else None
        rho = rho_summary(sequence) if sequence is not None and _speaks(sequence.holder) else None
        if text is not None or rho is not None:
            mine[place] = text, rho
    ratios: dict[int, dict[str, float] | None] = {}
    for place, (text, rho) in (item for share in gather_objects(mine) for item in share.items()):
        _tell(rollouts[place], text)
        ratios[place] = ratios.get(place) or rho
    return ratios


def _speaks(rank: int | None) -> bool:
    return world_rank() == (rank or 0)


def _tell(rollout: Rollout, text: str | None) -> None:
    if text is not None and world_rank() == 0:
        rollout.text = text
