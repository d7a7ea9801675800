"""Steady state of servers and learner: the loop of `train` on simulated servers, response by response.

The learner asks for batches (`plan.asking`), waits for the step's own, learns, and hands its weights over. What that
does to the servers depends on `rollout.in_flight.mode`; see docs/planning.md for what is left out.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from megatron_rl.plan.asking import Asking, asked
from megatron_rl.plan.fleet import Fleet, ServerCosts
from megatron_rl.plan.lengths import Lengths


@dataclass(frozen=True)
class Pipeline:
    """What the throughput depends on. Lengths are tokens."""

    costs: ServerCosts
    num_servers: int
    mode: str  # rollout.in_flight.mode: finish, abort_and_resume or keep
    max_staleness: int
    learn: tuple[float, float]  # seconds of a step, and of each of its tokens, prompts included
    asking: Asking
    publish_s: float = 0.0  # of a weight update in which the learner works and servers go on: gathering, writing
    load_s: float = 0.0  # of a weight update in which servers answer nothing
    joins: bool = False  # the learner takes part in the loading: weights by broadcast
    concurrency: int | None = None  # most requests in flight to one server


@dataclass(frozen=True)
class PipelineTime:
    """Means over the steps that were measured."""

    step_s: float
    tokens_per_s: float  # response tokens learned from
    learner_idle: float  # share of time: it waits for a batch, or for servers to take its weights
    servers_idle: float  # share of time in which a server has nothing to do
    servers_paused: float  # share of time in which servers take weights
    servers_prefilling: float
    running: float  # responses of a server that decode, on average over time
    recomputed: float  # tokens of cut responses that were computed again, over tokens learned from
    given_up: float  # tokens that nobody learns from, over tokens learned from
    staleness: dict[int, float]  # steps between a token's weights and those that learn from it → share of tokens

    @property
    def mean_staleness(self) -> float:
        return sum(steps * share for steps, share in self.staleness.items())


@dataclass(frozen=True)
class _Counts:
    """Sums until one moment."""

    time: float
    tokens: float  # learned from
    waited: float
    given_up: float
    idle: float
    paused: float
    prefilling: float
    slot_seconds: float
    recomputed: float


def simulate(pipeline: Pipeline, lengths: Lengths, num_steps: int, warm: int = 0, cool: int = 0) -> PipelineTime:
    """``num_steps`` steps after the first ``warm``; ``cool`` more follow, so that servers work ahead to the end."""
    return _Run(pipeline, lengths, warm + num_steps + cool).steps(warm, warm + num_steps)


class _Run:
    def __init__(self, pipeline: Pipeline, lengths: Lengths, num_steps: int) -> None:
        self._p, self._num_steps = pipeline, num_steps
        mode = pipeline.mode if pipeline.max_staleness else "finish"
        self._fleet = Fleet(pipeline.costs, pipeline.num_servers, mode, pipeline.concurrency)
        self._asked = asked(pipeline.asking, self._fleet, lengths, pipeline.max_staleness, num_steps)
        self._tokens = self._waited = 0.0
        self._staleness: dict[int, float] = {}

    def steps(self, first: int, last: int) -> PipelineTime:
        """Run to the end; means over steps ``first`` … ``last`` − 1."""
        before = after = self._counts()
        for step in range(self._num_steps):
            self._step(step, is_measured=first <= step < last)
            if step + 1 == first:
                before = self._counts()
            if step + 1 == last:
                after = self._counts()
        return self._means(before, after, last - first)

    def _step(self, step: int, is_measured: bool) -> None:
        p, fleet, begun = self._p, self._fleet, self._fleet.time
        prompts = self._asked.sample(step)
        self._waited += fleet.time - begun
        tokens = sum(response.length for prompt in prompts for response in prompt.responses)
        repeated = sum(prompt.tokens * len(prompt.responses) for prompt in prompts)
        self._tokens += tokens
        for version, number in [pair for prompt in prompts * is_measured for pair in prompt.sampled.items()]:
            self._staleness[step - version] = self._staleness.get(step - version, 0.0) + number
        fleet.run(until=fleet.time + p.learn[0] + p.learn[1] * (tokens + repeated) + p.publish_s)
        self._hand_over(step + 1)

    def _hand_over(self, version: int) -> None:
        p, fleet, asked_at = self._p, self._fleet, self._fleet.time
        fleet.push(version, p.load_s)
        if p.joins or not p.max_staleness:
            fleet.run(stop=lambda: version in fleet.pushed)
            fleet.run(until=fleet.pushed[version])
            self._waited += fleet.time - asked_at - p.load_s * p.joins

    def _counts(self) -> _Counts:
        fleet = self._fleet
        for server in fleet.servers:
            server.advance(fleet.time)
        names = ("idle", "paused", "prefilling", "slot_seconds", "recomputed")
        sums = {name: sum(getattr(server, name) for server in fleet.servers) for name in names}
        return _Counts(fleet.time, self._tokens, self._waited, self._asked.given_up, **sums)

    def _means(self, before: _Counts, after: _Counts, num_steps: int) -> PipelineTime:
        grown = _Counts(*(getattr(after, f.name) - getattr(before, f.name) for f in fields(_Counts)))
        on_servers, sampled = grown.time * self._p.num_servers, sum(self._staleness.values())
        return PipelineTime(
            step_s=grown.time / num_steps,
            tokens_per_s=grown.tokens / grown.time,
            learner_idle=grown.waited / grown.time,
            servers_idle=grown.idle / on_servers,
            servers_paused=grown.paused / on_servers,
            servers_prefilling=grown.prefilling / on_servers,
            running=grown.slot_seconds / on_servers,
            recomputed=grown.recomputed / grown.tokens,
            given_up=grown.given_up / grown.tokens,
            staleness={steps: found / sampled for steps, found in sorted(self._staleness.items())},
        )
