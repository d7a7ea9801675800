"""Precision inside vLLM: an fp32 head and router, rounded weights, and what the started engine really does.

vLLM has a switch for the head (`head_dtype`). Its routers are linear layers in the model's dtype. They are replaced
here through vLLM's registry of pluggable layers, before weights are loaded, so that weight updates find layers like
others. `overrides` reaches both through the model's configuration. Ling's router is in fp32 in any case. vLLM rounds
its logits; here they stay in fp32.

`Rounded` is for layers of a CPU engine whose weights are rounded to a smaller type and computed with in the engine's
dtype. vLLM 0.30 quantizes while it loads ("online"), at the start and again at every layerwise reload, where it has
kernels for fp8: on CUDA, and on CPUs with AMX. Here the same hook, a layer's ``process_weights_after_loading``, rounds
the loaded weight in place and lets the unquantized method go on, so that any CPU computes with the weights that a GPU's
codes and scales stand for. The matrices and so the blocks are vLLM's: query, key and value in one; gate and up in one,
but those of an expert each by itself, because vLLM pads each to whole blocks; and each rank's part by itself, unless a
scale spans ranks.

What is rounded is what vLLM rounds: linear layers and experts. Embeddings, head and norms are no such layers. The
router and the gate of a shared expert are linear layers to vLLM, which would round them: `KEPT_LAYERS` names them,
here and on CUDA.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.distributed as dist
from vllm.config import get_current_vllm_config
from vllm.distributed.parallel_state import get_tp_group
from vllm.model_executor.custom_op import PluggableLayer, op_registry_oot
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.fused_moe.router.gate_linear import GateLinear
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import (
    LinearBase,
    ReplicatedLinear,
    UnquantizedLinearMethod,
    register_weight_loader_v2_supported_method,
)
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig as Method
from vllm.model_executor.layers.quantization.online import fp8 as online
from vllm.model_executor.models.bailing_moe import BailingMoE

from megatron_rl.config.learner import PrecisionConfig
from megatron_rl.config.rollout import Block, QuantizationConfig, in_words
from megatron_rl.process import fp32_products
from megatron_rl.rollout.weights import Reduce, rounded

_ROUTER_KEY = "rollout_router_dtype"  # in the model's configuration; vLLM and transformers do not read it
_ROUTER_SUFFIX = (".mlp.gate", ".mlp.router")
_PRODUCTS = "products"  # of a described model: what its process does to fp32 matrices
_ONLINE = {
    online.Fp8PerBlockOnlineLinearMethod: (128, 128),
    online.Fp8PerBlockOnlineMoEMethod: (128, 128),
    online.Fp8PtpcOnlineLinearMethod: (1, None),
    online.Fp8PtpcOnlineMoEMethod: (1, None),
    online.Fp8PerTensorOnlineLinearMethod: (None, None),
    online.Fp8PerTensorOnlineMoEMethod: (None, None),
}
"""vLLM's methods of quantization while loading → the block that shares a scale."""
_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


def overrides(precision: PrecisionConfig) -> dict[str, str]:
    """What to add to the model's configuration (vLLM's `hf_overrides`)."""
    changes = {"head_dtype": "float32"} if precision.rollout_head else {}
    return changes | ({_ROUTER_KEY: "float32"} if precision.rollout_router else {})


def _is_asked_for(prefix: str) -> bool:
    """Whether ``prefix`` names a router, and the configuration asks for routers in fp32."""
    model = get_current_vllm_config().model_config
    return prefix.endswith(_ROUTER_SUFFIX) and getattr(model.hf_config, _ROUTER_KEY, None) == "float32"


class Router(ReplicatedLinear):
    """A replicated linear layer that is kept and computed in fp32 if it is a router and the configuration asks for it.
    Other layers of the kind are unchanged."""

    def __init__(self, *args: Any, prefix: str = "", **kwargs: Any):
        self.in_fp32 = _is_asked_for(prefix)
        if self.in_fp32:
            kwargs["params_dtype"] = torch.float32
        super().__init__(*args, prefix=prefix, **kwargs)

    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x.float() if self.in_fp32 else x)


class Gate(GateLinear):
    """DeepSeek's router, likewise; experts get its logits in fp32."""

    def __init__(self, *args: Any, prefix: str = "", **kwargs: Any):
        self.in_fp32 = _is_asked_for(prefix)
        if self.in_fp32:
            kwargs |= {"params_dtype": torch.float32, "out_dtype": torch.float32}
        super().__init__(*args, prefix=prefix, **kwargs)

    def forward(self, x: torch.Tensor) -> Any:
        # vLLM's own pass looks at the type of a weight that its CPU backend has packed away by then.
        return ReplicatedLinear.forward(self, x.float()) if self.in_fp32 else super().forward(x)


