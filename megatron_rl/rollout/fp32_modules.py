"""Precision inside vLLM: an fp32 head and an fp32 router, and what the started engine really does.

vLLM has a switch for the head (`head_dtype`). Its routers are linear layers in the model's dtype. They are replaced
here through vLLM's registry of pluggable layers, before weights are loaded, so that weight updates find layers like
others. `overrides` reaches both through the model's configuration. Ling's router is in fp32 in any case. vLLM rounds
its logits; here they stay in fp32.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.config import get_current_vllm_config
from vllm.model_executor.custom_op import PluggableLayer, op_registry_oot
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.fused_moe.router.gate_linear import GateLinear
from vllm.model_executor.layers.linear import LinearBase, ReplicatedLinear
from vllm.model_executor.layers.quantization.online import fp8 as online
from vllm.model_executor.models.bailing_moe import BailingMoE

from megatron_rl.config.learner import PrecisionConfig
from megatron_rl.config.rollout import in_words
from megatron_rl.process import fp32_products

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
    """As the contract says it: what `rollout.quantized_layers` or vLLM rounds them to, or the engine's dtype."""
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
