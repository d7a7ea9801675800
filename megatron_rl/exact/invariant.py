"""Batch-invariant computation: a token's numbers do not depend on what else is in the batch.

A kernel library chooses its order of summation by the shape of the whole call, and its polynomial for exp by whether
an element falls into a vector register or into the rest of the loop. So one token gets other bits in another batch.
Two engines that share their code have no other training-inference mismatch [VX]. Inside `BatchInvariant` every
such call is made in one fixed shape:

* matrix products over rows in tiles of `TILE` rows, one product per tile, the last tile padded;
* functions without a correctly rounded result (exp, log, silu, …) on whole vector registers, the last one padded;
* attention in blocks of `KEY_BLOCK` keys from the first key on, with a running softmax, so that keys that a mask hides
  add exactly nothing, whether they are there (a training pass) or not (generation with a cache);
* a token's experts are added in their order;
* sums over tensor-parallel ranks in the order of the ranks. Gloo and NCCL start the sum of each part of a tensor at
  another rank, so that an element's order depends on its place in the batch. Two numbers have one sum; three have not.
  Here every rank gets the terms of its part and adds them from rank 0 on, in fp32, rounded once. It sends as much as a
  reduce-scatter sends.

On CUDA the same algorithm runs in Triton kernels (`kernel_ops`); their tiles are others, and with them the bits.

Backward passes are left as they are: nothing compares gradients bit for bit with another engine. `learner.bit_check`
compares sampled tokens in every step, so that nothing rests on trust in a given machine.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from torch.overrides import TorchFunctionMode

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
    """Sum over ranks: ``input_list`` has a tensor for each rank, ``output`` gets this one's."""
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


TILE = 16
"""Rows of a matrix product: with fewer, libraries switch to matrix-vector kernels; more would be padding in
decoding."""
KEY_BLOCK = 32
"""Keys that attention takes at a time."""
VECTOR = 64
"""Elements that any CPU's vector loop handles whole: two 512-bit registers of 16-bit numbers."""


_forced = False  # tests set it: kernels on a CPU as well, in Triton's interpreter (TRITON_INTERPRET=1)


def on_kernels(x: torch.Tensor) -> bool:
    """Whether ``x`` is computed with by the Triton kernels: on CUDA."""
    return x.is_cuda or _forced


class BatchInvariant(TorchFunctionMode):
    """``with BatchInvariant():`` forward passes are batch-invariant, autograd works as before."""

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        replacement = _REPLACEMENTS.get(func, func)
        return replacement(*args, **(kwargs or {}))


def batch_invariant(device: torch.device) -> AbstractContextManager:
    """`BatchInvariant` for passes on ``device``; loads the kernels before the first of them."""
    if device.type == "cuda":
        kernel_ops()
    return BatchInvariant()


def kernel_ops() -> Any:
    """The module of that name, which imports Triton: a CPU does without."""
    from megatron_rl.exact import kernel_ops

    return kernel_ops


