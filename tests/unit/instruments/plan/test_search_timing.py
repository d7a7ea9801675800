"""Seconds of a step: work over rate, by hand."""

from __future__ import annotations

import math
from dataclasses import replace

from megatron_rl.instruments.plan.hardware import HOST_LINK
from megatron_rl.instruments.plan.learner import (
    active_parameters,
    stage_parameters,
)
from megatron_rl.instruments.plan.memory import memory_plan
from megatron_rl.instruments.plan.search import num_expert_matrices, step_time
from tests.support.planned import DENSE, MOE, work
from tests.support.rounding import rounded


def test_time_follows_the_hardware():
    w = work()
    engine = memory_plan(w).engine
    slow, fast = (
        step_time(w, engine),
        step_time(replace(w, gpu=replace(w.gpu, flops_16bit=2 * w.gpu.flops_16bit)), engine),
    )
    compute = slow.update - slow.communication
    assert fast.update - fast.communication == rounded(compute / 2)
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
    assert seconds == rounded(435 * 500e-6 + 18_432 * 40e-6)


def test_forward_and_backward_by_hand():
    """6 FLOPs per active parameter and token, 8 with full recomputation, plus attention."""
    w = work(DENSE)
    tokens, length = 1024 * (256 + 4096), 256 + 4096
    flops = tokens * (2 * active_parameters(w.architecture) + 2 * 36 * 4096 * length)
    time = step_time(w, memory_plan(w).engine)
    assert time.update - time.communication == rounded(4 * flops / (16 * 989e12 * 0.38))


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
