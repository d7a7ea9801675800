"""The order of prompts: shuffled epochs that a checkpoint can interrupt anywhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from megatron_rl.data.prompts import fingerprint
from megatron_rl.errors import InputError
from megatron_rl.types import Prompt


class PromptSampler:
    """Yields prompts without end. Each epoch visits each prompt once, in an order drawn from (seed, epoch).

    A batch that spans two epochs does not repeat a prompt: prompts that it took from the old epoch come later in the
    new one. Only a batch larger than the dataset repeats prompts.
    """

    curriculum: dict[str, Any] | None = None  # the settings that determine which prompts an epoch visits

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
        """Return the rows of this epoch in order, [visits] int64."""
        count = len(self._prompts)
        if not self._shuffle:
            return np.arange(count)
        return np.random.Generator(np.random.PCG64([self._seed, self.epoch])).permutation(count)

    def _prompt(self, row: int) -> Prompt:
        """Return the prompt of ``row`` as this epoch presents it."""
        return self._prompts[row]

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
            prompts += map(self._prompt, rows)
            taken += rows
            self._position = stop
        return prompts

    def observe(self, success_rates: Mapping[str, float]) -> None:
        """Take success rates by prompt id after sampling. This sampler ignores them."""

    def metrics(self) -> dict[str, float]:
        """Return `curriculum/*`; empty without a curriculum."""
        return {}

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
            "curriculum": self.curriculum,
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
        if (before := state.get("curriculum")) != self.curriculum:
            raise InputError(
                f"data.curriculum: the checkpoint was trained with {before}, the recipe says {self.curriculum}; "
                "restore it, or start a new run"
            )
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