def matmul(x: torch.Tensor, weight: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """``x @ weight`` of x [..., K] and weight [K, N], row by row the same whatever the other rows are."""
    if weight.dim() != 2 or x.dim() < 2:
        raise NotImplementedError(f"batch-invariant product of {tuple(x.shape)} and {tuple(weight.shape)}")
    rows = x.reshape(-1, x.size(-1))
    num_rows = len(rows)
    if on_kernels(x):
        if _is_of_a_gradient(weight):
            return torch.matmul(x, weight, out=out)
        product = kernel_ops().product(rows, weight.t()).view(*x.shape[:-1], weight.size(1))
        return product if out is None else out.copy_(product)
    tiles = F.pad(rows, (0, 0, 0, -num_rows % TILE)).view(-1, TILE, x.size(-1))
    # One column, as the gate of a shared expert has, would be a matrix-vector kernel's.
    wide = F.pad(weight, (0, TILE - 1)) if weight.size(1) == 1 else weight
    product = torch.bmm(tiles, wide.expand(len(tiles), -1, -1)).flatten(0, 1)[:num_rows, : weight.size(1)]
    product = product.reshape(*x.shape[:-1], weight.size(1))
    return product if out is None else out.copy_(product)


def _is_of_a_gradient(weight: torch.Tensor) -> bool:
    """A product within a backward pass, where weights come as they lie in memory; a layer that is computed again there
    has them transposed, as in its first pass."""
    return torch._C._current_graph_task_id() != -1 and weight.stride(0) != 1


def rms_norm(
    x: torch.Tensor, normalized_shape: Any, weight: torch.Tensor | None = None, eps: float | None = None
) -> torch.Tensor:
    norm = kernel_ops().rms_norm if on_kernels(x) else F.rms_norm
    return norm(x, normalized_shape, weight, eps)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    product = matmul(x, weight.t())
    return product if bias is None else product + bias


def attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, last_key: torch.Tensor, scale: float
) -> torch.Tensor:
    """Softmax attention of each query to keys 0 … ``last_key``, in fp32, without gradient.

    Args:
        query: [S, H, Q, D], S sequences, H heads, Q queries each.
        key, value: [S, H/groups, M, D] with M a multiple of `KEY_BLOCK`; what lies beyond ``last_key`` is never read
            into the result, but must be finite.
        last_key: [S, Q] int64, position of each query in its sequence.
        scale: of the scores.

    Returns:
        [S, H, Q, D] in the dtype of ``query``.
    """
    num_sequences, num_heads, num_queries, width = query.shape
    kv_heads, num_keys = key.size(1), key.size(2)
    groups = num_heads // kv_heads
    # Queries of one group of heads share their keys: [S · H/groups · tiles, TILE, D]
    rows = query.float().reshape(num_sequences * kv_heads, groups * num_queries, width)
    pad = -rows.size(1) % TILE
    rows = F.pad(rows, (0, 0, 0, pad)).contiguous().view(-1, TILE, width)
    tiles_each = rows.size(0) // (num_sequences * kv_heads)
    last = last_key[:, None, None, :].expand(-1, kv_heads, groups, -1).reshape(num_sequences * kv_heads, -1)
    last = F.pad(last, (0, pad)).reshape(-1, TILE, 1)
    top = torch.full((rows.size(0), TILE, 1), float("-inf"), device=query.device)
    total, result = torch.zeros_like(top), torch.zeros_like(rows)
    columns = torch.arange(KEY_BLOCK, device=query.device)
    for start in range(0, num_keys, KEY_BLOCK):
        keys, values = (
            x[:, :, start : start + KEY_BLOCK].float().flatten(0, 1).repeat_interleave(tiles_each, 0)
            for x in (key, value)
        )
        scores = torch.bmm(rows, keys.transpose(1, 2)) * scale
        scores = scores.masked_fill(columns + start > last, float("-inf"))
        new_top = torch.maximum(top, scores.amax(-1, keepdim=True))
        keep, weights = padded(torch.exp)(top - new_top), padded(torch.exp)(scores - new_top)
        total = total * keep + weights.sum(-1, keepdim=True)
        result = result * keep + torch.bmm(weights, values)
        top = new_top
    result = (result / total).view(num_sequences * kv_heads, -1, width)[:, : groups * num_queries]
    return result.reshape(query.shape).to(query.dtype)


