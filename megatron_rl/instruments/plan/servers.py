"""The pipeline of a recipe with rollout servers: unit costs from the plan's arithmetic, arms by simulation.

The simulation is of the loop of `train` in its steady state, response by response.
The learner requests batches, waits for the one of its step, learns, and sends its weights. The effect on the servers
depends on `rollout.in_flight.mode`; docs/planning.md lists what the simulation leaves out.

`colocated_plan` simulates sampling by vLLM in the learner's processes on responses of given lengths.

Each engine samples its own share of a round (`rollout.requests.share_of`), and a round ends with its slowest engine.
The mean length alone says neither how long the last responses run nor when the cache is full.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal

import numpy as np

from megatron_rl.config.rollout import InFlightConfig
from megatron_rl.instruments.plan import hardware as hw
from megatron_rl.instruments.plan.fleet import Fleet, Prompt, Response, ServerCosts
from megatron_rl.instruments.plan.generation import Decoding, EngineMemory, prefill_costs
from megatron_rl.instruments.plan.learner import BYTES, total_parameters
from megatron_rl.instruments.plan.memory import memory_plan
from megatron_rl.instruments.plan.search import NUM_SEQUENCES, flops_forward, step_time, weights_seconds
from megatron_rl.instruments.plan.workload import Lengths, Workload

# When responses are requested: `run.lookahead` on simulated servers.


@dataclass(frozen=True)
class Asking:
    """What a step requests and learns from."""

    num_prompts: int  # prompts that a step learns from
    num_samples: int
    prompt_tokens: float
    factor: float = 1.0  # sampled over learned prompts: refilled groups, or batch.oversample.factor
    rest: Literal["carry_over", "abort"] | None = None  # batch.oversample.rest; None: a step waits for all its prompts
    refills: bool = False  # batches ahead begin only when the step's own is complete: batch.filter_groups

    @property
    def num_asked(self) -> int:
        return math.ceil(round(self.factor * self.num_prompts, 9))


class Ahead:
    """Batches in order, begun up to ``max_staleness`` steps ahead; a step waits for its complete batch.

    A step learns from the prompts of its batch that were complete first.
    """

    def __init__(self, asking: Asking, fleet: Fleet, lengths: Lengths, max_staleness: int, num_steps: int) -> None:
        self._asking, self._fleet, self._lengths = asking, fleet, lengths
        self._max_staleness, self._last_step = max_staleness, num_steps - 1
        self._begun: dict[int, list[Prompt]] = {}
        self.given_up = 0.0  # response tokens that were never learned from

    def sample(self, step: int) -> list[Prompt]:
        """Run the servers until the batch of ``step`` is complete, and return the prompts to learn from."""
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
        """Run until ``number`` of ``prompts`` are complete; check only after as many more completions."""
        while missing := max(0, number - sum(prompt.is_complete for prompt in prompts)):
            enough = self._fleet.num_complete + missing
            self._fleet.run(stop=lambda enough=enough: self._fleet.num_complete >= enough)

    def _give_up(self, prompts: list[Prompt]) -> None:
        open_ones = [prompt for prompt in prompts if not prompt.is_complete]
        if open_ones:
            self._fleet.drop(open_ones)
        self.given_up += sum(sum(prompt.sampled.values()) for prompt in prompts)


class Oversampled(Ahead):
    """Over-sampling: more prompts run than a step learns from, and it takes those that complete first."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        self._carries = self._asking.rest == "carry_over"
        self._under_way: list[tuple[int, Prompt]] = []  # (step for which it was begun, prompt)

    def sample(self, step: int) -> list[Prompt]:
        self._fill(step, first=step)
        carried = [prompt for begun, prompt in self._under_way if begun < step]
        under_way = carried + [prompt for begun, prompt in self._under_way if begun == step]
        self._wait_for(carried, len(carried))
        self._wait_for(under_way, self._asking.num_prompts)
        complete = sorted((prompt for prompt in under_way[len(carried) :] if prompt.is_complete), key=lambda p: p.place)
        taken = (carried + complete)[: self._asking.num_prompts]
        gone = set(taken)
        if not self._carries:
            self._give_up([prompt for prompt in under_way if prompt not in gone])
            gone |= set(under_way)
        self._under_way = [item for item in self._under_way if item[1] not in gone]
        for ahead in range(step + 1, min(step + self._max_staleness - self._carries, self._last_step) + 1):
            self._fill(ahead, first=step + 1)
        return taken

    def _fill(self, step: int, first: int) -> None:
        """Request the prompts of all steps up to ``step``; ``first`` is the next step to learn."""
        each = self._asking.num_prompts if self._carries else self._asking.num_asked
        up_to = sum(begun <= step for begun, _ in self._under_way)
        missing = self._asking.num_asked + (step - first) * each - up_to
        if missing > 0:
            self._under_way += [(step, prompt) for prompt in self._ask(missing)]


