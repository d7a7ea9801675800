"""Simulated sampling in the learner's processes: closed forms, and what a spread of lengths costs."""

from __future__ import annotations

import json

import numpy as np
import pytest

from megatron_rl.__main__ import main
from megatron_rl.config import load_recipe
from megatron_rl.instruments.plan import GPUS, make_workload
from megatron_rl.instruments.plan.memory import memory_plan
from megatron_rl.instruments.plan.search import step_time
from megatron_rl.instruments.plan.servers import Generation, colocated_plan, engine_costs
from megatron_rl.instruments.plan.workload import Lengths, Workload
from megatron_rl.model.architecture import shape_of
from tests.support.tiny import REPOSITORY
from tests.unit.instruments.plan.test_servers import close, constant

RECIPE = REPOSITORY / "recipes" / "exact" / "grpo-qwen3-30b-a3b-4n8g-tp2ep8-bypass.yaml"
PROMPTS, SAMPLES, LENGTH = 16, 16, 500


def work(*overrides: str, mean_response: float = LENGTH) -> Workload:
    recipe = load_recipe(RECIPE, [f"batch.prompts={PROMPTS}", f"rollout.num_samples={SAMPLES}", *overrides])
    assert recipe.rollout.engine == "vllm"
    return make_workload(recipe, shape_of(recipe.model.path)[0], GPUS["h100-80"], mean_response=mean_response)


def recipes_arm(planned: Workload, lengths: Lengths) -> Generation:
    arms = colocated_plan(planned, lengths, own_seconds=0.0).arms
    assert [arm.is_recipes for arm in arms] == [True] + [False] * (len(arms) - 1)
    return arms[0]


@pytest.mark.parametrize("caches", [True, False])
def test_equal_lengths_end_together(caches):
    """256 requests over 8 engines: each computes 16 prompts (32 without a prefix cache) and decodes 32 responses."""
    planned = work(f"rollout.enable_prefix_caching={str(caches).lower()}")
    engine = memory_plan(planned).engine
    costs, prompt = engine_costs(planned, engine), planned.mean_prompt
    prefill = (16 if caches else 32) * costs.prefill_seconds(prompt)
    decoding = costs.seconds(32, 32 * prompt, LENGTH)
    arm = recipes_arm(planned, constant(LENGTH))
    assert arm.generate_s == close(prefill + decoding)
    assert arm.running == close(32 * decoding / arm.generate_s)
    assert (1 - arm.waiting, arm.preempted) == (close(1.0), 0.0)
    time = step_time(planned, engine)
    assert arm.step_s == close(arm.generate_s + time.total - time.generate)


def test_responses_wait_for_slots():
    planned = work("rollout.max_num_seqs=8")
    costs, prompt = engine_costs(planned, memory_plan(planned).engine), planned.mean_prompt
    expected = 16 * costs.prefill_seconds(prompt) + 4 * costs.seconds(8, 8 * prompt, LENGTH)
    assert recipes_arm(planned, constant(LENGTH)).generate_s == close(expected)


def test_a_round_ends_with_its_longest_response():
    """One response in about 64 is ten times as long; the mean alone does not show it."""
    lengths = Lengths("spread", 8192, np.array([LENGTH] * 63 + [10 * LENGTH]))
    planned = work(mean_response=float(lengths.sample().mean()))
    arm = recipes_arm(planned, lengths)
    equal = recipes_arm(planned, Lengths("equal", 8192, np.array([planned.mean_response])))
    assert arm.generate_s > 2 * equal.generate_s
    assert arm.waiting > 0.1


def test_a_second_round_samples_what_is_missing():
    one, more = work(), work("batch.filter_groups=true", "batch.max_generations=3")
    assert more.sampled_sequences == 1.5 * one.sampled_sequences
    costs, prompt = engine_costs(one, memory_plan(one).engine), one.mean_prompt
    half = 8 * costs.prefill_seconds(prompt) + costs.seconds(16, 16 * prompt, LENGTH)
    first, both = (recipes_arm(planned, constant(LENGTH)).generate_s for planned in (one, more))
    assert both == close(first + half)


def test_the_command_prints_and_writes_the_arms(capsys):
    shape = ["--set", f"batch.prompts={PROMPTS}", "--set", "rollout.num_samples=64"]
    arguments = ["plan", str(RECIPE), "--gpu", "h100", "--lengths", "lognormal:600,1", *shape]
    assert main([*arguments, "--json"]) == 0
    generation = json.loads(capsys.readouterr().out)["generation"]
    arms = {arm["max_num_seqs"]: arm for arm in generation["arms"]}
    assert generation["num_engines"] == 8
    assert list(arms) == [256, 64, 128, 512, 1024]
    assert arms[64]["generate_s"] > arms[128]["generate_s"], "fewer at a time take longer"
    assert main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("generation  "))
    rows = [line.split() for line in lines[at + 3 : at + 3 + len(arms)]]
    assert [int(row[0]) for row in rows] == list(arms)
    assert [row[-1] for row in rows] == ["recipe's"] + ["0.0%"] * 4


def test_the_exact_engine_is_not_simulated(capsys):
    recipe = str(RECIPE).replace("bypass", "exact")
    assert main(["plan", recipe, "--gpu", "h100", "--lengths", "lognormal:600,1"]) == 2
    assert "--lengths simulates vLLM, but rollout.engine is exact" in capsys.readouterr().err
