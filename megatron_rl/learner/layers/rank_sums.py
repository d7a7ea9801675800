"""Sums over tensor-parallel ranks in the order of the ranks, whatever the size of the group.

Gloo and NCCL start the sum of each part of a tensor at another rank, so that an element's order depends on its place
in the batch. Two numbers have one sum; three have not. Here every rank gets the terms of its part and adds them from
rank 0 on, in fp32, rounded once. What travels is what a reduce-scatter moves.

`invariant.BatchInvariant` puts these in the place of PyTorch's functions, with their arguments.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

Tensor = torch.Tensor
Group = dist.ProcessGroup | None


def add_in_order(parts: Tensor) -> Tensor:
    """[ranks, …] → […]: the sum from the first rank on, in fp32 at least."""
    total = parts[0].to(torch.promote_types(parts.dtype, torch.float32), copy=True)
    for part in parts[1:]:
        total += part
    return total


def all_reduce(tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Group = None, async_op: bool = False) -> Any:
    if not _is_ours(op, group, async_op):
        return dist.all_reduce(tensor, op=op, group=group, async_op=async_op)
    gathered = tensor.new_empty(group.size(), *tensor.shape)
    dist.all_gather_into_tensor(gathered.view(-1), tensor.contiguous().view(-1), group=group)
    tensor.copy_(add_in_order(gathered))
    return None


def reduce_scatter_single(
    output: Tensor, input: Tensor, op: Any = dist.ReduceOp.SUM, group: Group = None, async_op: bool = False
) -> Any:
    """``input`` [ranks · n, …] or [ranks, n, …], ``output`` [n, …]."""
    if not _is_ours(op, group, async_op):
        return dist.reduce_scatter_single(output, input, op=op, group=group, async_op=async_op)
    parts = input.new_empty(group.size(), *output.shape)
    dist.all_to_all_single(parts.view(-1), input.contiguous().view(-1), group=group)
    output.copy_(add_in_order(parts))
    return None


def reduce_scatter(
    output: Tensor, input_list: list[Tensor], op: Any = dist.ReduceOp.SUM, group: Group = None, async_op: bool = False
) -> Any:
    """``input_list``: one tensor for each rank, of any sizes; ``output``: that of this rank."""
    if not _is_ours(op, group, async_op):
        return dist.reduce_scatter(output, input_list, op=op, group=group, async_op=async_op)
    parts = output.new_empty(group.size(), *output.shape)
    dist.all_to_all_single(
        parts.view(-1),
        torch.cat([part.reshape(-1) for part in input_list]),
        output_split_sizes=[output.numel()] * group.size(),
        input_split_sizes=[part.numel() for part in input_list],
        group=group,
    )
    output.copy_(add_in_order(parts))
    return None


def _is_ours(op: Any, group: Group, async_op: bool) -> bool:
    """Sums that are waited for, over the ranks that share a matrix; gradients of replicas are added as ever."""
    if op != dist.ReduceOp.SUM or async_op or group is None or group.size() == 1:
        return False
    return group in (
        parallel_state.get_tensor_model_parallel_group(check_initialized=False),
        parallel_state.get_expert_tensor_parallel_group(check_initialized=False),
    )
