"""A weighted mix of sources: every batch has each source's share, and each source has epochs of its own."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from megatron_rl.config.data import DataConfig
from megatron_rl.data.curriculum import CurriculumSampler, read_success_rates
from megatron_rl.data.sampler import PromptSampler
from megatron_rl.data.table import PromptSet
from megatron_rl.errors import InputError
from megatron_rl.types import Prompt


def make_sampler(prompts: PromptSet, data: DataConfig) -> PromptSampler | MixedSampler:
    """The order in which ``prompts``, those of `data.train`, come."""
    weights, curriculum = data.weights, data.curriculum
    rates = np.full(len(prompts), np.nan, dtype=np.float32)
    if curriculum is not None and curriculum.success_rates is not None:
        rates = read_success_rates(Path(curriculum.success_rates), prompts)

    def walk(part: PromptSet, rates: np.ndarray) -> PromptSampler:
        if curriculum is None:
            return PromptSampler(part, seed=data.seed, shuffle=data.shuffle)
        return CurriculumSampler(part, curriculum, rates, seed=data.seed, shuffle=data.shuffle)

    if not weights:
        return walk(prompts, rates)
    rows = prompts.rows_of_names(list(weights))
    if absent := [name for name, found in rows.items() if not len(found)]:
        raise InputError(
            f"data.train: no prompt of source {absent[0]!r} is left, but it has a weight; remove the source"
        )
    parts = {name: prompts.choose(found, f"source-{number}") for number, (name, found) in enumerate(rows.items())}
    return MixedSampler({name: walk(part, rates[rows[name]]) for name, part in parts.items()}, weights)


class MixedSampler:
    """Draws from several samplers so that each has its share at every moment, not only on average.

    ``weights``: by source, greater than 0; a source's share w is its weight over their sum. After n draws it has been
    drawn n·w times, less or more by at most 1 - 1/(2(k - 1)) among k sources, by Tijdeman's rule for the chairman
    assignment problem (Discrete Mathematics 32, 1980). Nothing is random but the order within a source.
    """

    def __init__(self, samplers: Mapping[str, PromptSampler], weights: Mapping[str, float]) -> None:
        self._samplers, self._weights = dict(samplers), dict(weights)
        total = sum(map(Fraction, weights.values()))
        self._shares = {name: Fraction(weight) / total for name, weight in weights.items()}  # no rounding adds up
        self._most = 1 - Fraction(1, 2 * len(weights) - 2) if len(weights) > 1 else Fraction(0)
        self._drawn = dict.fromkeys(self._samplers, 0)

    @property
    def epoch(self) -> int:
        """Full passes over the source that had the fewest."""
        return min(sampler.epoch for sampler in self._samplers.values())

    def take(self, num_prompts: int) -> list[Prompt]:
        """The next ``num_prompts`` prompts. Each source names a prompt once in them, if it has enough."""
        names = [self._next() for _ in range(num_prompts)]
        taken = {name: iter(sampler.take(names.count(name))) for name, sampler in self._samplers.items()}
        return [next(taken[name]) for name in names]

    def observe(self, success_rates: Mapping[str, float]) -> None:
        """See `PromptSampler.observe`. Each source knows what was taken from it."""
        for sampler in self._samplers.values():
            sampler.observe(success_rates)

    def metrics(self) -> dict[str, float]:
        """`curriculum/*`, sums over the sources."""
        found = [sampler.metrics() for sampler in self._samplers.values()]
        return {name: sum(metrics[name] for metrics in found) for name in found[0]}

    def _next(self) -> str:
        """The source of the next prompt: of those that are behind far enough the one whose next draw is due first."""
        number = sum(self._drawn.values()) + 1
        behind = {name: share * number - self._drawn[name] for name, share in self._shares.items()}
        eligible = [name for name in behind if behind[name] >= 1 - self._most]
        name = min(eligible, key=lambda name: (self._most - behind[name]) / self._shares[name])
        self._drawn[name] += 1
        return name

    def state_dict(self) -> dict[str, Any]:
        """Everything that decides what comes next; plain JSON values."""
        sources = {name: sampler.state_dict() for name, sampler in self._samplers.items()}
        return {"sources": sources, "weights": self._weights, "drawn": self._drawn}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where ``state`` was taken. Other weights hold from here on; `InputError` for other sources."""
        before, here = list(state.get("sources", {})), list(self._samplers)
        if sorted(before) != sorted(here):
            found = f"sources {', '.join(before)} with weights" if before else "sources without weights"
            raise InputError(
                f"data.train: the checkpoint was trained on {found}, the recipe mixes {', '.join(here)}; "
                "restore the list, or start a new run"
            )
        for name, sampler in self._samplers.items():
            sampler.load_state_dict(state["sources"][name])
        same = state["weights"] == self._weights
        self._drawn = {name: state["drawn"][name] if same else 0 for name in here}