def asked(asking: Asking, fleet: Fleet, lengths: Lengths, max_staleness: int, num_steps: int) -> Ahead:
    """Return the sampler of batches for a run of ``num_steps`` steps."""
    kind = Ahead if asking.rest is None else Oversampled
    return kind(asking, fleet, lengths, max_staleness, num_steps)


@dataclass(frozen=True)
class Pipeline:
    """The parameters of the throughput. Lengths are in tokens."""

    costs: ServerCosts
    num_servers: int
    mode: str  # rollout.in_flight.mode: finish, abort_and_resume or keep
    max_staleness: int
    learn: tuple[float, float]  # seconds per step, and per token of a step with its prompts
    asking: Asking
    publish_s: float = 0.0  # part of a weight update during which servers continue: gathering, writing
    load_s: float = 0.0  # part of a weight update during which servers do not answer
    joins: bool = False  # the learner is busy during loading, as with weights by broadcast
    concurrency: int | None = None  # most requests in flight to one server


@dataclass(frozen=True)
class PipelineTime:
    """Means over the steps that were measured."""

    step_s: float
    tokens_per_s: float  # response tokens learned from per second
    learner_idle: float  # share of time in which it waits for a batch, or for servers to load its weights
    servers_idle: float  # share of time in which a server has nothing to do
    servers_paused: float  # share of time in which servers take weights
    servers_prefilling: float
    running: float  # mean number of decoding responses of a server
    recomputed: float  # recomputed tokens of interrupted responses, over tokens learned from
    given_up: float  # tokens never learned from, over tokens learned from
    staleness: dict[int, float]  # steps between sampling and learning weights → share of tokens


@dataclass(frozen=True)
class _Counts:
    """Sums up to one moment."""

    time: float
    tokens: float  # tokens learned from
    waited: float
    given_up: float
    idle: float
    paused: float
    prefilling: float
    slot_seconds: float
    recomputed: float


def simulate(pipeline: Pipeline, lengths: Lengths, num_steps: int, warm: int = 0, cool: int = 0) -> PipelineTime:
    """Simulate ``num_steps`` steps after ``warm`` first ones; ``cool`` more keep the servers busy to the end."""
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
        """Run to the end and return means over steps ``first`` … ``last`` − 1."""
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
        for version, number in [pair for prompt in (prompts if is_measured else ()) for pair in prompt.sampled.items()]:
            self._staleness[step - version] = self._staleness.get(step - version, 0.0) + number
        fleet.run(until=fleet.time + p.learn[0] + p.learn[1] * (tokens + repeated) + p.publish_s)
        self._hand_over(step + 1)

    def _hand_over(self, version: int) -> None:
        p, fleet, asked_at = self._p, self._fleet, self._fleet.time
        fleet.push(version, p.load_s)
        if p.joins or not p.max_staleness:
            fleet.run(stop=lambda: version in fleet.pushed)
            fleet.run(until=fleet.pushed[version])
            self._waited += fleet.time - asked_at - (p.load_s if p.joins else 0.0)

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
            staleness={steps: groups / sampled for steps, groups in sorted(self._staleness.items())},
        )


MODES = ("finish", "abort_and_resume", "keep")
MEASURED = 100_000  # number of responses to average over …
STEPS = (4, 40)  # … and limits of the number of steps


@dataclass(frozen=True)
class Arm:
    """One simulated way to run the recipe."""

    mode: str
    max_staleness: int
    is_recipes: bool
    time: PipelineTime


@dataclass(frozen=True)
class ServerPlan:
    pipeline: Pipeline  # the recipe's own
    lengths: Lengths
    arms: list[Arm]

    def as_json(self) -> dict[str, Any]:
        sampled = self.lengths.sample()
        return {
            "lengths": self.lengths.source,
            "mean_length": float(sampled.mean()),
            "num_servers": self.pipeline.num_servers,
            "learn_s": {"step": self.pipeline.learn[0], "token": self.pipeline.learn[1]},
            "weights_s": {"learner": self.pipeline.publish_s, "servers": self.pipeline.load_s},
            "arms": [asdict(arm) for arm in self.arms],
        }


