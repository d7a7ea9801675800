"""The pipeline of a recipe with rollout servers: unit costs from the plan's arithmetic, arms by simulation."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from megatron_rl.config.rollout import InFlightConfig
from megatron_rl.errors import InputError
from megatron_rl.instruments.plan import hardware as hw
from megatron_rl.instruments.plan.fleet import ServerCosts
from megatron_rl.instruments.plan.generation import Decoding, EngineMemory, prefill_costs
from megatron_rl.instruments.plan.learner import BYTES, total_parameters
from megatron_rl.instruments.plan.lengths import Lengths
from megatron_rl.instruments.plan.pipeline import Asking, Pipeline, PipelineTime, simulate
from megatron_rl.instruments.plan.timing import flops_forward, step_time, weights_seconds
from megatron_rl.instruments.plan.workload import Workload

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


def server_plan(work: Workload, engine: EngineMemory | None, lengths: Lengths, own_seconds: float) -> ServerPlan:
    """Return the simulated arms: the recipe's own, synchronous sampling, every mode of `rollout.in_flight` at the
    recipe's staleness, and `keep` with one step more.

    ``own_seconds``: this project's seconds of a step. Raises `InputError` if the recipe has no servers.
    """
    recipe = work.recipe
    if engine is None or recipe.rollout.engine != "vllm_server":
        raise InputError(
            f"--lengths simulates rollout servers, but rollout.engine is {recipe.rollout.engine}; leave it out, or add "
            "--set rollout.engine=vllm_server --set rollout.servers.count=N"
        )
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


def make_pipeline(work: Workload, engine: EngineMemory, lengths: Lengths, own_seconds: float) -> Pipeline:
    """Return the pipeline of ``work``, whose mean response is the mean of ``lengths``."""
    rollout, batch = work.recipe.rollout, work.recipe.batch
    decoding = Decoding.of(work, engine)
    publish_s, load_s, joins = _weights(work, by_files=bool(rollout.why_files))
    return Pipeline(
        costs=ServerCosts(
            slots=rollout.max_num_seqs,
            overhead=decoding.overhead,
            read=[decoding.read(running) for running in range(rollout.max_num_seqs + 1)],
            read_token=decoding.read_token,
            compute=decoding.compute,
            prefill=prefill_costs(work),
            capacity=engine.tokens,
        ),
        num_servers=rollout.servers.num_expected,
        mode=rollout.in_flight.mode,
        max_staleness=rollout.max_staleness,
        learn=_learning(work, engine, lengths, own_seconds),
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


def _learning(work: Workload, engine: EngineMemory, lengths: Lengths, own_seconds: float) -> tuple[float, float]:
    """Return learning seconds per step and per token. Attention depends on the length of a token's sequence."""
    time, sequences = step_time(work, engine), work.mean_prompt + lengths.sample()
    seen = float(np.square(sequences).sum() / sequences.sum())
    cost = work.gpu.attention_cost
    longer = flops_forward(work.architecture, 1, seen, cost)
    longer /= flops_forward(work.architecture, 1, work.mean_sequence, cost)
    passes = time.old_logprobs + time.update
    by_token = (passes - time.communication) * longer + time.communication
    return time.optimizer + time.offload + own_seconds, by_token / work.trained_tokens


def _weights(work: Workload, by_files: bool) -> tuple[float, float, bool]:
    """Return seconds of the learner alone, seconds in which servers wait, and whether the learner is busy in both."""
    model_bytes = total_parameters(work.architecture) * BYTES[work.recipe.rollout.dtype]
    if not by_files:
        gathered, handling = weights_seconds(work)
        return 0.0, max(gathered, model_bytes / (hw.LINK * work.gpu.network)) + handling, True
    return sum(weights_seconds(work)) + model_bytes / hw.DISK, model_bytes / hw.DISK, False
