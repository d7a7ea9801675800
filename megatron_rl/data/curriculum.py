"""A curriculum by measured difficulty: an epoch visits a share of easy and of hard prompts, and all others once.

A prompt's success rate is the share of its responses that were correct when it was last sampled. The prompts of an
epoch are drawn at its beginning from the rates of that moment. A prompt comes at most once per epoch, so that its rate
is up to date then, except in batches that run ahead of the learner.

The thresholds and fractions have prime-rl's names. [K15 §2.3.4] has both ideas: easier tasks first, and more visits for
prompts that are rarely solved.
"""

from __future__ import annotations

import base64
import json
import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from megatron_rl.config.data import CurriculumConfig
from megatron_rl.data.sampler import PromptSampler
from megatron_rl.data.table import PromptSet
from megatron_rl.errors import InputError
from megatron_rl.types import Prompt

KINDS = ("normal", "easy", "hard")
_FASTEST = 1  # zlib's fastest level


class CurriculumSampler(PromptSampler):
    """A `PromptSampler` whose epochs visit the prompts that `CurriculumConfig` selects.

    ``rates``: [prompts] float32, share of solved responses; NaN if not measured. With a million prompts, the order of
    an epoch takes about 0.1 s to draw, and a state a few megabytes.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        config: CurriculumConfig,
        rates: np.ndarray,
        *,
        seed: int = 0,
        shuffle: bool = True,
    ) -> None:
        self._config, self._rates = config, rates.astype(np.float32)
        self.curriculum = config.model_dump(mode="json", exclude={"success_rates"})
        self._taken: dict[str, tuple[int, int]] = {}  # prompt id → (row, epoch) of prompts that are not measured yet
        super().__init__(prompts, seed=seed, shuffle=shuffle)

    def _make_order(self) -> np.ndarray:
        self._begin_epoch()
        return super()._make_order()

    def _begin_epoch(self) -> None:
        """Fix the rates of this epoch. Drop prompts that were taken two epochs ago and never measured."""
        self._rates_of_epoch = self._rates.copy()
        self._packed_of_epoch = _pack(self._rates_of_epoch)
        self._taken = {name: taken for name, taken in self._taken.items() if taken[1] >= self.epoch - 1}

    def _visits(self) -> np.ndarray:
        """Return this epoch's prompts in order; set ``_weights``, the factor of each kind with `unbiased`."""
        order, kinds = super()._visits(), self._kinds(self._rates_of_epoch)
        visited = np.ones(len(order), dtype=bool)
        chances = dict.fromkeys(KINDS, 1.0)
        for number, kind in enumerate(KINDS[1:], start=1):
            rows = np.flatnonzero(kinds == number)
            count = math.ceil(getattr(self._config, f"{kind}_fraction") * len(rows))
            if count < len(rows):
                chances[kind] = count / len(rows)
                draw = np.random.Generator(np.random.PCG64([self._seed, self.epoch, number])).permutation(len(rows))
                visited[rows[draw[count:]]] = False
        order = order[visited[order]]
        share = len(order) / len(visited)
        self._weights = [share / chances[kind] for kind in KINDS] if self._config.unbiased else [1.0] * len(KINDS)
        if self._config.order == "easy_first":
            order = order[np.argsort(-self._rates_of_epoch[order], kind="stable")]  # NaN comes last
        return order

    def _kinds(self, rates: np.ndarray) -> np.ndarray:
        """Return the kind of each prompt: [prompts] int8, indices of `KINDS`."""
        easy, hard = rates >= self._config.easy_threshold, rates <= self._config.hard_threshold
        return easy.astype(np.int8) + 2 * hard.astype(np.int8)

    def _prompt(self, row: int) -> Prompt:
        prompt = super()._prompt(row)
        self._taken[prompt.id] = row, self.epoch
        weight = self._weights[int(self._kinds(self._rates_of_epoch[row : row + 1])[0])]
        return prompt if weight == 1.0 else replace(prompt, weight=weight)

    def observe(self, success_rates: Mapping[str, float]) -> None:
        """Record the success rates of prompts that were taken, by id. Ids of other prompts are ignored."""
        for name, rate in success_rates.items():
            if (taken := self._taken.pop(name, None)) is not None:
                self._rates[taken[0]] = rate

    def metrics(self) -> dict[str, float]:
        counts = np.bincount(self._kinds(self._rates), minlength=len(KINDS))
        named = {f"curriculum/{kind}": float(count) for kind, count in zip(KINDS, counts)}
        return named | {"curriculum/unmeasured": float(np.isnan(self._rates).sum())}

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {
            "rates": _pack(self._rates),
            "rates_of_epoch": self._packed_of_epoch,
            "taken": {name: list(taken) for name, taken in self._taken.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if "rates" in state:
            # The epoch's order uses the rates at its beginning; the latest rates are for the next epoch.
            self._rates = _unpack(state["rates_of_epoch"])
            self._taken = {name: (row, epoch) for name, (row, epoch) in state["taken"].items()}
        super().load_state_dict(state)
        self._rates = _unpack(state["rates"])


def read_success_rates(path: Path, prompts: PromptSet) -> np.ndarray:
    """Return rates [prompts] float32 from the file `data.curriculum.success_rates`; NaN for prompts that it lacks.

    Raises `InputError` if it cannot be read, a rate is outside [0, 1], or it names none of the prompts.
    """
    where, rate_of = f"data.curriculum.success_rates: {path}", {}
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):  # noqa: B007 - the error message below uses it
                if not line.strip():
                    continue
                row = json.loads(line)
                rate = float(row["success_rate"])
                if not 0 <= rate <= 1:
                    raise ValueError(f"success_rate {rate:g} is outside [0, 1]")
                rate_of[str(row["prompt_id"])] = rate
    except OSError as error:
        raise InputError(f"{where} cannot be read ({error.strerror}); is the path right?") from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise InputError(
            f'{where}, line {number}: {error!r}; each line is {{"prompt_id": "gsm8k:17", "success_rate": 0.25}}'
        ) from error
    rows = prompts.rows_of(list(rate_of))
    if not (rows >= 0).any():
        own_id, asked = prompts[0].id, next(iter(rate_of), "")
        raise InputError(f"{where} names no prompt of data.train: it has {asked!r}, the data {own_id!r}; same `name`?")
    rates = np.full(len(prompts), np.nan, dtype=np.float32)
    rates[rows[rows >= 0]] = np.array(list(rate_of.values()), dtype=np.float32)[rows >= 0]
    return rates


def _pack(rates: np.ndarray) -> str:
    return base64.b64encode(zlib.compress(rates.tobytes(), _FASTEST)).decode("ascii")


def _unpack(packed: str) -> np.ndarray:
    return np.frombuffer(zlib.decompress(base64.b64decode(packed)), dtype=np.float32).copy()
