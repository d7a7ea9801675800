"""One update of a learner as one rank of its job: a forward and a backward pass over a microbatch, and Adam's step."""

from __future__ import annotations

import numpy as np

from megatron_rl.checkpoint.sharded import allocate_moments
from megatron_rl.config.routing import RoutingConfig
from megatron_rl.learner.context import ContextShare
from megatron_rl.learner.learner import Learner
from megatron_rl.plan.workload import Workload
from megatron_rl.trace.fake_rank import fake_rank
from megatron_rl.trace.recorder import Phase
from megatron_rl.trace.uniform import uniform_routes
from megatron_rl.types import Batch, Sequence

PASSES, UPDATE = "forward and backward", "update"


def why_untraced(work: Workload) -> str:
    """Why an update cannot be traced; empty where it can."""
    if work.parallel.pipeline > 1:
        return "stages of a pipeline tell each other the shapes of what they send, and these are values"
    if work.architecture.is_moe and work.parallel.expert * work.parallel.expert_tensor == 1:
        return "without expert parallelism rows are sorted by values"
    if work.recipe.rollout.engine == "exact":
        return "exact mode reads the lengths of packed rows, which are values"
    return ""


def trace_update(work: Workload, rank: int) -> list[Phase]:
    """`PASSES` over one microbatch of ``work.microbatch_tokens`` tokens, and `UPDATE`. Routes are not replayed."""
    runtime = work.recipe.runtime.model_copy(update={"device": "cpu"})
    recipe = work.recipe.model_copy(update={"runtime": runtime, "routing": RoutingConfig()})
    batch = _batch(work)
    with (
        fake_rank(rank, work.ranks, work.architecture, device="cpu") as recorder,
        uniform_routes(work.architecture.experts_per_token),
    ):
        learner = Learner(recipe)
        allocate_moments(learner.optimizer)
        with recorder.phase(PASSES) as passes:
            learner.accumulate(batch, batch.minibatches[0], batch.minibatches[0])
        with recorder.phase(UPDATE) as update:
            learner.overflow.step()
    return [passes, update]


def _batch(work: Workload) -> Batch:
    """The fewest sequences that fill one microbatch of each data-parallel rank. They are equally long, and need no
    padding: what padding takes away again is chosen by values."""
    tokens, share = work.microbatch_tokens, ContextShare(work.parallel.context)
    multiple = share.row_multiple(work.parallel.tensor)
    num_sequences = -(-tokens // work.longest)
    length = tokens // num_sequences // multiple * multiple
    sequences = [_sequence(i, length, work) for i in range(num_sequences * work.data_parallel)]
    return Batch(0, sequences, [list(range(len(sequences)))])


def _sequence(number: int, length: int, work: Workload) -> Sequence:
    prompt = min(work.recipe.data.prompt.max_length, length // 2)
    response = length - prompt
    return Sequence(
        id=f"traced/{number}",
        tokens=np.ones(length, np.int64),
        prompt_length=prompt,
        inference_logprobs=np.zeros(response, np.float32),
        loss_mask=np.ones(response, bool),
        advantage=1.0,
        reward=1.0,
        policy_versions=np.zeros(response, np.int32),
        old_logprobs=np.zeros(response, np.float32),
    )