def step_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, positions: torch.Tensor, scale: float
) -> torch.Tensor:
    """`attention` of one query a sequence to keys in pages of `KEY_BLOCK`: the same arithmetic, all pages in one call.

    Args:
        query: [n, H, D].
        key, value: [n, P, H/groups, `KEY_BLOCK`, D].
        positions: [n] int64, the last key that each query sees.
        scale: of the scores.

    Returns:
        [n, H, D] in the dtype of ``query``.
    """
    num_sequences, num_heads, width = query.shape
    num_pages, kv_heads = key.size(1), key.size(2)
    groups = num_heads // kv_heads
    if groups > TILE:
        last_key = positions[:, None]
        whole = (x.transpose(1, 2).flatten(2, 3) for x in (key, value))
        return attention(query.unsqueeze(2), *whole, last_key, scale).squeeze(2)
    rows = query.new_zeros(num_sequences, kv_heads, TILE, width, dtype=torch.float32)
    rows[:, :, :groups] = query.view(num_sequences, kv_heads, groups, width)
    rows = rows[:, None].expand(-1, num_pages, -1, -1, -1).reshape(-1, TILE, width)
    keys, values = (x.reshape(-1, KEY_BLOCK, width).float() for x in (key, value))
    pages = (num_sequences, num_pages, kv_heads)
    scores = torch.bmm(rows, keys.transpose(1, 2)).view(*pages, TILE, KEY_BLOCK)[..., :groups, :] * scale
    places = torch.arange(num_pages * KEY_BLOCK, device=query.device).view(num_pages, 1, 1, KEY_BLOCK)
    scores = scores.masked_fill(places > positions.view(-1, 1, 1, 1, 1), float("-inf"))
    tops = scores.amax(-1, keepdim=True).cummax(1).values  # [n, P, H/groups, groups, 1]
    weights = padded(torch.exp)(scores - tops)
    totals = weights.sum(-1, keepdim=True)
    tiles = F.pad(weights, (0, 0, 0, TILE - groups)).view(-1, TILE, KEY_BLOCK)
    parts = torch.bmm(tiles, values).view(*pages, TILE, width)[..., :groups, :]
    total, result = totals[:, 0], parts[:, 0]
    if num_pages > 1:
        keep = padded(torch.exp)(tops[:, :-1] - tops[:, 1:])
        for page in range(1, num_pages):
            total = total * keep[:, page - 1] + totals[:, page]
            result = result * keep[:, page - 1] + parts[:, page]
    return (result / total).reshape(query.shape).to(query.dtype)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding: (x₁, x₂) → (x₁·cos − x₂·sin, x₂·cos + x₁·sin) for the halves of D.

    Args:
        x: [N, heads, D].
        cos, sin: [N, D/2] float32, of each token's angles.

    Returns:
        [N, heads, D] in the dtype of ``x``; on kernels rounded once.
    """
    if on_kernels(x):
        return kernel_ops().rotate(x, cos, sin)
    cos, sin = (part[:, None].to(x.dtype) for part in (cos, sin))
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def padded(function: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., torch.Tensor]:
    """``function`` of every element, on whole vector registers, so that none falls to the scalar rest of a loop."""

    def on_whole_registers(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if x.is_cuda:  # one thread an element, each by the same code
            return function(x, *args, **kwargs)
        flat = x.reshape(-1)
        return function(F.pad(flat, (0, -len(flat) % VECTOR)), *args, **kwargs)[: len(flat)].view(x.shape)

    return on_whole_registers


def padded_in_place(function: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    whole = padded(function)
    return lambda x: x.copy_(whole(x))


def add_rows(target: torch.Tensor, dim: int, index: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """``target.scatter_add_`` of whole rows, those of one place one after the other in the order of ``source``.

    On a CPU one call per row that a place gets, because the order in which a library adds the rows of one call is not
    specified.
    """
    if dim != 0 or index.dim() != 2 or index.stride(1) != 0:
        return target.scatter_add_(dim, index, source)
    places = index[:, 0]
    if on_kernels(target):
        return kernel_ops().add_rows(target, places, source)
    order = places.argsort(stable=True)
    ordered = places[order]
    turn = torch.arange(len(order), device=order.device) - torch.searchsorted(ordered, ordered)
    for number in range(int(turn.max()) + 1 if len(order) else 0):
        rows = order[turn == number]
        target = target.index_add_(0, places[rows], source[rows])
    return target


_REPLACEMENTS: dict[Callable, Callable] = {
    torch.matmul: matmul,
    torch.mm: matmul,
    torch.Tensor.matmul: matmul,
    torch.Tensor.mm: matmul,
    torch.Tensor.__matmul__: matmul,
    F.linear: linear,
    F.rms_norm: rms_norm,
    torch.Tensor.scatter_add_: add_rows,
    torch.exp: padded(torch.exp),
    torch.Tensor.exp: padded(torch.exp),
    torch.Tensor.exp_: padded_in_place(torch.exp),
    torch.log: padded(torch.log),
    torch.Tensor.log: padded(torch.log),
    torch.cos: padded(torch.cos),
    torch.sin: padded(torch.sin),
    torch.sigmoid: padded(torch.sigmoid),
    torch.Tensor.sigmoid: padded(torch.sigmoid),
    F.silu: padded(F.silu),
    F.gelu: padded(F.gelu),
    dist.all_reduce: all_reduce,
    dist.reduce_scatter: reduce_scatter,
    dist.reduce_scatter_single: reduce_scatter_single,
}
