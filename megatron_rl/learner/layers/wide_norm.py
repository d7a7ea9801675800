"""Norms of queries and keys over all heads of a token, which tensor-parallel ranks share.

Each rank has some heads and the part of the weight that belongs to them. The mean square is over all ranks' heads: one
sum over the ranks in the forward pass, and one in the backward pass.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

Tensor = torch.Tensor


def _over_ranks(x: Tensor) -> Tensor:
    group = parallel_state.get_tensor_model_parallel_group()
    if group.size() > 1:
        dist.all_reduce(x, group=group)
    return x


class _WideNorm(torch.autograd.Function):
    """[N, w] → x / rms(x) · weight, where the rms is over ``width`` columns, of which this rank has w."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, width: int, eps: float) -> Tensor:
        square = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32).square_()
        scale = _over_ranks(square).div_(width).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        ctx.width = width
        return (x.float() * scale).mul_(weight).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """As `cpu_layers.rms_norm_backward`, but for the sum over ranks."""
        x, weight, scale = ctx.saved_tensors
        grad, x32, weight32 = grad.float(), x.float(), weight.float()
        product = grad * x32
        grad_weight = product.t() @ scale.view(-1)
        mean = _over_ranks((product @ weight32)[:, None]).mul_(scale.pow(3)).div_(ctx.width)
        grad_x = (grad * weight32).mul_(scale).addcmul_(x32, mean, value=-1.0)
        return grad_x.to(x.dtype), grad_weight.to(weight.dtype), None, None


class WideNorm(torch.nn.Module):
    """The norm of [N, b, …, D], where the dimensions behind the second are this rank's heads."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float, num_heads: int) -> None:
        super().__init__()
        self.width, self.eps = hidden_size * num_heads, eps
        own = self.width // config.tensor_model_parallel_size
        self.weight = torch.nn.Parameter(torch.ones(own, dtype=config.params_dtype))
        set_tensor_model_parallel_attributes(self.weight, True, 0, 1)

    def forward(self, x: Tensor) -> Tensor:
        return _WideNorm.apply(x.reshape(-1, self.weight.numel()), self.weight, self.width, self.eps).view(x.shape)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: Any = None) -> dict:
        weights = self.state_dict(prefix="", keep_vars=True)
        return make_sharded_tensors_for_checkpoint(weights, prefix, {"weight": 0}, sharded_offsets)


class QueryNorm(WideNorm):
    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(config, hidden_size, eps, config.num_attention_heads)


class KeyNorm(WideNorm):
    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(config, hidden_size, eps, config.num_query_groups)


def use_wide_norms(block: TransformerBlockSubmodules) -> None:
    """Put these norms into the layers of a specification."""
    for layer in block.layer_specs:
        attention = layer.submodules.self_attention.submodules
        attention.q_layernorm, attention.k_layernorm = QueryNorm, KeyNorm
