"""Seconds of a step: work over rate, by hand."""

from __future__ import annotations

import math
from dataclasses import replace

from megatron_rl.instruments.plan.hardware import HOST_LINK, LAYER_HOST_S, LEARNER_SHARE, REFIT_S
from megatron_rl.instruments.plan.learner import (
    active_parameters,
    stage_parameters,
)
from megatron_rl.instruments.plan.memory import host_phase, memory_plan
from megatron_rl.instruments.plan.timing import num_expert_matrices, step_time
from tests.support.planned import DENSE, MOE, work
from tests.support.rounding import rounded


def test_time_follows_the_hardware():
    w = work()
    engine = memory_plan(w).engine
    slow, fast = (
        step_time(w, engine),
        step_time(replace(w, gpu=replace(w.gpu, flops_16bit=2 * w.gpu.flops_16bit)), engine),
    )
    assert fast.update <= slow.update
    wide = step_time(replace(w, gpu=replace(w.gpu, bandwidth=2 * w.gpu.bandwidth)), engine)
    assert slow.generate / 2 < wide.generate < slow.generate
    assert slow.old_logprobs == 0  # one update a step
    assert step_time(work(MOE, "h100-80", "batch.minibatches=4"), engine).old_logprobs > 0


def test_expert_matrices_cost_little_to_hand_over():
    """18,432 of them and 435 other tensors: a second, where one by one it would be ten."""
    w = work()
    alone = replace(w, gpu=replace(w.gpu, nvlink=math.inf, network=math.inf))
    seconds = step_time(alone, memory_plan(w).engine).refit
    assert num_expert_matrices(w.architecture) == 18_432
    assert seconds == rounded(REFIT_S[True] + 435 * 500e-6 + 18_432 * 40e-6)


def test_forward_and_backward_by_hand():
    """6 FLOPs per active parameter and token, 8 with full recomputation, plus attention; or the host's seconds."""
    w = work(DENSE)
    w = replace(w, gpu=replace(w.gpu, nvlink=math.inf, network=math.inf))
    tokens, length = 1024 * (256 + 4096), w.mean_square / (256 + 4096)
    flops = tokens * (2 * active_parameters(w.architecture) + 2 * 36 * 4096 * length)
    engine = memory_plan(w).engine
    assert step_time(w, engine).update == rounded(4 * flops / (16 * 989e12 * LEARNER_SHARE["hopper"]), scale=1e3)
    fast = replace(w, gpu=replace(w.gpu, flops_16bit=math.inf))
    host = w.microbatches * w.recipe.batch.minibatches * 36 * LAYER_HOST_S["dense"]
    assert step_time(fast, engine).update == rounded(4 * host)


def test_microbatches_hold_whole_sequences():
    """Sequences of 3000 tokens in microbatches of 4096: one each; of 16,384: 4.96."""
    w = work(MOE, "h100-80", "batch.minibatches=1", "learner.max_tokens_per_microbatch=4096", mean_response=2744)
    each = w.recipe.num_sequences / w.data_parallel
    assert w.microbatches == each
    more = w.with_keys("learner", max_tokens_per_microbatch=16384)
    assert more.microbatches == math.ceil(each / (16384 / 3000 - 0.5))


def test_a_judged_update_costs_its_responses_a_pass_and_the_weights_once_more():
    """Its sampling and its pass are those of a step of that size."""
    w = work(MOE, "h100-80", "acceptance={tolerance: 0.001, prompts: 32, num_samples: 4}")
    engine = memory_plan(w).engine
    batch = "batch={prompts: 32, minibatches: 2, filter_groups: false, max_generations: 1}"
    alone = work(MOE, "h100-80", batch, "rollout.num_samples=4")
    judged, plain = step_time(w, engine), step_time(work(), engine)
    step = step_time(alone, engine)
    assert step.old_logprobs > 0 == plain.old_logprobs
    of_microbatch = 48 * LAYER_HOST_S["alltoall"]  # two mini-batches may have one more than their sum
    assert 0 <= step.generate + step.old_logprobs + plain.refit - judged.acceptance <= of_microbatch * (1 + 1e-9)
    assert judged.total == rounded(plain.total + judged.acceptance, scale=1e3)
    assert plain.acceptance == 0.0


def test_a_reference_policy_costs_a_pass_and_its_weights():
    """A copy of the weights of each rank in host memory, which comes once a step; with LoRA a pass alone."""
    plain, one, lora = (
        work(MOE, "h100-80", *keys)
        for keys in ((), ("reference={}",), ("reference={}", "learner.lora={rank: 8, alpha: 16}"))
    )
    memory = memory_plan(one)
    weights = 2 * max(stage.total for stage in stage_parameters(one.architecture, one.parallel))
    before, after = step_time(plain, memory.engine), step_time(one, memory.engine)
    assert before.second_models == 0.0 < after.second_models
    assert after.second_models == step_time(work(MOE, "h100-80", "batch.minibatches=4"), memory.engine).old_logprobs
    assert after.offload - before.offload == rounded(weights / (HOST_LINK * one.gpu.host_link), scale=10)
    (phase,) = (phase for phase in memory.phases if phase.name == "second model")
    assert dict(phase.items)["its weights and forward pass"] > weights
    host = "weights of second models, page-locked"
    assert dict(host_phase(one, memory).items)[host] == weights * one.gpus_per_node
    for other in (plain, lora):
        found = memory_plan(other)
        assert "second model" not in {phase.name for phase in found.phases}
        assert host not in dict(host_phase(other, found).items)
    assert step_time(lora, memory.engine).second_models == after.second_models


def test_a_pass_of_each_response_alone_waits_for_every_stage():
    """One stage takes as long as for an update; of two, each waits for the other."""
    scored = "objective.advantage=min_variance"
    w = work(MOE, "h100-80", scored)
    time = step_time(w, memory_plan(w).engine)
    assert time.scores == rounded(time.update)
    staged = work(MOE, "h100-80", scored, "learner.parallel.pipeline=2", "learner.parallel.tensor=2")
    time = step_time(staged, memory_plan(staged).engine)
    assert time.scores == rounded(2 * time.update)
    assert step_time(work(), memory_plan(work()).engine).scores == 0.0


ASIDE = [f"learner.offload.{part}=true" for part in ("gradients", "optimizer", "weights", "during_passes")]


def test_copies_cross_the_bus_both_ways():
    stage = stage_parameters(work().architecture, work().parallel)[0]
    states, weights = 12 * (stage.dense / 8 + stage.expert / 4), 2 * stage.total
    rate = HOST_LINK * 64e9

    def seconds(*settings: str) -> float:
        w = work(MOE, "h100-80", *settings)
        return step_time(w, memory_plan(w).engine).offload

    assert seconds() == seconds(ASIDE[0]) == 0.0
    assert seconds(ASIDE[1]) == rounded(2 * states / rate)
    assert seconds(ASIDE[2]) == rounded(2 * weights / rate)
    # Away in passes, Adam's states come for every update.
    assert seconds(*ASIDE, "batch.minibatches=4") == rounded((8 * states + 2 * weights) / rate)
    assert seconds(*ASIDE[:3], "batch.minibatches=4") == rounded(2 * (states + weights) / rate)
