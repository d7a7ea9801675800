"""Which prompts are sampled for which step, and how far generation runs ahead of the learner.

With `rollout.max_staleness` k = 0 a batch is requested when its step begins. With k ≥ 1 the batches of the next k steps
are requested while the step's own is still being sampled, so that the engine is never without work. Where a step may
need more prompts than one batch (`batch.filter_groups`), they are requested after the step is complete, so that its
further prompts do not queue behind them. Prompts are taken from the sampler in the order of the steps, once each. A
checkpoint holds which of them were taken and not learned from, so that a resumed run requests exactly these again.
With `batch.oversample` more groups are asked for than a step learns from, and the first that are complete are taken.
Short responses are complete first. With `abort` the rest is thrown away, so that what is learned from is biased towards
short responses. With `carry_over` every group is learned from in its own step or in the next one: what was carried over
is waited for, whatever its length, and comes first. Its weights are then at most `max_staleness` steps old, because
batches run only `max_staleness` - 1 steps ahead.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from megatron_rl.config.rollout import RolloutConfig
from megatron_rl.config.sections import BatchConfig, OversampleConfig
from megatron_rl.data import MixedSampler, PromptSampler, PromptSet
from megatron_rl.errors import InputError
from megatron_rl.process.ranks import gather_objects
from megatron_rl.rollout import Arrival, Generator, LegCounts, RolloutError
from megatron_rl.types import Group, Prompt


class OverlappingGenerator(Generator, Protocol):
    """A `Generator` that samples in the background. Only such a one can run ahead."""

    def begin(self, prompts: list[Prompt], num_samples: int, *, policy_version: int, step: int) -> Any:
        """As `rollout`, but return at once. What later refits do to the batch is `rollout.in_flight`'s to say."""
        ...

    def finish(self, ticket: Any) -> list[Group]:
        """Wait for the batch of ``ticket``, what `begin` returned."""
        ...

    def completed(self, tickets: list[Any]) -> list[Arrival]:
        """Complete groups of ``tickets`` that this has not returned yet, in the order of their completion, the same on
        every rank. Waits until there is one; empty where all were returned."""
        ...

    def cancel(self, ticket: Any) -> int:
        """End the responses of ``ticket`` that are under way. Returns the tokens of complete responses whose groups
        `completed` has not returned."""
        ...


@dataclass
class Begun:
    """Prompts that were taken for a step. ``ticket``: None until they are requested from the engine."""

    step: int
    prompts: list[Prompt]
    ticket: Any = None
    settled: set[int] = field(default_factory=set)  # places of prompts that were learned from or left out

    @property
    def num_open(self) -> int:
        return len(self.prompts) - len(self.settled)

    @property
    def open_prompts(self) -> list[Prompt]:
        return [prompt for place, prompt in enumerate(self.prompts) if place not in self.settled]

    def state_dict(self) -> dict[str, Any]:
        """What is open; plain JSON values. ``occurrences`` where one is not 0."""
        left = self.open_prompts
        state: dict[str, Any] = {"step": self.step, "prompts": [prompt.id for prompt in left]}
        if any(prompt.occurrence for prompt in left):
            state["occurrences"] = [prompt.occurrence for prompt in left]
        return state

    @classmethod
    def of(cls, state: dict[str, Any], by_id: Mapping[str, Prompt]) -> Begun:
        """From `state_dict`. Raises `KeyError` for a prompt that is not in ``by_id``."""
        names = state["prompts"]
        occurrences = state.get("occurrences", [0] * len(names))
        rows = zip(names, occurrences, strict=True)
        return cls(state["step"], [replace(by_id[name], occurrence=n) for name, n in rows])


