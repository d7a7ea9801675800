"""A reference in PyTorch of TransformerEngine's extension (2.20.2): what the learner's layers call, on a CPU.

TransformerEngine is Python over one compiled module, `transformer_engine_torch`, that needs CUDA. With this module in
its place the real Python runs: its layers and autograd functions, its choice of attention, its optimizer, and all of
Megatron's code around them. Nothing is faked: every function here computes what its counterpart documents.

| function | arithmetic |
|---|---|
| `generic_gemm`, `te_general_grouped_gemm` | operands to fp32, product and sum in fp32, one rounding of the result |
| `rmsnorm_fwd`, `rmsnorm_bwd` | fp32 inside, one rounding of each result; the saved 1/σ is fp32 |
| `convert_thd_to_bshd`, `convert_bshd_to_thd` | copies, zeros in the padding |
| `fused_rope_forward`, `fused_rope_backward` | thd and sbhd, halves (not interleaved); fp32 inside, one rounding |
| `scaled_masked_softmax_forward`, `…_backward` | fp32 inside, one rounding; a masked score is −10000 |
| `fused_attn_fwd`, `fused_attn_bwd` | thd; fp32 inside, one rounding of each result; the saved log Σ exp is fp32 |
| `thd_…` | halves of packed sequences; outputs of two parts weighed in fp32 |
| `multi_tensor_adam` | Adam and AdamW in fp32 |
| `multi_tensor_l2norm`, `multi_tensor_scale`, `multi_tensor_scale_tensor` | fp32 |

`get_fused_attn_backend` says that there is no fused attention: TransformerEngine then takes its unfused attention,
which is PyTorch. Context parallelism, which has none, is tested with another answer.

Not here: FP8 and FP4, biases and GELU inside a product, overlap of products with communication, flash attention, layer
norm, MoE permutation. A name that is not defined is refused with `NotImplementedError` when it is used, not when it is
imported.

What it cannot tell: numerics of cuBLAS and cuDNN, streams, memory, speed, and whether the compiled module agrees.
"""

from typing import Any

from .adam import multi_tensor_adam
from .enums import (
    CommOverlapType,
    DType,
    FP8BwdTensors,
    FP8FwdTensors,
    NVTE_Bias_Type,
    NVTE_Fused_Attn_Backend,
    NVTE_Mask_Type,
    NVTE_QKV_Format,
    NVTE_QKV_Layout,
    NVTE_Softmax_Type,
    NVTEQBHistogramMode,
    NVTERoutingMapFormat,
    NVTEScalingMode,
)
from .fused import (
    fused_attn_bwd,
    fused_attn_fwd,
    thd_grad_correction,
    thd_out_correction,
    thd_read_half_tensor,
    thd_read_second_half_lse,
    thd_second_half_lse_correction,
)
from .gemm import generic_gemm, te_general_grouped_gemm
from .lists import multi_tensor_l2norm, multi_tensor_scale, multi_tensor_scale_tensor
from .norm import rmsnorm_bwd, rmsnorm_fwd
from .packed import convert_bshd_to_thd, convert_thd_to_bshd
from .rope import fused_rope_backward, fused_rope_forward
from .softmax import scaled_masked_softmax_backward, scaled_masked_softmax_forward


def get_cudnn_version() -> int:
    """Of the library that would run the fused attention: 9.20.0."""
    return 92000


def get_cublasLt_version() -> int:
    """13.1.1."""
    return 130101


def get_num_cublas_streams() -> int:
    """Streams that a grouped product is spread over; each has a workspace."""
    return 1


def get_stream_priority_range(device: int | None = None) -> tuple[int, int]:
    """(least, greatest) priority of streams."""
    return 0, 0


def get_fused_attn_backend(*args: Any, **kwargs: Any) -> tuple[NVTE_Fused_Attn_Backend, str]:
    """No fused attention, for any shape."""
    return NVTE_Fused_Attn_Backend.NVTE_No_Backend, "the reference of the extension has no fused attention"


class _Refusing(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise NotImplementedError(f"transformer_engine_torch.{cls.__name__}.{name} is not in the reference")

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"transformer_engine_torch.{cls.__name__} is not in the reference")


def __getattr__(name: str) -> Any:
    # A class, because TransformerEngine's annotations name classes of the extension.
    if name.startswith("__"):
        raise AttributeError(name)
    return _Refusing(name, (), {})


# TransformerEngine puts these into a table beside those of RMSNorm.
layernorm_fwd, layernorm_bwd = __getattr__("layernorm_fwd"), __getattr__("layernorm_bwd")

__all__ = [
    "CommOverlapType",
    "DType",
    "FP8BwdTensors",
    "FP8FwdTensors",
    "NVTEQBHistogramMode",
    "NVTERoutingMapFormat",
    "NVTEScalingMode",
    "NVTE_Bias_Type",
    "NVTE_Fused_Attn_Backend",
    "NVTE_Mask_Type",
    "NVTE_QKV_Format",
    "NVTE_QKV_Layout",
    "NVTE_Softmax_Type",
    "convert_bshd_to_thd",
    "convert_thd_to_bshd",
    "fused_attn_bwd",
    "fused_attn_fwd",
    "fused_rope_backward",
    "fused_rope_forward",
    "generic_gemm",
    "get_cublasLt_version",
    "get_cudnn_version",
    "get_fused_attn_backend",
    "get_num_cublas_streams",
    "get_stream_priority_range",
    "layernorm_bwd",
    "layernorm_fwd",
    "multi_tensor_adam",
    "multi_tensor_l2norm",
    "multi_tensor_scale",
    "multi_tensor_scale_tensor",
    "rmsnorm_bwd",
    "rmsnorm_fwd",
    "scaled_masked_softmax_backward",
    "scaled_masked_softmax_forward",
    "te_general_grouped_gemm",
    "thd_grad_correction",
    "thd_out_correction",
    "thd_read_half_tensor",
    "thd_read_second_half_lse",
    "thd_second_half_lse_correction",
]
