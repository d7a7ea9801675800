"""`batch.oversample`: more groups are asked for than a step learns from, and the first that are complete are taken.

Short responses are complete first. With `abort` the rest is thrown away, so that what is learned from is biased towards
short responses. With `carry_over` every group is learned from in its own step or in the next one: what was carried over
is waited for, whatever its length, and comes first. Its weights are then at most `max_staleness` steps old, because
batches run only `max_staleness` - 1 steps ahead.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from megatron_rl.config import Recipe
from megatron_rl.config.sections import OversampleConfig
from megatron_rl.data import MixedSampler, PromptSampler
from megatron_rl.rollout import Arrival, Generator, LegCounts
from megatron_rl.run.lookahead import Begun, Lookahead, OverlappingGenerator
from megatron_rl.types import Group

_SAVED = "rollout/oversample/wait_saved_s"


@dataclass(frozen=True)
class _Ready:
    """A group that may be learned from, and where its prompt was begun."""

    begun: Begun
    place: int
    group: Group
    counts: LegCounts | None


class Oversampling(Lookahead):
    """The prompts of a run in the order of its steps, each step with `factor` times as many groups as it learns from.

    A step calls `open`, then `arrivals` and `keep` until `is_filled`, then `close`. Every rank calls them and gets the
    same groups in the same order. ``num_prompts``: groups that a step learns from.
    """

    def __init__(
        self,
        prompts: PromptSampler | MixedSampler,
        generator: OverlappingGenerator,
        config: OversampleConfig,
        *,
        num_prompts: int,
        num_samples: int,
        max_staleness: int,
        num_steps: int,
    ) -> None:
        super().__init__(
            prompts,
            generator,
            num_prompts=num_prompts,
            num_samples=num_samples,
            max_staleness=max_staleness,
            num_steps=num_steps,
        )
        self._config, self._carries = config, config.rest == "carry_over"
        self._step = 0
        self._arrived: list[Arrival] = []  # returned by the generator in this step, not yet judged
        self._ready: list[_Ready] = []  # in the order of completion
        self._closed_at: float | None = None  # clock at which the latest batch was filled
        self._metrics: dict[str, float] = {}

    # ---------------------------------------------------------------- one step

    def open(self, step: int, policy_version: int) -> None:
        """Request what is missing of the groups of ``step``."""
        self._step = step
        self._versions.setdefault(step, policy_version)
        self._fill(step, policy_version, first=step)
        self._metrics = {"rollout/oversample/asked": float(self._num_open(step))}

    def refill(self, policy_version: int) -> None:
        """Request further groups in place of those that were left out: `factor` times as many as are missing."""
        num_asked = self._config.num_asked(self._num_prompts - len(self._ready))
        self._request(num_asked, self._step, policy_version)
        self._metrics["rollout/oversample/asked"] += num_asked

    @property
    def is_filled(self) -> bool:
        """Whether enough groups are there, all that were carried over among them."""
        carried_over = self._num_open(self._step - 1)
        there = sum(ready.begun.step < self._step for ready in self._ready)
        return len(self._ready) >= self._num_prompts and there == carried_over

    def arrivals(self) -> list[Group]:
        """Groups that have become complete, in this order; waits for one. Empty where none is under way."""
        tickets = [begun.ticket for begun in self._up_to(self._step)]
        self._arrived = self._generator.completed(tickets)
        return [arrival.group for arrival in self._arrived]

    def keep(self, informative: list[Group]) -> None:
        """Say which of the latest `arrivals` may be learned from; the others are left out for good."""
        kept, now = {id(group) for group in informative}, time.perf_counter()
        for arrival in self._arrived:
            begun = next(item for item in self._begun if item.ticket is arrival.ticket)
            if id(arrival.group) in kept:
                self._ready.append(_Ready(begun, arrival.place, arrival.group, arrival.counts))
            else:
                begun.settled.add(arrival.place)
            if begun.step < self._step and self._closed_at is not None:
                saved = max(0.0, now - arrival.age_s - self._closed_at)
                self._metrics[_SAVED] = max(saved, self._metrics.get(_SAVED, 0.0))
        self._arrived = []

    def close(self) -> tuple[list[Group], dict[str, float]]:
        """The groups to learn from, in the order of their prompts, and `rollout/oversample/*`.

        What is left goes to the next step or is cancelled, as `batch.oversample.rest` says. At the last step of the run
        it is cancelled, and stays in `state_dict` where it would have been carried over.
        """
        self._closed_at = time.perf_counter()
        ready = sorted(self._ready, key=lambda item: item.begun.step == self._step)  # carried over first; stable
        kept, over = ready[: self._num_prompts], ready[self._num_prompts :]
        order = {id(begun): number for number, begun in enumerate(self._begun)}
        kept.sort(key=lambda item: (order[id(item.begun)], item.place))
        for item in kept:
            item.begun.settled.add(item.place)
        num_left, goes_on = self._num_open(self._step), self._carries and self._step < self._num_steps - 1
        self._metrics |= {
            "rollout/oversample/kept": float(len(kept)),
            "rollout/oversample/carried": float(num_left if goes_on else 0),
            "rollout/oversample/aborted": float(0 if goes_on else num_left),
            "rollout/oversample/aborted_tokens": float(0 if goes_on else self._cancel(over)),
            **_mean_length("rollout/oversample/length_first", [r for r in kept if r.begun.step == self._step]),
            **_mean_length("rollout/oversample/length_carried", [r for r in kept if r.begun.step < self._step]),
            **_leg_metrics(kept),
        }
        self._ready = over if goes_on else []
        self._begun = [begun for begun in self._begun if begun.num_open]
        return [item.group for item in kept], self._metrics

    def look_ahead(self, step: int, policy_version: int) -> None:
        """Begin the groups of the steps after ``step``. Carrying over takes one of the steps of `max_staleness`."""
        last = min(step + self._max_staleness - self._carries, self._num_steps - 1)
        for ahead in range(step + 1, last + 1):
            self._fill(ahead, policy_version, first=step + 1)

    # ---------------------------------------------------------------- parts

    def _fill(self, step: int, policy_version: int, first: int) -> None:
        """Request all that is to be under way for the steps up to ``step``, of which ``first`` is the next to learn."""
        for begun in self._up_to(step):
            if begun.ticket is None:
                begun.ticket = self._begin(begun, policy_version)
        num_asked = self._config.num_asked(self._num_prompts)
        of_a_later_step = self._num_prompts if self._carries else num_asked
        missing = num_asked + (step - first) * of_a_later_step - self._num_open(step)
        if missing > 0:
            self._request(missing, step, policy_version)

    def _request(self, num_prompts: int, step: int, policy_version: int) -> None:
        begun = Begun(step, self._take(num_prompts, step))
        begun.ticket = self._begin(begun, policy_version)
        self._begun.insert(len(self._up_to(step)), begun)

    def _share_a_batch(self, earlier: int, step: int) -> bool:
        return earlier <= step  # groups that were carried over come first

    def _cancel(self, over: list[_Ready]) -> int:
        """End what is left of this step. Returns the tokens of complete responses that are lost by it."""
        tokens = sum(rollout.length for item in over for rollout in item.group.rollouts)
        for begun in self._up_to(self._step):
            tokens += self._generator.cancel(begun.ticket)
            begun.ticket = None
        if not self._carries:
            self._begun = [begun for begun in self._begun if begun.step > self._step]
        return tokens

    def _up_to(self, step: int) -> list[Begun]:
        return [begun for begun in self._begun if begun.step <= step]

    def _num_open(self, step: int) -> int:
        return sum(begun.num_open for begun in self._up_to(step))


def _mean_length(name: str, ready: list[_Ready]) -> dict[str, float]:
    lengths = [rollout.length for item in ready for rollout in item.group.rollouts]
    return {name: sum(lengths) / len(lengths)} if lengths else {}


def _leg_metrics(kept: list[_Ready]) -> dict[str, float]:
    """How updates met the responses that are learned from; empty where none meets responses under way."""
    counts = [item.counts for item in kept if item.counts is not None]
    return sum(counts, LegCounts()).metrics(sum(len(item.group.rollouts) for item in kept)) if counts else {}


def make_lookahead(recipe: Recipe, prompts: PromptSampler | MixedSampler, generator: Generator) -> Lookahead:
    """What samples the batches of ``recipe``."""
    batch, rollout = recipe.batch, recipe.rollout
    shared = {
        "num_samples": rollout.num_samples,
        "max_staleness": rollout.max_staleness,
        "num_steps": recipe.num_steps,
    }
    if batch.oversample is not None:
        return Oversampling(prompts, generator, batch.oversample, num_prompts=batch.prompts, **shared)
    return Lookahead(prompts, generator, num_prompts=batch.prompts_of_a_round, refills=batch.filter_groups, **shared)