class Lookahead:
    """Samples the batches of a run in order. ``num_steps``: of the run; nothing is begun beyond.

    ``refills``: a step may call `sample` again for prompts in place of those that were filtered out.
    """

    def __init__(
        self,
        prompts: PromptSampler | MixedSampler,
        generator: Generator | OverlappingGenerator,
        *,
        num_prompts: int,
        num_samples: int,
        max_staleness: int,
        num_steps: int,
        refills: bool = False,
    ) -> None:
        self._prompts, self._generator = prompts, generator
        self._num_prompts, self._num_samples = num_prompts, num_samples
        self._max_staleness, self._num_steps, self._refills = max_staleness, num_steps, refills
        self._begun: list[Begun] = []  # in the order of their steps
        self._owed: list[Prompt] = []  # taken for steps that are over, by a run that carried groups over
        self._versions: dict[int, int] = {}  # by step: of the learner's weights when it began
        self._next: dict[int, dict[str, int]] = {}  # step → prompt id → the lowest `Prompt.occurrence` that is left

    def sample(self, num_prompts: int, *, step: int, policy_version: int) -> list[Group]:
        """Responses to the prompts that were taken for ``step``, or to ``num_prompts`` new ones."""
        self._versions.setdefault(step, policy_version)
        while self._begun and self._begun[0].step < step:
            self._owed += self._begun.pop(0).prompts
        begun = self._begun.pop(0) if self._begun and self._begun[0].step == step else None
        if begun is None:
            begun = Begun(step, self._take(num_prompts, step))
        if not self._max_staleness:
            return self._generator.rollout(begun.prompts, self._num_samples, policy_version=policy_version, step=step)
        if begun.ticket is None:
            begun.ticket = self._begin(begun, policy_version)
        if not self._refills:
            self.look_ahead(step, policy_version)
        return self._generator.finish(begun.ticket)

    def check_staleness(self, step: int, staleness: dict[str, float]) -> None:
        """Raise `RolloutError` where a token of ``step`` is older than its batch can be.

        ``staleness``: `staleness_metrics` of the step, the same on every rank.
        """
        first = max(step - self._max_staleness, min(self._versions))
        limit = self._versions[step] - self._versions[first]
        self._versions = {number: version for number, version in self._versions.items() if number >= first}
        if staleness.get("rollout/staleness_max", 0) > limit:
            raise RolloutError(
                f"step {step}: a token was sampled by weights {staleness['rollout/staleness_max']:.0f} optimizer steps "
                f"before the learner's; rollout.max_staleness {self._max_staleness} allows {limit}: those of step "
                f"{first} or later"
            )

    def look_ahead(self, step: int, policy_version: int) -> None:
        """Begin the batches of the steps after ``step``, as many as `max_staleness` allows, from these weights."""
        for ahead in range(step + 1, min(step + self._max_staleness, self._num_steps - 1) + 1):
            begun = next((item for item in self._begun if item.step == ahead), None)
            if begun is None:
                begun = Begun(ahead, self._take(self._num_prompts, ahead))
                self._begun.append(begun)
            if begun.ticket is None:
                begun.ticket = self._begin(begun, policy_version)

    def _take(self, num_prompts: int, step: int) -> list[Prompt]:
        """The next prompts, for ``step``. Each says how often it was taken for the same step before."""
        first, self._owed = self._owed[:num_prompts], self._owed[num_prompts:]
        taken = first + self._prompts.take(num_prompts - len(first))
        following = self._next.setdefault(step, self._occurrences_left(step))
        self._next = {number: ready for number, ready in self._next.items() if number >= step - self._max_staleness}
        numbered = []
        for prompt in taken:
            occurrence = following.get(prompt.id, 0)
            following[prompt.id] = occurrence + 1
            numbered.append(replace(prompt, occurrence=occurrence) if occurrence or prompt.occurrence else prompt)
        return numbered

    def _occurrences_left(self, step: int) -> dict[str, int]:
        """Prompt id → the lowest `Prompt.occurrence` that no prompt begun for ``step`` has."""
        begun = [prompt for item in self._begun if self._share_a_batch(item.step, step) for prompt in item.open_prompts]
        return _following(begun)

    def _share_a_batch(self, earlier: int, step: int) -> bool:
        """Whether a batch can hold groups that were begun for both steps."""
        return earlier == step

    def _begin(self, begun: Begun, policy_version: int) -> Any:
        return self._generator.begin(begun.prompts, self._num_samples, policy_version=policy_version, step=begun.step)

    def state_dict(self) -> list[dict[str, Any]]:
        """What was taken from the sampler and not yet learned from; plain JSON values."""
        owed = [Begun(0, self._owed)] if self._owed else []  # step 0 is over for whoever resumes
        return [begun.state_dict() for begun in owed + self._begun]

    def load_state_dict(self, state: list[dict[str, Any]], prompts: PromptSet) -> None:
        """Restore what a checkpoint had taken for later steps. ``prompts``: all, to find them by their ids."""
        by_id = prompts.named(name for item in state for name in item["prompts"]) if state else {}
        try:
            self._begun = [Begun.of(item, by_id) for item in state]
        except KeyError as error:
            raise InputError(f"the checkpoint had begun with prompt {error}, which is not in data.train") from error
        self._next = {item.step: self._occurrences_left(item.step) for item in self._begun}


def _following(prompts: list[Prompt]) -> dict[str, int]:
    """Prompt id → the lowest occurrence above all that ``prompts`` have."""
    places: dict[str, int] = {}
    for prompt in prompts:
        places[prompt.id] = max(places.get(prompt.id, 0), prompt.occurrence + 1)
    return places


def staleness_metrics(groups: list[Group], num_updates: int) -> dict[str, float]:
    """`rollout/staleness_*`: optimizer steps between the weights that tokens were sampled from and ``num_updates``.

    Over the responses of all ranks. Collective.
    """
    versions = [r.policy_versions for group in groups for r in group.rollouts if r.policy_versions is not None]
    staleness = num_updates - np.concatenate([*versions, np.empty(0, np.int64)])
    shares = gather_objects((int(staleness.sum()), staleness.size, int(staleness.max(initial=-1))))
    totals, counts, largest = zip(*shares)
    if not sum(counts):
        return {}
    return {"rollout/staleness_mean": sum(totals) / sum(counts), "rollout/staleness_max": float(max(largest))}


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


def make_lookahead(
    batch: BatchConfig,
    rollout: RolloutConfig,
    num_steps: int,
    prompts: PromptSampler | MixedSampler,
    generator: Generator,
) -> Lookahead:
    """What samples the batches of a run of ``num_steps`` as its sections say."""
    shared = {
        "num_samples": rollout.num_samples,
        "max_staleness": rollout.max_staleness,
        "num_steps": num_steps,
    }
    if batch.oversample is not None:
        return Oversampling(prompts, generator, batch.oversample, num_prompts=batch.prompts, **shared)
    return Lookahead(prompts, generator, num_prompts=batch.prompts_of_a_round, refills=batch.filter_groups, **shared)
