"""What the values of fake tensors would decide in an update, decided: every expert gets as many rows as the others.

| in training | in a traced update |
|---|---|
| the dispatcher counts rows by expert | equal counts, or as equal as integers are; the same exchange of counts |
| `masked_select` of a routing map | as many rows as tokens times experts per token |
| a number that is read from a tensor | 1; 0 where gradients are looked through for overflows |
| Megatron's norm of many tensors, through Python numbers | the same norm through tensors, as fused kernels take it |
"""

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

_aten = torch.ops.aten


class _Values(TorchDispatchMode):
    """Answers what fake tensors cannot. Enter it inside the mode that makes tensors fake."""

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
    """Inside, a learner under fake tensors can be updated."""
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
    """[parts] integers that sum to ``total`` and differ by one at most."""
    return np.diff(np.arange(parts + 1) * total // parts)


def _norm(size: int, overflow: torch.Tensor, tensors: list[list[torch.Tensor]], per_tensor: bool) -> tuple:
    return torch.stack([tensor.norm() for tensor in tensors[0]]).norm(), None


def _equal_counts(self: MoEAlltoAllTokenDispatcher, routing_map: torch.Tensor) -> np.ndarray:
    """`preprocess` with counts that are known: numbers on the host, which the original brings there later."""
    local = routing_map.sum(dim=0).long()
    self.num_out_tokens = routing_map.size(0) * self.config.moe_router_topk
    counts = balanced(self.num_out_tokens, self.num_experts)
    own = counts[self.local_expert_indices[0] : self.local_expert_indices[-1] + 1]
    sources = self.tp_size * self.ep_size
    if sources > 1:
        gather_from_sequence_parallel_region(local, group=self.tp_ep_group)
        self.input_splits = counts.reshape(self.ep_size, -1).sum(axis=1)
        self.output_splits = np.full(self.ep_size, own.sum())
        self.output_splits_tp = np.full(self.tp_size, own.sum() * self.ep_size)
        self._maybe_update_cuda_sync_point("before_ep_alltoall")
    else:
        self._maybe_update_cuda_sync_point("before_finish")
    chunks = np.arange(self.num_experts * self.tp_size)
    self.sort_input_by_local_experts = chunks.reshape(-1, self.num_local_experts).T.ravel()
    self.restore_output_by_local_experts = chunks.reshape(self.num_local_experts, -1).T.ravel()
    self.num_global_tokens_per_local_expert = np.tile(own, (sources, 1))
    return own * sources
