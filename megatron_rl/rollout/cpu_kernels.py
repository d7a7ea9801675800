"""vLLM's own C++ norms in place of five tensor operations each, through its registry of operator implementations.

vLLM 0.30 builds these kernels for CPUs too, but offers them to GPUs only. Without compilation a CPU then runs a norm as
single operations, which take a tenth of a decoding step of a small model. Importing this module registers the kernels;
nothing uses them until `PRIORITY` is given to the engine.
"""

from __future__ import annotations

import torch
from vllm import ir
from vllm.platforms import current_platform

PROVIDER = "megatron_rl_cpu"
PRIORITY = {name: [PROVIDER, "native"] for name in ("rms_norm", "fused_add_rms_norm")}


def _is_plain_fp32(x: torch.Tensor, weight: torch.Tensor | None, *sizes: object) -> bool:
    # In bf16 and fp16 the kernel rounds once and the single operations twice, which is another policy.
    fits = weight is not None and weight.dtype == x.dtype == torch.float32
    return fits and all(size is None for size in sizes)


def _norm_fits(x, weight, epsilon, variance_size=None) -> bool:
    return _is_plain_fp32(x, weight, variance_size)


def _fused_fits(x, x_residual, weight, epsilon, variance_size=None) -> bool:
    return _is_plain_fp32(x, weight, variance_size) and x.is_contiguous() and x_residual.is_contiguous()


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor | None, epsilon: float, variance_size: int | None = None
) -> torch.Tensor:
    out = torch.empty(x.shape, dtype=x.dtype)
    torch.ops._C.rms_norm(out, x.contiguous(), weight, epsilon)
    return out


def fused_add_rms_norm(
    x: torch.Tensor,
    x_residual: torch.Tensor,
    weight: torch.Tensor | None,
    epsilon: float,
    variance_size: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    torch.ops._C.fused_add_rms_norm(x, x_residual, weight, epsilon)
    return x, x_residual


if PROVIDER not in ir.ops.rms_norm.impls:  # a re-import must not raise
    is_cpu = current_platform.is_cpu()
    ir.ops.rms_norm.register_impl(PROVIDER, supported=is_cpu, supports_args=_norm_fits)(rms_norm)
    ir.ops.fused_add_rms_norm.register_impl(PROVIDER, supported=is_cpu, supports_args=_fused_fits, inplace=True)(
        fused_add_rms_norm
    )
