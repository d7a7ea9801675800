"""Which responses are asked for when: `run.lookahead` and `run.oversampling` on simulated servers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from megatron_rl.plan.fleet import Fleet, Prompt, Response
from megatron_rl.plan.lengths import Lengths


@dataclass(frozen=True)
class Asking:
    """What a step asks for and learns from."""

    num_prompts: int  # that a step learns from
    num_samples: int
    prompt_tokens: float
    factor: float = 1.0  # prompts sampled over those learned from: refilled groups, or batch.oversample.factor
    rest: Literal["carry_over", "abort"] | None = None  # batch.oversample.rest; None: a step waits for all it asked for
    refills: bool = False  # batches are begun ahead once the step's own is complete: batch.filter_groups

    @property
    def num_asked(self) -> int:
        return math.ceil(round(self.factor * self.num_prompts, 9))


class Ahead:
    """Batches in their order, all of each waited for, begun up to ``max_staleness`` steps ahead.

    Of the prompts of a batch, as many as a step learns from are learned from: those complete first.
    """

    def __init__(self, asking: Asking, fleet: Fleet, lengths: Lengths, max_staleness: int, num_steps: int) -> None:
        self._asking, self._fleet, self._lengths = asking, fleet, lengths
        self._max_staleness, self._last_step = max_staleness, num_steps - 1
        self._begun: dict[int, list[Prompt]] = {}
        self.given_up = 0.0  # response tokens that nobody learned from

    def sample(self, step: int) -> list[Prompt]:
        """Run the servers until the batch of ``step`` is complete; what is learned from."""
        self._begin(step)
        if not self._asking.refills:
            self._look_ahead(step)
        batch = self._begun.pop(step)
        self._wait_for(batch, len(batch))
        if self._asking.refills:
            self._look_ahead(step)
        batch.sort(key=lambda prompt: prompt.place)
        taken = batch[: self._asking.num_prompts]
        self._give_up(batch[len(taken) :])
        return taken

    def _look_ahead(self, step: int) -> None:
        for ahead in range(step + 1, min(step + self._max_staleness, self._last_step) + 1):
            self._begin(ahead)

    def _begin(self, step: int) -> None:
        if step not in self._begun:
            self._begun[step] = self._ask(self._asking.num_asked)

    def _ask(self, num_prompts: int) -> list[Prompt]:
        batch = []
        for row in self._lengths.draw(num_prompts, self._asking.num_samples).tolist():
            prompt = Prompt(self._asking.prompt_tokens, len(row))
            prompt.responses = [Response(prompt, length) for length in row]
            batch.append(prompt)
        self._fleet.ask(batch)
        return batch

    def _wait_for(self, prompts: list[Prompt], number: int) -> None:
        """Until ``number`` of ``prompts`` are complete; looks again when as many have become so as are missing."""
        while missing := max(0, number - sum(prompt.is_complete for prompt in prompts)):
            enough = self._fleet.num_complete + missing
            self._fleet.run(stop=lambda enough=enough: self._fleet.num_complete >= enough)

    def _give_up(self, prompts: list[Prompt]) -> None:
        open_ones = [prompt for prompt in prompts if not prompt.is_complete]
        if open_ones:
            self._fleet.drop(open_ones)
        self.given_up += sum(sum(prompt.sampled.values()) for prompt in prompts)


class Oversampled(Ahead):
    """More prompts are under way than a step learns from, and it takes those that are complete first."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        self._carries = self._asking.rest == "carry_over"
        self._under_way: list[tuple[int, Prompt]] = []  # with the step that they were begun for

    def sample(self, step: int) -> list[Prompt]:
        self._fill(step, first=step)
        carried = [prompt for begun, prompt in self._under_way if begun < step]
        mine = carried + [prompt for begun, prompt in self._under_way if begun == step]
        self._wait_for(carried, len(carried))
        self._wait_for(mine, self._asking.num_prompts)
        complete = sorted((prompt for prompt in mine[len(carried) :] if prompt.is_complete), key=lambda p: p.place)
        taken = (carried + complete)[: self._asking.num_prompts]
        gone = set(taken)
        if not self._carries:
            self._give_up([prompt for prompt in mine if prompt not in gone])
            gone |= set(mine)
        self._under_way = [item for item in self._under_way if item[1] not in gone]
        for ahead in range(step + 1, min(step + self._max_staleness - self._carries, self._last_step) + 1):
            self._fill(ahead, first=step + 1)
        return taken

    def _fill(self, step: int, first: int) -> None:
        """Ask for all that is to be under way for the steps up to ``step``, of which ``first`` is the next to learn."""
        each = self._asking.num_prompts if self._carries else self._asking.num_asked
        up_to = sum(begun <= step for begun, _ in self._under_way)
        missing = self._asking.num_asked + (step - first) * each - up_to
        if missing > 0:
            self._under_way += [(step, prompt) for prompt in self._ask(missing)]


def asked(asking: Asking, fleet: Fleet, lengths: Lengths, max_staleness: int, num_steps: int) -> Ahead:
    """What samples the batches of a run of ``num_steps`` steps."""
    kind = Ahead if asking.rest is None else Oversampled
    return kind(asking, fleet, lengths, max_staleness, num_steps)
