"""A weighted mix of sources: each batch contains each source's share, and each source has its own epochs."""

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
    """Return the sampler that orders ``prompts`` of `data.train`."""
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
    if absent := [name for name, numbers in rows.items() if not len(numbers)]:
        raise InputError(f"data.train: source {absent[0]!r} has a weight but no prompts left; remove the source")
    parts = {name: prompts.choose(numbers, f"source-{number}") for number, (name, numbers) in enumerate(rows.items())}
    return MixedSampler({name: walk(part, rates[rows[name]]) for name, part in parts.items()}, weights)


class MixedSampler:
    """Draws from several samplers so that each has its share at every moment, not only on average.

    ``weights``: by source, greater than 0; a source's share w is its weight over the sum of weights. After n draws its
    count differs from n·w by at most 1 - 1/(2(k - 1)) with k sources, by Tijdeman's rule for the chairman assignment
    problem (Discrete Mathematics 32, 1980). Only the order within a source is random.
    """

    def __init__(self, samplers: Mapping[str, PromptSampler], weights: Mapping[str, float]) -> None:
        self._samplers, self._weights = dict(samplers), dict(weights)
        total = sum(map(Fraction, weights.values()))
        self._shares = {
            name: Fraction(weight) / total for name, weight in weights.items()
        }  # exact, so that rounding errors do not add up
        self._most = 1 - Fraction(1, 2 * len(weights) - 2) if len(weights) > 1 else Fraction(0)
        self._drawn = dict.fromkeys(self._samplers, 0)

    @property
    def epoch(self) -> int:
        """Number of full passes over the source with the fewest."""
        return min(sampler.epoch for sampler in self._samplers.values())

    def take(self, num_prompts: int) -> list[Prompt]:
        """Return the next ``num_prompts`` prompts, without repetition if each source has enough prompts."""
        names = [self._next() for _ in range(num_prompts)]
        taken = {name: iter(sampler.take(names.count(name))) for name, sampler in self._samplers.items()}
        return [next(taken[name]) for name in names]

    def observe(self, success_rates: Mapping[str, float]) -> None:
        """Pass the success rates on to all sources; see `PromptSampler.observe`."""
        for sampler in self._samplers.values():
            sampler.observe(success_rates)

    def metrics(self) -> dict[str, float]:
        """Return `curriculum/*`, summed over the sources."""
        by_source = [sampler.metrics() for sampler in self._samplers.values()]
        return {name: sum(metrics[name] for metrics in by_source) for name in by_source[0]}

    def _next(self) -> str:
        """Return the source of the next prompt: among those sufficiently behind, the one whose draw is due first."""
        number = sum(self._drawn.values()) + 1
        behind = {name: share * number - self._drawn[name] for name, share in self._shares.items()}
        eligible = [name for name in behind if behind[name] >= 1 - self._most]
        name = min(eligible, key=lambda name: (self._most - behind[name]) / self._shares[name])
        self._drawn[name] += 1
        return name

    def state_dict(self) -> dict[str, Any]:
        """Return the state that determines the next prompts, as JSON values."""
        sources = {name: sampler.state_dict() for name, sampler in self._samplers.items()}
        return {"sources": sources, "weights": self._weights, "drawn": self._drawn}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from ``state``. Weights may have changed; raises `InputError` for other sources."""
        before, in_recipe = list(state.get("sources", {})), list(self._samplers)
        if sorted(before) != sorted(in_recipe):
            saved_sources = f"sources {', '.join(before)} with weights" if before else "sources without weights"
            raise InputError(
                f"data.train: the checkpoint was trained on {saved_sources}, the recipe mixes {', '.join(in_recipe)}; "
                "restore the list, or start a new run"
            )
        for name, sampler in self._samplers.items():
            sampler.load_state_dict(state["sources"][name])
        same = state["weights"] == self._weights
        self._drawn = {name: state["drawn"][name] if same else 0 for name in in_recipe}
