"""Simulates sampling by vLLM in the learner's processes on responses of given lengths.

Each engine samples its own share of a round (`rollout.requests.share_of`), and a round ends with its slowest engine.
The mean length alone says neither how long the last responses run nor when the cache is full.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from megatron_rl.instruments.plan.fleet import Fleet, Prompt, Response, ServerCosts
from megatron_rl.instruments.plan.generation import EngineMemory
from megatron_rl.instruments.plan.memory import memory_plan
from megatron_rl.instruments.plan.search import NUM_SEQUENCES, step_time
from megatron_rl.instruments.plan.servers import MEASURED, STEPS, engine_costs, learning_seconds
from megatron_rl.instruments.plan.workload import Lengths, Workload


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
            arms.append(_arm(other, memory.engine, lengths, own_seconds, number == recipes))
    return ColocatedPlan(lengths, _num_engines(work), arms)


def _num_engines(work: Workload) -> int:
    return max(1, work.ranks // work.recipe.rollout.tensor_parallel)


def _arm(work: Workload, engine: EngineMemory, lengths: Lengths, own_seconds: float, is_recipes: bool) -> Generation:
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
