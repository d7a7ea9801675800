"""Which prompts are sampled for which step, and how far generation runs ahead of the learner.

With `rollout.max_staleness` k = 0 a batch is requested when its step begins. With k ≥ 1 the batches of the next k steps
are requested while the step's own is still being sampled, so that the engine is never without work. Where a step may
need more prompts than one batch (`batch.filter_groups`), they are requested after the step is complete, so that its
further prompts do not queue behind them. Prompts are taken from the sampler in the order of the steps, once each. A
checkpoint holds which of them were taken and not learned from, so that a resumed run requests exactly these again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from megatron_rl.config.rollout import RolloutConfig
from megatron_rl.config.sections import BatchConfig
from megatron_rl.data import MixedSampler, PromptSampler, PromptSet
from megatron_rl.errors import InputError
from megatron_rl.process.ranks import gather_objects
from megatron_rl.rollout import Generator
from megatron_rl.types import Group, Prompt


class OverlappingGenerator(Generator, Protocol):
    """A `Generator` that samples in the background. Only such a one can run ahead."""

    def begin(self, prompts: list[Prompt], num_samples: int, *, policy_version: int, step: int) -> Any:
        """As `rollout`, but return at once. What later refits do to the batch is `rollout.in_flight`'s to say."""
        ...

    def finish(self, ticket: Any) -> list[Group]:
        """Wait for the batch of ``ticket``, what `begin` returned."""
        ...


@dataclass
class Begun:
    """Prompts that were taken for a step. ``ticket``: None until they are requested from the engine."""

    step: int
    prompts: list[Prompt]
    ticket: Any = None

    def state_dict(self) -> dict[str, Any]:
        """Plain JSON values. ``occurrences`` where one is not 0."""
        state: dict[str, Any] = {"step": self.step, "prompts": [prompt.id for prompt in self.prompts]}
        if any(prompt.occurrence for prompt in self.prompts):
            state["occurrences"] = [prompt.occurrence for prompt in self.prompts]
        return state

    @classmethod
    def of(cls, state: dict[str, Any], by_id: Mapping[str, Prompt]) -> Begun:
        """From `state_dict`. Raises `KeyError` for a prompt that is not in ``by_id``."""
        names = state["prompts"]
        occurrences = state.get("occurrences", [0] * len(names))
        rows = zip(names, occurrences, strict=True)
        return cls(state["step"], [replace(by_id[name], occurrence=n) for name, n in rows])


class Lookahead:
    """Samples the batches of a run of ``num_steps`` in order, as its sections say; nothing is begun beyond."""

    def __init__(
        self,
        prompts: PromptSampler | MixedSampler,
        generator: Generator | OverlappingGenerator,
        batch: BatchConfig,
        rollout: RolloutConfig,
        num_steps: int,
    ) -> None:
        self._prompts, self._generator, self._num_steps = prompts, generator, num_steps
        self._num_prompts, self._num_samples = batch.prompts_of_a_round, rollout.num_samples
        self._max_staleness = rollout.max_staleness
        self._refills = batch.filter_groups  # a step may call `sample` again, for prompts in place of those left out
        self._begun: list[Begun] = []  # in the order of their steps
        self._next: dict[int, dict[str, int]] = {}  # step → prompt id → the lowest `Prompt.occurrence` that is left

    def sample(self, num_prompts: int, *, step: int, policy_version: int) -> list[Group]:
        """Responses to the prompts that were taken for ``step``, or to ``num_prompts`` new ones."""
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
        taken = self._prompts.take(num_prompts)
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
        places: dict[str, int] = {}
        for prompt in (prompt for item in self._begun if item.step == step for prompt in item.prompts):
            places[prompt.id] = max(places.get(prompt.id, 0), prompt.occurrence + 1)
        return places

    def _begin(self, begun: Begun, policy_version: int) -> Any:
        return self._generator.begin(begun.prompts, self._num_samples, policy_version=policy_version, step=begun.step)

    def state_dict(self) -> list[dict[str, Any]]:
        """What was taken from the sampler and not yet learned from; plain JSON values."""
        return [begun.state_dict() for begun in self._begun]

    def load_state_dict(self, state: list[dict[str, Any]], prompts: PromptSet) -> None:
        """Restore what a checkpoint had taken for later steps. ``prompts``: all, to find them by their ids."""
        by_id = prompts.named(name for item in state for name in item["prompts"]) if state else {}
        try:
            self._begun = [Begun.of(item, by_id) for item in state]
        except KeyError as error:
            raise InputError(f"the checkpoint had begun with prompt {error}, which is not in data.train") from error
        self._next = {item.step: self._occurrences_left(item.step) for item in self._begun}


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
