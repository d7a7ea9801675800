"""Enumerations of the extension. The numbers are this module's own; Python sees the names alone."""

import enum

import torch


def _enum(name: str, members: str) -> type[enum.IntEnum]:
    return enum.IntEnum(name, {member: number for number, member in enumerate(members.split())}, module=__name__)


DType = _enum("DType", "kByte kInt32 kFloat32 kFloat16 kBFloat16 kFloat8E4M3 kFloat8E5M2 kFloat4E2M1")
FP8FwdTensors = _enum(
    "FP8FwdTensors",
    "GEMM1_INPUT GEMM1_WEIGHT GEMM1_OUTPUT GEMM2_INPUT GEMM2_WEIGHT GEMM2_OUTPUT GEMM3_INPUT GEMM3_WEIGHT GEMM3_OUTPUT",
)
FP8BwdTensors = _enum("FP8BwdTensors", "GRAD_OUTPUT1 GRAD_INPUT1 GRAD_OUTPUT2 GRAD_INPUT2 GRAD_OUTPUT3 GRAD_INPUT3")
NVTEScalingMode = _enum("NVTEScalingMode", "NVTE_DELAYED_TENSOR_SCALING NVTE_MXFP8_1D_SCALING")
NVTERoutingMapFormat = _enum("NVTERoutingMapFormat", "BYTEMAP BITMAP_U8")
NVTEQBHistogramMode = _enum("NVTEQBHistogramMode", "TWO_KERNEL FUSED_ATOMIC")
CommOverlapType = _enum("CommOverlapType", "RS AG")
NVTE_Bias_Type = _enum("NVTE_Bias_Type", "NVTE_NO_BIAS NVTE_PRE_SCALE_BIAS NVTE_POST_SCALE_BIAS NVTE_ALIBI")
NVTE_Mask_Type = _enum(
    "NVTE_Mask_Type",
    "NVTE_NO_MASK NVTE_PADDING_MASK NVTE_CAUSAL_MASK NVTE_PADDING_CAUSAL_MASK NVTE_CAUSAL_BOTTOM_RIGHT_MASK "
    "NVTE_PADDING_CAUSAL_BOTTOM_RIGHT_MASK",
)
NVTE_Softmax_Type = _enum("NVTE_Softmax_Type", "NVTE_VANILLA_SOFTMAX NVTE_OFF_BY_ONE_SOFTMAX NVTE_LEARNABLE_SOFTMAX")
NVTE_Fused_Attn_Backend = _enum("NVTE_Fused_Attn_Backend", "NVTE_No_Backend NVTE_F16_arbitrary_seqlen NVTE_FP8")
NVTE_QKV_Format = _enum(
    "NVTE_QKV_Format",
    "NVTE_SBHD NVTE_BSHD NVTE_THD NVTE_BSHD_2SBHD NVTE_SBHD_2BSHD NVTE_THD_2BSHD NVTE_THD_2SBHD NVTE_BHSD "
    "NVTE_QKV_Format_NOT_SET",
)
NVTE_QKV_Layout = _enum(
    "NVTE_QKV_Layout",
    "NVTE_SB3HD NVTE_SBH3D NVTE_SBHD_SB2HD NVTE_SBHD_SBH2D NVTE_SBHD_SBHD_SBHD NVTE_BS3HD NVTE_BSH3D NVTE_BSHD_BS2HD "
    "NVTE_BSHD_BSH2D NVTE_BSHD_BSHD_BSHD NVTE_T3HD NVTE_TH3D NVTE_THD_T2HD NVTE_THD_TH2D NVTE_THD_THD_THD "
    "NVTE_SBHD_BSHD_BSHD NVTE_BSHD_SBHD_SBHD NVTE_THD_BSHD_BSHD NVTE_THD_SBHD_SBHD NVTE_Paged_KV_BSHD_BSHD_BSHD "
    "NVTE_Paged_KV_BSHD_SBHD_SBHD NVTE_Paged_KV_SBHD_BSHD_BSHD NVTE_Paged_KV_SBHD_SBHD_SBHD "
    "NVTE_Paged_KV_THD_BSHD_BSHD NVTE_Paged_KV_THD_SBHD_SBHD NVTE_BHSD_BHSD_BHSD NVTE_QKV_Layout_NOT_SET",
)

TORCH_DTYPES = {
    DType.kByte: torch.uint8,
    DType.kInt32: torch.int32,
    DType.kFloat32: torch.float32,
    DType.kFloat16: torch.float16,
    DType.kBFloat16: torch.bfloat16,
}


def torch_dtype(dtype: int) -> torch.dtype:
    """The dtype of PyTorch. Raises NotImplementedError for FP8 and FP4."""
    dtype_of_torch = TORCH_DTYPES.get(DType(int(dtype)))
    if dtype_of_torch is None:
        raise NotImplementedError(f"{DType(int(dtype)).name} is not in the reference")
    return dtype_of_torch


def refuse(function: str, **given: object) -> None:
    """Raise NotImplementedError for the first argument of ``given`` that asks for something."""
    for name, value in given.items():
        if value is not None and value is not False:
            raise NotImplementedError(f"transformer_engine_torch.{function}: {name} is not in the reference")
