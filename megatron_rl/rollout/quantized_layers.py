"""Layers of a CPU engine with weights that are rounded to a smaller type and computed with in the engine's dtype.

vLLM 0.30 quantizes while it loads ("online"), at the start and again at every layerwise reload, where it has kernels
for fp8: on CUDA, and on CPUs with AMX. Here the same hook, a layer's ``process_weights_after_loading``, rounds the
loaded weight in place and lets the unquantized method go on, so that any CPU computes with the weights that a GPU's
codes and scales stand for. The matrices and so the blocks are vLLM's: query, key and value in one; gate and up in one,
but those of an expert each by itself, because vLLM pads each to whole blocks; and each rank's part by itself, unless a
scale spans ranks.

What is rounded is what vLLM rounds: linear layers and experts. Embeddings, head and norms are no such layers. The
router and the gate of a shared expert are linear layers to vLLM, which would round them: `KEPT` names them, here and on
CUDA.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.distributed as dist
from vllm.config import get_current_vllm_config
from vllm.distributed.parallel_state import get_tp_group
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import (
    LinearBase,
    UnquantizedLinearMethod,
    register_weight_loader_v2_supported_method,
)
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig as Method

from megatron_rl.config.rollout import Block, QuantizationConfig
from megatron_rl.rollout.weights import Reduce, rounded

NAME = "megatron_rl_rounded"
KEY = "megatron_rl_quantization"  # in vLLM's `additional_config`
KEPT = ("*.mlp.gate", "*.mlp.shared_expert_gate")
"""Names of linear layers that stay as they are: routers, and what weights a shared expert."""


@register_quantization_config(NAME)
class Rounded(Method):
    """Which layers are rounded; vLLM asks while it builds the model."""

    def __init__(self) -> None:
        super().__init__()

    @classmethod
    def get_name(cls) -> str:
        return NAME

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        return 0

    @classmethod
    def get_config_filenames(cls) -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Rounded:
        raise NotImplementedError(f"{NAME} is not a format of checkpoints")

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        wanted = QuantizationConfig.model_validate(get_current_vllm_config().additional_config[KEY])
        if isinstance(layer, LinearBase):
            kept = any(fnmatchcase(prefix, pattern) for pattern in KEPT)
            return UnquantizedLinearMethod() if kept else RoundedLinear(wanted)
        return RoundedExperts(layer.moe_config, wanted) if isinstance(layer, RoutedExperts) else None


@register_weight_loader_v2_supported_method
class RoundedLinear(UnquantizedLinearMethod):
    def __init__(self, quantization: QuantizationConfig) -> None:
        super().__init__()
        self.quantization = quantization

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        block = self.quantization.of_weights
        outputs = getattr(layer, "output_size_per_partition", layer.output_size) != layer.output_size
        inputs = getattr(layer, "input_size_per_partition", layer.input_size) != layer.input_size
        weight = layer.weight.data
        weight.copy_(rounded(weight, self.quantization.weights, block, _over_ranks(block, outputs, inputs)))
        super().process_weights_after_loading(layer)


class RoundedExperts(UnquantizedFusedMoEMethod):
    def __init__(self, moe: Any, quantization: QuantizationConfig) -> None:
        super().__init__(moe)
        self.quantization = quantization

    def process_weights_after_loading(self, layer: RoutedExperts) -> None:
        split, block = self.moe.tp_size > 1, self.quantization.of_weights
        gate_up, down = layer.w13_weight.data, layer.w2_weight.data
        if block[0] is not None:
            gate_up = gate_up.view(-1, gate_up.shape[1] // 2, gate_up.shape[2])
        self._round(gate_up, _over_ranks(block, outputs=split, inputs=False))
        self._round(down, _over_ranks(block, outputs=False, inputs=split))
        super().process_weights_after_loading(layer)

    def _round(self, matrices: torch.Tensor, over_ranks: Reduce | None) -> None:
        for matrix in matrices:  # one by one: copies in fp32 of one matrix, not of a layer's experts
            matrix.copy_(rounded(matrix, self.quantization.weights, self.quantization.of_weights, over_ranks))


def _over_ranks(block: Block, outputs: bool, inputs: bool) -> Reduce | None:
    """How a scale is found that spans ranks, which hold parts of the outputs or of the inputs; None: it spans none."""
    spans = (outputs and block[0] is None) or (inputs and block[1] is None)
    return _largest_of_ranks if spans else None


def _largest_of_ranks(largest: torch.Tensor) -> torch.Tensor:
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=get_tp_group().cpu_group)
    return largest
