"""A curriculum by measured difficulty: an epoch visits a share of the easy and of the hard prompts, all others once.

A prompt's success rate is the share of its responses that was solved when it was last sampled. An epoch's visits are
drawn at its beginning from the rates of that moment. A prompt comes at most once an epoch, so that its rate is the
latest when it comes; batches that run ahead of the learner are the exception.

The names of the thresholds and fractions are prime-rl's. [K15 §2.3.4] has both ideas: easier tasks first, and more
visits for prompts that are rarely solved.
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
_FASTEST = 1  # of zlib's levels


class CurriculumSampler(PromptSampler):
    """The walk of `PromptSampler` over the prompts that each epoch visits. See `CurriculumConfig`.

    ``rates``: [prompts] float32, share of solved responses; NaN: not measured. At a million prompts an epoch's order
    takes some 0.1 s, a measurement of a batch a few lookups, and a state some megabytes.
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
        self._taken: dict[str, tuple[int, int]] = {}  # prompt id → its row and the epoch, until it is measured
        super().__init__(prompts, seed=seed, shuffle=shuffle)

    def _make_order(self) -> np.ndarray:
        self._begin_epoch()
        return super()._make_order()

    def _begin_epoch(self) -> None:
        """Fix the rates that this epoch goes by. What was taken two epochs ago and never measured is forgotten."""
        self._rates_of_epoch = self._rates.copy()
        self._packed_of_epoch = _pack(self._rates_of_epoch)
        self._taken = {name: found for name, found in self._taken.items() if found[1] >= self.epoch - 1}

    def _visits(self) -> np.ndarray:
        """This epoch's prompts, in their order; sets ``_weights``, the factor of each kind with `unbiased`."""
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
        """[prompts] int8, numbers in `KINDS`."""
        easy, hard = rates >= self._config.easy_threshold, rates <= self._config.hard_threshold
        return easy.astype(np.int8) + 2 * hard.astype(np.int8)

    def _prompt(self, row: int) -> Prompt:
        prompt = super()._prompt(row)
        self._taken[prompt.id] = row, self.epoch
        weight = self._weights[int(self._kinds(self._rates_of_epoch[row : row + 1])[0])]
        return prompt if weight == 1.0 else replace(prompt, weight=weight)

    def observe(self, success_rates: Mapping[str, float]) -> None:
        """Note the share of solved responses of prompts that were taken, by id. Others are no prompts of this set."""
        for name, rate in success_rates.items():
            if (found := self._taken.pop(name, None)) is not None:
                self._rates[found[0]] = rate

    def metrics(self) -> dict[str, float]:
        counts = np.bincount(self._kinds(self._rates), minlength=len(KINDS))
        named = {f"curriculum/{kind}": float(count) for kind, count in zip(KINDS, counts)}
        return named | {"curriculum/unmeasured": float(np.isnan(self._rates).sum())}

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {
            "rates": _pack(self._rates),
            "rates_of_epoch": self._packed_of_epoch,
            "taken": {name: list(found) for name, found in self._taken.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if "rates" in state:
            # The order of the epoch is made of the rates at its beginning; the latest are for the next one.
            self._rates = _unpack(state["rates_of_epoch"])
            self._taken = {name: (row, epoch) for name, (row, epoch) in state["taken"].items()}
        super().load_state_dict(state)
        self._rates = _unpack(state["rates"])


def read_success_rates(path: Path, prompts: PromptSet) -> np.ndarray:
    """[prompts] float32 from a file of `data.curriculum.success_rates`; NaN where it does not name a prompt.

    Raises `InputError` where it cannot be read, a rate is outside [0, 1], or it names none of the prompts.
    """
    where, found = f"data.curriculum.success_rates: {path}", {}
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):  # noqa: B007 - the error below names it
                if not line.strip():
                    continue
                row = json.loads(line)
                rate = float(row["success_rate"])
                if not 0 <= rate <= 1:
                    raise ValueError(f"success_rate {rate:g} is outside [0, 1]")
                found[str(row["prompt_id"])] = rate
    except OSError as error:
        raise InputError(f"{where} cannot be read ({error.strerror}); is the path right?") from error
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(
            f'{where}, line {number}: {error!r}; each line is {{"prompt_id": "gsm8k:17", "success_rate": 0.25}}'
        ) from error
    rows = prompts.rows_of(list(found))
    if not (rows >= 0).any():
        known, asked = prompts[0].id, next(iter(found), "")
        raise InputError(f"{where} names no prompt of data.train: it has {asked!r}, the data {known!r}; same `name`?")
    rates = np.full(len(prompts), np.nan, dtype=np.float32)
    rates[rows[rows >= 0]] = np.array(list(found.values()), dtype=np.float32)[rows >= 0]
    return rates


def _pack(rates: np.ndarray) -> str:
    return base64.b64encode(zlib.compress(rates.tobytes(), _FASTEST)).decode("ascii")


def _unpack(packed: str) -> np.ndarray:
    return np.frombuffer(zlib.decompress(base64.b64decode(packed)), dtype=np.float32).copy()
