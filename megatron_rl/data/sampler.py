"""The order of prompts: shuffled epochs that a checkpoint can interrupt anywhere.

`MixedSampler` mixes several sources.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from megatron_rl.config.data import DataConfig
from megatron_rl.data.prompts import fingerprint
from megatron_rl.data.table import PromptSet
from megatron_rl.errors import InputError
from megatron_rl.types import Prompt


class PromptSampler:
    """Yields prompts without end. Each epoch visits each prompt once, in an order drawn from (seed, epoch).

    A batch that spans two epochs does not repeat a prompt: prompts that it took from the old epoch come later in the
    new one. Only a batch larger than the dataset repeats prompts.
    """

    def __init__(self, prompts: Sequence[Prompt], *, seed: int = 0, shuffle: bool = True) -> None:
        if not prompts:
            raise InputError("the dataset is empty: there are no prompts to sample")
        self._prompts = prompts
        self._seed, self._shuffle = seed, shuffle
        self._fingerprint = fingerprint(prompts)
        self.epoch, self._position = 0, 0
        self._delayed: list[int] = []  # rows that the batch which began this epoch took from the previous epoch
        self._window = 0  # number of prompts that this batch took from this epoch
        self._order = self._make_order()

    def _visits(self) -> np.ndarray:
        """Return the rows of this epoch in order, [prompts] int64."""
        count = len(self._prompts)
        if not self._shuffle:
            return np.arange(count)
        return np.random.Generator(np.random.PCG64([self._seed, self.epoch])).permutation(count)

    def _make_order(self) -> np.ndarray:
        order = self._visits()
        if not self._window:
            return order
        first = order[~np.isin(order, self._delayed)][: self._window]
        return np.concatenate([first, order[~np.isin(order, first)]])

    def take(self, num_prompts: int) -> list[Prompt]:
        """Return the next ``num_prompts`` prompts."""
        taken: list[int] = []
        prompts: list[Prompt] = []
        while len(taken) < num_prompts:
            if self._position == len(self._order):
                missing = num_prompts - len(taken)
                self.epoch, self._position = self.epoch + 1, 0
                fits = missing + len(taken) <= len(self._prompts)
                self._delayed, self._window = (sorted(taken), missing) if fits and self._shuffle else ([], 0)
                self._order = self._make_order()
            stop = min(len(self._order), self._position + num_prompts - len(taken))
            rows = self._order[self._position : stop].tolist()
            prompts += [self._prompts[row] for row in rows]
            taken += rows
            self._position = stop
        return prompts

    def state_dict(self) -> dict[str, Any]:
        """Return the state that determines the next prompts, as JSON values."""
        return {
            "epoch": self.epoch,
            "position": self._position,
            "delayed": list(self._delayed),
            "window": self._window,
            "seed": self._seed,
            "shuffle": self._shuffle,
            "num_prompts": len(self._prompts),
            "fingerprint": self._fingerprint,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue exactly from ``state``. Raises InputError if the dataset or the order differs."""
        if "sources" in state:
            raise InputError(
                f"data.train: the checkpoint was trained on a mix of {', '.join(state['sources'])}, and the recipe "
                "gives no weights; restore them, or start a new run"
            )
        if state["fingerprint"] != self._fingerprint:
            raise InputError(
                f"the checkpoint was trained on another dataset: {state['num_prompts']} prompts with fingerprint "
                f"{state['fingerprint']}, now {len(self._prompts)} with {self._fingerprint}; restore the files, the "
                "prompt template and the tokenizer, or start a new run"
            )
        for key, now in (("seed", self._seed), ("shuffle", self._shuffle)):
            if state[key] != now:
                raise InputError(f"data.{key}: the checkpoint was trained with {state[key]}, the recipe says {now}")
        self.epoch, self._position = state["epoch"], state["position"]
        self._delayed, self._window = list(state["delayed"]), state["window"]
        self._order = self._make_order()


def in_another_order(state: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """Return a sampler's ``state``, to be continued in the order of ``seed``.

    The place in the epoch stays, so that in this epoch some prompts come twice and others not at all.
    """
    if "sources" in state:
        sources = {name: in_another_order(part, seed) for name, part in state["sources"].items()}
        return {**state, "sources": sources}
    return {**state, "seed": seed}


def make_sampler(prompts: PromptSet, data: DataConfig) -> PromptSampler | MixedSampler:
    """Return the sampler that orders ``prompts`` of `data.train`."""

    def walk(part: PromptSet) -> PromptSampler:
        return PromptSampler(part, seed=data.seed, shuffle=data.shuffle)

    if not (weights := data.weights):
        return walk(prompts)
    rows = prompts.rows_of_names(list(weights))
    if absent := [name for name, numbers in rows.items() if not len(numbers)]:
        raise InputError(f"data.train: source {absent[0]!r} has a weight but no prompts left; remove the source")
    parts = {name: prompts.choose(numbers) for name, numbers in rows.items()}
    return MixedSampler({name: walk(part) for name, part in parts.items()}, weights)


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

    def take(self, num_prompts: int) -> list[Prompt]:
        """Return the next ``num_prompts`` prompts, without repetition if each source has enough prompts."""
        names = [self._next() for _ in range(num_prompts)]
        taken = {name: iter(sampler.take(names.count(name))) for name, sampler in self._samplers.items()}
        return [next(taken[name]) for name in names]

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
