"""Precision inside vLLM: an fp32 head and an fp32 router, and what the started engine really does.

vLLM has a switch for the head (`head_dtype`). Its router is a plain linear layer in the model's dtype; here that layer
is replaced through vLLM's own registry of pluggable layers, before weights are loaded, so that weight updates find a
layer like any other. `overrides` reaches both through the model's configuration.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.config import get_current_vllm_config
from vllm.model_executor.custom_op import PluggableLayer, op_registry_oot
from vllm.model_executor.layers.linear import ReplicatedLinear

from megatron_rl.config.precision import PrecisionConfig

_ROUTER_KEY = "router_dtype"  # in the model's configuration; vLLM and transformers do not read it
_ROUTER_SUFFIX = ".mlp.gate"
_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


def overrides(precision: PrecisionConfig) -> dict[str, str]:
    """What to add to the model's configuration (vLLM's `hf_overrides`)."""
    found = {"head_dtype": "float32"} if precision.rollout_head else {}
    return found | ({_ROUTER_KEY: "float32"} if precision.rollout_router else {})


class Router(ReplicatedLinear):
    """A replicated linear layer that is kept and computed in fp32 if it is a router and the configuration asks for it.
    Other layers of the kind are unchanged."""

    def __init__(self, *args: Any, prefix: str = "", **kwargs: Any):
        model = get_current_vllm_config().model_config
        self.in_fp32 = prefix.endswith(_ROUTER_SUFFIX) and getattr(model.hf_config, _ROUTER_KEY, None) == "float32"
        if self.in_fp32:
            kwargs["params_dtype"] = torch.float32
        super().__init__(*args, prefix=prefix, **kwargs)

    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x.float() if self.in_fp32 else x)


if ReplicatedLinear.__name__ not in op_registry_oot:  # a re-import must not raise
    PluggableLayer.register_oot(Router, name=ReplicatedLinear.__name__)


def describe_model(model: torch.nn.Module) -> dict[str, str]:
    """Router dtype, attention backend, rope and activation of a loaded model, for the precision contract."""
    found: dict[str, str] = {}
    for name, module in model.named_modules():
        kind = type(module).__name__
        if name.endswith(_ROUTER_SUFFIX):
            in_fp32 = getattr(module, "in_fp32", False)
            found["router"] = "fp32" if in_fp32 else _NAMES[module.params_dtype]
        elif kind == "Attention":
            found["attention"] = f"vLLM {module.attn_backend.get_name()}"
        elif "RotaryEmbedding" in kind:
            found["rope"] = _implementation(module)
        elif kind in ("SiluAndMul", "RoutedExperts"):
            found["activation"] = _implementation(module)
    return found


def _implementation(module: torch.nn.Module) -> str:
    kernel = getattr(getattr(getattr(module, "quant_method", None), "moe_kernel", None), "fused_experts", None)
    if kernel is not None:
        return f"vLLM {type(kernel).__name__}"
    method = getattr(module, "_forward_method", None)
    return f"vLLM {type(module).__name__}.{getattr(method, '__name__', 'forward')}"


def describe_engine(llm: Any) -> dict[str, str]:
    """What the started engine computes in what type: the rollout column of the precision contract."""
    return describe_configuration(llm.llm_engine.model_config) | llm.apply_model(describe_model)[0]


def describe_configuration(model: Any) -> dict[str, str]:
    """The part of it that vLLM's model configuration says."""
    return {
        "dtype": _NAMES[model.dtype],
        "head": _NAMES[model.head_dtype],
        "log-probs": "after temperature" if model.logprobs_mode.startswith("processed") else "before temperature",
    }