for theirs, ours in ((ReplicatedLinear, Router), (GateLinear, Gate)):
    if theirs.__name__ not in op_registry_oot:  # a re-import must not raise
        PluggableLayer.register_oot(ours, name=theirs.__name__)


def ling_experts(block: torch.nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    """`BailingMoE.forward`, without its rounding of the router's logits to the model's dtype.

    hidden [N, H] → [N, H].
    """
    if isinstance(block.gate, GateLinear):  # from vLLM 0.31 on
        logits, _ = block.gate(hidden)
    else:
        logits = block.gate(hidden.to(block.gate.weight.dtype))
    return block.experts(hidden_states=hidden, router_logits=logits)


BailingMoE.forward = ling_experts


def describe_model(model: torch.nn.Module) -> dict[str, str]:
    """Router dtype, types of weights and cache, attention backend, rope and activation of a loaded model, for the
    precision contract; and what its process does to fp32 matrices, which `described` puts in the place of fp32."""
    dtypes: dict[str, str] = {}
    weights: set[str] = set()
    for name, module in model.named_modules():
        kind = type(module).__name__
        if isinstance(module, LinearBase | RoutedExperts) and not name.endswith(_ROUTER_SUFFIX):
            weights.add(_type_of_weights(module))
        if name.endswith(_ROUTER_SUFFIX):
            in_fp32 = getattr(module, "in_fp32", False)
            dtype = getattr(module, "params_dtype", None) or module.weight.dtype  # GLM-4.5's is a plain linear layer
            dtypes["router"] = "fp32" if in_fp32 else _NAMES[dtype]
        elif kind == "Attention":
            dtypes["attention"] = f"vLLM {module.attn_backend.get_name()}"
            dtypes["kv cache"] = "fp8" if module.kv_cache_dtype.startswith("fp8") else module.kv_cache_dtype
        elif "RotaryEmbedding" in kind:
            dtypes["rope"] = _implementation(module)
        elif kind in ("SiluAndMul", "RoutedExperts"):
            dtypes["activation"] = _implementation(module)
    device = next(model.parameters()).device
    products = fp32_products.measured_products(device, transformer_engine=False, triton=device.type == "cuda")
    return dtypes | {"weights": ", ".join(sorted(weights)), _PRODUCTS: fp32_products.worst(products)}


def _type_of_weights(module: torch.nn.Module) -> str:
    """As the contract says it: what `Rounded` or vLLM rounds them to, or the engine's dtype."""
    method = module.quant_method
    if (ours := getattr(method, "quantization", None)) is not None:
        return ours.words
    if type(method) in _ONLINE:
        return in_words("fp8", _ONLINE[type(method)])
    return "dtype" if "Unquantized" in type(method).__name__ else type(method).__name__


def _implementation(module: torch.nn.Module) -> str:
    kernel = getattr(getattr(getattr(module, "quant_method", None), "moe_kernel", None), "fused_experts", None)
    if kernel is not None:
        return f"vLLM {type(kernel).__name__}"
    method = getattr(module, "_forward_method", None)
    return f"vLLM {type(module).__name__}.{getattr(method, '__name__', 'forward')}"


def describe_engine(llm: Any) -> dict[str, str]:
    """What the started engine computes in what type: the rollout column of the precision contract."""
    return described(llm.llm_engine.model_config, llm.apply_model(describe_model)[0])


def described(configuration: Any, model: dict[str, str]) -> dict[str, str]:
    """Return the rollout column of the contract, from vLLM's model configuration and `describe_model`."""
    dtypes = describe_configuration(configuration) | model
    return fp32_products.as_measured(dtypes, {"engine": dtypes.pop(_PRODUCTS)})


def describe_configuration(model: Any) -> dict[str, str]:
    """The part of it that vLLM's model configuration says."""
    return {
        "dtype": _NAMES[model.dtype],
        "head": _NAMES[model.head_dtype],
        "log-probs": "after temperature" if model.logprobs_mode.startswith("processed") else "before temperature",
    }


ROUNDED = "megatron_rl_rounded"
ROUNDING_KEY = "megatron_rl_quantization"  # in vLLM's `additional_config`
KEPT_LAYERS = ("*.mlp.gate", "*.mlp.shared_expert_gate")
"""Names of linear layers that stay as they are: routers, and what weights a shared expert."""


@register_quantization_config(ROUNDED)
class Rounded(Method):
    """Which layers are rounded; vLLM asks while it builds the model."""

    def __init__(self) -> None:
        super().__init__()

    @classmethod
    def get_name(cls) -> str:
        return ROUNDED

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
        raise NotImplementedError(f"{ROUNDED} is not a format of checkpoints")

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        wanted = QuantizationConfig.model_validate(get_current_vllm_config().additional_config[ROUNDING_KEY])
        if isinstance(layer, LinearBase):
            kept = any(fnmatchcase(prefix, pattern) for pattern in KEPT_LAYERS)
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
