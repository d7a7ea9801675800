"""The elementwise work between two matrix products: one function for each stretch, plain or compiled.

`cpu_layers` calls these in its autograd functions. Plain, every line is one pass over the activations; compiled
(``learner.compile``), a stretch is one pass or two, in code that Inductor writes for the processor it runs on. Both
compute the same formulas; results differ by rounding. Sizes are symbols to the compiler, so that a microbatch of
another length compiles nothing.

Shapes: N tokens, b = 1, D head width, M rows of experts, F expert width. Activations have the learner's dtype, 1 / rms
is float32.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

Tensor = torch.Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x / rms(x) · weight over the last dimension, in x's dtype; and 1 / rms in float32."""
    if torch.compiler.is_compiling():
        square = x.float().square().sum(dim=-1, keepdim=True)
    else:
        square = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32).square_()
    scale = square.div_(x.size(-1)).add_(eps).rsqrt_()
    return (x.float() * scale).mul_(weight).to(x.dtype), scale


def rms_norm_backward(grad: Tensor, x: Tensor, weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of x (float32) and weight. With s = 1 / rms: dx = s·(w·g) − x·s³·mean(w·g·x), dw = Σ s·g·x."""
    grad, x, weight32 = grad.float(), x.float(), weight.float()
    if torch.compiler.is_compiling():  # sums are part of the one pass; a product with a vector would be another
        product = grad * x
        grad_weight = (product * scale).flatten(0, -2).sum(dim=0)
        total = (product * weight32).sum(dim=-1, keepdim=True)
    else:
        product = (grad * x).reshape(-1, x.size(-1))
        grad_weight = product.t() @ scale.view(-1)
        total = (product @ weight32).view_as(scale)
    mean = total.mul_(scale.pow(3)).div_(x.size(-1))
    grad_x = (grad * weight32).mul_(scale).addcmul_(x, mean, value=-1.0)
    return grad_x, grad_weight.to(weight.dtype)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """(x₁, x₂) → (x₁·cos − x₂·sin, x₂·cos + x₁·sin), for halves x₁, x₂ of the last dimension, into a new tensor."""
    x1, x2 = x.chunk(2, dim=-1)
    if torch.compiler.is_compiling():
        return torch.cat([x1 * cos - x2 * sin, x2 * cos + x1 * sin], dim=-1)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    y1, y2 = out.chunk(2, dim=-1)
    torch.mul(x1, cos, out=y1).addcmul_(x2, sin, value=-1.0)
    torch.mul(x2, cos, out=y2).addcmul_(x1, sin)
    return out


def split_norm_rotate(
    mixed: Tensor, q_weight: Tensor | None, k_weight: Tensor | None, cos: Tensor, sin: Tensor, eps: float
) -> tuple[Tensor | None, ...]:
    """Queries, keys, values and the 1 / rms of queries and keys of ``mixed`` [N, b, groups, heads + 2, D].

    ``cos``, ``sin`` [N, 1, 1, 1, D/2]. A weight that is None: no norm. Queries [N, b, groups·heads, D], keys and values
    [N, b, groups, D].
    """
    outputs, scales = [], []
    for part, weight in ((mixed[..., :-2, :], q_weight), (mixed[..., -2:-1, :], k_weight)):
        scale = None
        if weight is not None:
            part, scale = rms_norm(part, weight, eps)
        scales.append(scale)
        outputs.append(_rotate(part, cos, sin).flatten(2, 3))
    return *outputs, mixed[..., -1, :].clone(memory_format=torch.contiguous_format), *scales


def split_norm_rotate_backward(
    grad_q: Tensor,
    grad_k: Tensor,
    grad_v: Tensor,
    mixed: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    q_scale: Tensor | None,
    k_scale: Tensor | None,
) -> tuple[Tensor | None, ...]:
    """Gradients of ``mixed`` and of both weights."""
    parts = (mixed[..., :-2, :], grad_q, q_weight, q_scale), (mixed[..., -2:-1, :], grad_k, k_weight, k_scale)
    grads, grad_weights = [], []
    for x, grad_out, weight, scale in parts:
        grad, grad_weight = _rotate(grad_out.reshape(x.shape), cos, -sin), None
        if weight is not None:
            grad, grad_weight = rms_norm_backward(grad, x, weight, scale)
        grads.append(grad.to(mixed.dtype))
        grad_weights.append(grad_weight)
    return torch.cat([*grads, grad_v.unsqueeze(3)], dim=3), *grad_weights


def gated_silu(hidden: Tensor, probs: Tensor) -> Tensor:
    """silu(gate) · up · prob [M, F] of ``hidden`` = (gate, up) [M, 2F] and ``probs`` [M]."""
    gate, up = hidden.chunk(2, dim=-1)
    return (F.silu(gate).mul_(up) * probs[:, None]).to(hidden.dtype)


def gated_silu_backward(grad: Tensor, hidden: Tensor, probs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`gated_silu` once more, and the gradients of ``hidden`` and ``probs``."""
    gate, up = hidden.chunk(2, dim=-1)
    if torch.compiler.is_compiling():
        sigmoid = torch.sigmoid(gate)
        silu = gate * sigmoid
        activated, grad_activated = silu * up, grad * probs[:, None]
        grad_gate = grad_activated * up * (sigmoid * (1 + gate * (1 - sigmoid)))
        grad_hidden = torch.cat([grad_gate, grad_activated * silu], dim=-1).to(hidden.dtype)
        out = (activated * probs[:, None]).to(hidden.dtype)
        return out, grad_hidden, (grad * activated).sum(dim=-1, dtype=probs.dtype)
    silu = F.silu(gate)
    activated = silu * up
    grad_probs = (grad * activated).sum(dim=-1, dtype=probs.dtype)
    out = activated.mul_(probs[:, None])
    grad_activated = grad.mul_(probs[:, None])
    grad_hidden = torch.empty_like(hidden)
    grad_gate, grad_up = grad_hidden.chunk(2, dim=-1)
    torch.mul(grad_activated, silu, out=grad_up)
    torch.ops.aten.silu_backward.grad_input(grad_activated.mul_(up), gate, grad_input=grad_gate)
    return out, grad_hidden, grad_probs


class Stretches(NamedTuple):
    """The functions of this file, all plain or all compiled."""

    rms_norm: Callable[..., Any] = rms_norm
    rms_norm_backward: Callable[..., Any] = rms_norm_backward
    split_norm_rotate: Callable[..., Any] = split_norm_rotate
    split_norm_rotate_backward: Callable[..., Any] = split_norm_rotate_backward
    gated_silu: Callable[..., Any] = gated_silu
    gated_silu_backward: Callable[..., Any] = gated_silu_backward


PLAIN = Stretches()


@functools.cache
def compiled() -> Stretches:
    """Each function is compiled at its first call, some seconds each; needs a C++ compiler.

    Inductor's cache on disk does not know ATEN_CPU_CAPABILITY: code made for one instruction set would be used for
    another, with wrong numbers. So each has a cache of its own, unless TORCHINDUCTOR_CACHE_DIR names one.
    """
    shared = os.path.abspath(default_cache_dir())  # torch names it in the environment when anything is compiled
    if os.environ.get("TORCHINDUCTOR_CACHE_DIR", shared) == shared:
        capability = torch.backends.cpu.get_cpu_capability().replace(" ", "-")
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{shared}_{capability}"
    return Stretches(*(torch.compile(function, dynamic=True) for function in PLAIN))