def server_plan(work: Workload, engine: EngineMemory, lengths: Lengths, own_seconds: float) -> ServerPlan:
    """Return the simulated arms: the recipe's own, synchronous sampling, every mode of `rollout.in_flight` at the
    recipe's staleness, and `keep` with one step more.

    ``own_seconds``: this project's seconds of a step.
    """
    pipeline = make_pipeline(work, engine, lengths, own_seconds)
    staleness = max(1, pipeline.max_staleness)
    recipes_arm = (pipeline.mode, pipeline.max_staleness)
    arms = [("finish", 0), *((mode, staleness) for mode in MODES), ("keep", staleness + 1)]
    other_arms = [arm for arm in arms if arm != recipes_arm]
    return ServerPlan(
        pipeline,
        lengths,
        [_arm(work, pipeline, lengths, *arm, arm == recipes_arm) for arm in (recipes_arm, *other_arms)],
    )


def _arm(work: Workload, pipeline: Pipeline, lengths: Lengths, mode: str, max_staleness: int, is_recipes: bool) -> Arm:
    if not max_staleness and pipeline.asking.rest == "carry_over":
        pipeline = replace(pipeline, asking=replace(pipeline.asking, rest=None, factor=1.0))
    changes = {"max_staleness": max_staleness, "in_flight": InFlightConfig(mode=mode)}
    by_files = bool(work.recipe.rollout.model_copy(update=changes).why_files)
    publish_s, load_s, joins = _weights(work, by_files)
    pipeline = replace(
        pipeline, mode=mode, max_staleness=max_staleness, publish_s=publish_s, load_s=load_s, joins=joins
    )
    asking = pipeline.asking
    num_steps = min(max(MEASURED // (asking.num_asked * asking.num_samples), STEPS[0]), STEPS[1])
    time = simulate(pipeline, lengths.again(), num_steps, warm=2 * max_staleness + 2, cool=max_staleness)
    return Arm(mode, max_staleness, is_recipes, time)


def engine_costs(work: Workload, engine: EngineMemory) -> ServerCosts:
    """Return the unit costs of one engine of ``work``."""
    decoding, slots = Decoding.of(work, engine), work.recipe.rollout.max_num_seqs
    return ServerCosts(
        slots=slots,
        overhead=decoding.overhead,
        read=[decoding.read(running) for running in range(slots + 1)],
        read_token=decoding.read_token,
        compute=decoding.compute,
        prefill=prefill_costs(work),
        capacity=engine.tokens,
    )


def make_pipeline(work: Workload, engine: EngineMemory, lengths: Lengths, own_seconds: float) -> Pipeline:
    """Return the pipeline of ``work``, whose mean response is the mean of ``lengths``."""
    rollout, batch = work.recipe.rollout, work.recipe.batch
    publish_s, load_s, joins = _weights(work, by_files=bool(rollout.why_files))
    return Pipeline(
        costs=engine_costs(work, engine),
        num_servers=rollout.servers.num_expected,
        mode=rollout.in_flight.mode,
        max_staleness=rollout.max_staleness,
        learn=learning_seconds(work, engine, lengths, own_seconds),
        asking=Asking(
            num_prompts=batch.prompts,
            num_samples=rollout.num_samples,
            prompt_tokens=work.mean_prompt,
            factor=batch.oversample.factor if batch.oversample else work.sampled_sequences / work.recipe.num_sequences,
            rest=batch.oversample.rest if batch.oversample else None,
            refills=batch.filter_groups,
        ),
        publish_s=publish_s,
        load_s=load_s,
        joins=joins,
        concurrency=rollout.servers.concurrency,
    )


def learning_seconds(work: Workload, engine: EngineMemory, lengths: Lengths, own_seconds: float) -> tuple[float, float]:
    """Return learning seconds per step and per token. Attention depends on the length of a token's sequence."""
    time, sequences = step_time(work, engine), work.mean_prompt + lengths.sample()
    seen = float(np.square(sequences).sum() / sequences.sum())
    cost = work.gpu.attention_cost
    longer = flops_forward(work.architecture, 1, seen, cost)
    longer /= flops_forward(work.architecture, 1, work.mean_sequence, cost)
    passes = time.old_logprobs + time.scores + time.update
    by_token = (passes - time.communication) * longer + time.communication
    return time.optimizer + time.offload + time.acceptance + own_seconds, by_token / work.trained_tokens


def _weights(work: Workload, by_files: bool) -> tuple[float, float, bool]:
    """Return seconds of the learner alone, seconds in which servers wait, and whether the learner is busy in both."""
    model_bytes = total_parameters(work.architecture) * BYTES[work.recipe.rollout.dtype]
    if not by_files:
        gathered, handling = weights_seconds(work)
        return 0.0, max(gathered, model_bytes / (hw.LINK * work.gpu.network)) + handling, True
    return sum(weights_seconds(work)) + model_bytes / hw.DISK, model_bytes / hw.DISK, False


@dataclass(frozen=True)
class Generation:
    """Means over the simulated steps for one value of `rollout.max_num_seqs`."""

    max_num_seqs: int
    is_recipes: bool
    generate_s: float  # of a step: all rounds, each until its slowest engine ends
    step_s: float
    waiting: float  # share of `generate_s` in which an engine has nothing to do
    running: float  # mean number of decoding responses of an engine, over `generate_s`
    preempted: float  # tokens computed again after the cache was full, over tokens sampled


@dataclass(frozen=True)
class ColocatedPlan:
    lengths: Lengths
    num_engines: int
    arms: list[Generation]  # the recipe's first

    def as_json(self) -> dict[str, Any]:
        return {
            "lengths": self.lengths.source,
            "mean_length": float(self.lengths.sample().mean()),
            "num_engines": self.num_engines,
            "arms": [asdict(arm) for arm in self.arms],
        }


def colocated_plan(work: Workload, lengths: Lengths, own_seconds: float) -> ColocatedPlan:
    """Return the simulation of the recipe's `rollout.max_num_seqs`, and of the searched values that fit.

    ``own_seconds``: this project's seconds of a step.
    """
    recipes = work.recipe.rollout.max_num_seqs
    arms = []
    for number in (recipes, *(number for number in NUM_SEQUENCES if number != recipes)):
        other = work.with_rollout(max_num_seqs=number)
        memory = memory_plan(other)
        if memory.engine is not None and (memory.fits or number == recipes):
            arms.append(_generation(other, memory.engine, lengths, own_seconds, number == recipes))
    return ColocatedPlan(lengths, _num_engines(work), arms)


def _num_engines(work: Workload) -> int:
    return max(1, work.ranks // work.recipe.rollout.tensor_parallel)


def _generation(
    work: Workload, engine: EngineMemory, lengths: Lengths, own_seconds: float, is_recipes: bool
) -> Generation:
    costs, drawn = engine_costs(work, engine), lengths.again()
    num_steps = min(max(int(MEASURED // work.sampled_sequences), STEPS[0]), STEPS[1])
    rounds = [_round(work, costs, drawn, num) for _ in range(num_steps) for num in _prompts_of_rounds(work)]
    generate_s = sum(ended for ended, *_ in rounds) / num_steps
    busy, slots, again, tokens = (sum(values) for values in list(zip(*rounds, strict=True))[1:])
    on_engines = generate_s * num_steps * _num_engines(work)
    of_step, of_token = learning_seconds(work, engine, lengths, own_seconds)
    learn_s = of_step + of_token * work.trained_tokens + step_time(work, engine).refit
    return Generation(
        max_num_seqs=work.recipe.rollout.max_num_seqs,
        is_recipes=is_recipes,
        generate_s=generate_s,
        step_s=generate_s + learn_s,
        waiting=1 - busy / on_engines,
        running=slots / on_engines,
        preempted=again / tokens,
    )


def _prompts_of_rounds(work: Workload) -> list[int]:
    """Return the prompts of each round of sampling in a step; the last one may sample only what is missing."""
    left, each = round(work.sampled_sequences / work.recipe.rollout.num_samples), work.recipe.batch.prompts_of_a_round
    return [min(each, left - begun) for begun in range(0, left, each)]


def _round(
    work: Workload, costs: ServerCosts, lengths: Lengths, num_prompts: int
) -> tuple[float, float, float, float, float]:
    """Simulate one round. Return the seconds to its end, and sums over engines: seconds with work, seconds times
    decoding responses, tokens computed again, tokens sampled."""
    rollout, num_engines = work.recipe.rollout, _num_engines(work)
    drawn = lengths.draw(num_prompts, rollout.num_samples).ravel()  # in the order of the requests
    rows = np.arange(len(drawn)) // rollout.num_samples
    if not rollout.enable_prefix_caching:
        rows = np.arange(len(drawn))  # every response computes its prompt
    ends, slots, again = [], 0.0, 0.0
    for engine in range(num_engines):
        of_engine = slice(engine, None, num_engines)
        if not len(drawn[of_engine]):
            continue
        prompts: dict[int, Prompt] = {}
        for row, length in zip(rows[of_engine].tolist(), drawn[of_engine].tolist(), strict=True):
            prompt = prompts.setdefault(row, Prompt(work.mean_prompt, 0))
            prompt.responses.append(Response(prompt, length))
            prompt.left += 1
        fleet = Fleet(costs, 1, "finish", concurrency=len(drawn[of_engine]))
        fleet.ask(list(prompts.values()))
        ends.append(_run_to_the_end(fleet, len(prompts)))
        slots += fleet.servers[0].slot_seconds
        again += fleet.servers[0].recomputed
    return max(ends), sum(ends), slots, again, float(drawn.sum())


def _run_to_the_end(fleet: Fleet, num_prompts: int) -> float:
    return fleet.run(stop=lambda: fleet.num_complete == num_prompts)
