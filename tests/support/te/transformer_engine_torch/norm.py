"""RMSNorm over the last dimension of [rows, width]."""

from typing import Any

import torch

from .enums import refuse, torch_dtype

Tensor = torch.Tensor


def rmsnorm_fwd(
    input: Tensor,
    weight: Tensor,
    eps: float,
    ln_out: Tensor | None,
    quantizer: Any,
    otype: int,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> tuple[Tensor, None, Tensor]:
    """(x / σ · w, -, 1 / σ [rows] fp32) with σ² the mean square plus ``eps``; 1 + w where it is zero-centred."""
    refuse("rmsnorm_fwd", quantizer=quantizer, ln_out=ln_out)
    x = input.float()
    inverse = torch.rsqrt(x.square().mean(-1) + eps)
    return (x * inverse[..., None] * (weight.float() + zero_centered_gamma)).to(torch_dtype(otype)), None, inverse


def rmsnorm_bwd(
    dz: Tensor, x: Tensor, rsigma: Tensor, gamma: Tensor, sm_margin: int, zero_centered_gamma: bool
) -> tuple[Tensor, Tensor]:
    """Gradients of the input and of the weight."""
    normalized, upstream = x.float() * rsigma[..., None], dz.float()
    inner = upstream * (gamma.float() + zero_centered_gamma)
    grad = rsigma[..., None] * (inner - normalized * (inner * normalized).mean(-1, keepdim=True))
    return grad.to(x.dtype), (upstream * normalized).flatten(0, -2).sum(0).to(gamma.dtype)
