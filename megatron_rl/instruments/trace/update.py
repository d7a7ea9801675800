"""One update of a learner as one rank of its job: a forward and a backward pass over a microbatch, and Adam's step."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np
import torch
from megatron.core.optimizer import clip_grads
from megatron.core.optimizer.optimizer import MixedPrecisionOptimizer
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_rl.checkpoint.sharded import allocate_moments
from megatron_rl.config.learner import RoutingConfig
from megatron_rl.instruments.plan.workload import Workload
from megatron_rl.instruments.trace.fake_rank import fake_rank
from megatron_rl.instruments.trace.recorder import Phase
from megatron_rl.learner.context import ContextShare
from megatron_rl.learner.learner import Learner
from megatron_rl.types import Batch, Sequence

# Replaces decisions that depend on values, which fake tensors lack: all experts get equal numbers of rows.
#
# | in training | in a traced update |
# |---|---|
# | the dispatcher counts rows by expert | equal counts, or as equal as integers are; the same exchange of counts |
# | `masked_select` of a routing map | as many rows as tokens times experts per token |
# | a number that is read from a tensor | 1; 0 where gradients are looked through for overflows |
# | Megatron's norm of many tensors, through Python numbers | the same norm through tensors, as fused kernels take it |


_aten = torch.ops.aten


class _Values(TorchDispatchMode):
    """Returns results that fake tensors cannot compute. Enter it inside the mode that makes tensors fake."""

    def __init__(self, experts_per_token: int):
        super().__init__()
        self.experts_per_token = experts_per_token
        self.number = 1.0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func is _aten.masked_select.default:  # of [experts, tokens]
            tensor, mask = args
            return tensor.new_empty(mask.shape[1] * self.experts_per_token)
        if func is _aten._local_scalar_dense.default:
            dtype = args[0].dtype
            return False if dtype == torch.bool else float(self.number) if dtype.is_floating_point else 1
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def uniform_routes(experts_per_token: int) -> Iterator[None]:
    """Make updates of a learner possible under fake tensors, with uniform routes."""
    values = _Values(experts_per_token)
    look = MixedPrecisionOptimizer._unscale_main_grads_and_check_for_nan

    def without_overflow(optimizer: MixedPrecisionOptimizer) -> bool:
        with mock.patch.object(values, "number", 0.0):
            return look(optimizer)

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(MoEAlltoAllTokenDispatcher, "preprocess", _equal_counts))
        stack.enter_context(mock.patch.object(clip_grads, "l2_norm_impl", _norm))
        patched = mock.patch.object(MixedPrecisionOptimizer, "_unscale_main_grads_and_check_for_nan", without_overflow)
        stack.enter_context(patched)
        stack.enter_context(values)
        yield


def balanced(total: int, parts: int) -> np.ndarray:
    """Return integers [parts] that sum to ``total`` and differ by at most one."""
    return np.diff(np.arange(parts + 1) * total // parts)


def _norm(size: int, overflow: torch.Tensor, tensors: list[list[torch.Tensor]], per_tensor: bool) -> tuple:
    return torch.stack([tensor.norm() for tensor in tensors[0]]).norm(), None


def _equal_counts(self: MoEAlltoAllTokenDispatcher, routing_map: torch.Tensor) -> np.ndarray:
    """Replace `preprocess`: return equal counts on the host, where the original copies them later."""
    local = routing_map.sum(dim=0).long()
    self.num_out_tokens = routing_map.size(0) * self.config.moe_router_topk
    counts = balanced(self.num_out_tokens, self.num_experts)
    local_counts = counts[self.local_expert_indices[0] : self.local_expert_indices[-1] + 1]
    sources = self.tp_size * self.ep_size
    if sources > 1:
        gather_from_sequence_parallel_region(local, group=self.tp_ep_group)
        self.input_splits = counts.reshape(self.ep_size, -1).sum(axis=1)
        self.output_splits = np.full(self.ep_size, local_counts.sum())
        self.output_splits_tp = np.full(self.tp_size, local_counts.sum() * self.ep_size)
        self._maybe_update_cuda_sync_point("before_ep_alltoall")
    else:
        self._maybe_update_cuda_sync_point("before_finish")
    chunks = np.arange(self.num_experts * self.tp_size)
    self.sort_input_by_local_experts = chunks.reshape(-1, self.num_local_experts).T.ravel()
    self.restore_output_by_local_experts = chunks.reshape(self.num_local_experts, -1).T.ravel()
    self.num_global_tokens_per_local_expert = np.tile(local_counts, (sources, 1))
    return local_counts * sources


PASSES, UPDATE = "forward and backward", "update"


def why_untraced(work: Workload) -> str:
    """Return why an update cannot be traced; empty if it can."""
    if work.parallel.pipeline > 1:
        return "stages of a pipeline tell each other the shapes of what they send, and these are values"
    if work.architecture.is_moe and work.parallel.expert * work.parallel.expert_tensor == 1:
        return "without expert parallelism rows are sorted by values"
    if work.recipe.rollout.engine == "exact":
        return "exact mode reads the lengths of packed rows, which are values"
    return ""


def trace_update(work: Workload, rank: int) -> list[Phase]:
    """Trace `PASSES` over a microbatch of ``work.microbatch_tokens`` tokens, and `UPDATE`. Routes are not replayed."""
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
    """Return the fewest sequences that fill one microbatch of each data-parallel rank.

    They have equal lengths without padding, because removing padding depends on values.
    """
    tokens, share = work.microbatch_tokens, ContextShare(work.parallel.context)
    multiple = share.row_multiple(work.parallel.tensor)
    num_sequences = -(-tokens // work.longest)
    length = tokens // num_sequences // multiple * multiple
    sequences = [_sequence(i, length, work) for i in range(num_sequences * work.data_parallel)]
    return Batch(0, sequences, [list(range(len(sequences)))])


def _sequence(number: int, length: int, work: Workload) -> Sequence:
    prompt = min(work.recipe.data.prompt.max_length, length // 2)
    response, candidates = length - prompt, work.recipe.rollout.candidates
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
        kept_tokens=np.ones((response, candidates), np.int32) if candidates else None,
    )
