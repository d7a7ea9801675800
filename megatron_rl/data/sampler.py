"""The order of prompts: shuffled epochs that a checkpoint can interrupt anywhere.

`CurriculumSampler` chooses the prompts of an epoch by measured difficulty. `MixedSampler` mixes several sources.
"""

from __future__ import annotations

import base64
import json
import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from megatron_rl.config.data import CurriculumConfig, DataConfig
from megatron_rl.data.prompts import fingerprint
from megatron_rl.data.table import PromptSet
from megatron_rl.errors import InputError
from megatron_rl.types import Prompt

KINDS = ("normal", "easy", "hard")
_FASTEST = 1  # zlib's fastest level


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
