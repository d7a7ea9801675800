"""Small random models of every family; those with experts have one layer without them in front, where they can."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tools.dev.make_tiny_checkpoint import EOS_ID, build_model, build_tiny_config, save_checkpoint

YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 32.0,
    "original_max_position_embeddings": 64,
    "mscale": 1.0,
    "mscale_all_dim": 0.8,
}
SIZES = {  # of a config.json whose other keys have their defaults
    "vocab_size": 64,
    "hidden_size": 256,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 32,
}
NEEDED = {  # beside these, because its default is refused
    "deepseek_v3": {
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "first_k_dense_replace": 1,
        "num_key_value_heads": 32,
    },
    "gpt_oss": {"num_local_experts": 8},
    "qwen3_next": {"full_attention_interval": 2},
    "qwen3_5_moe_text": {"full_attention_interval": 2},
    "bailing_moe": {
        "head_dim": 8,
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 2.5,
        "use_qk_norm": True,
        "use_rmsnorm": True,
        "score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "router_dtype": "fp32",
        "partial_rotary_factor": 0.5,
        "rope_theta": 6e5,
    },
}
DELTA_NETS = ("qwen3_next", "qwen3_5_moe_text")
DENSE = ("qwen3", "qwen2", "llama")
_OPTIONS = {
    "qwen2_moe": {"mlp_only_layers": [0]},
    "glm4_moe": {"first_k_dense_replace": 1},
    "deepseek_v3": {"rope_parameters": YARN},
    "bailing_moe": {},
    "olmoe": {},  # has experts in every layer
    "gpt_oss": {},  # likewise
    "qwen3_next": {"layer_types": ["linear_attention", "full_attention", "linear_attention"]},  # likewise
    "qwen3_5_moe_text": {"layer_types": ["linear_attention", "full_attention", "linear_attention"]},  # likewise
}
MOE = tuple(_OPTIONS)  # beside Qwen3-MoE, which most tests are about

ROUNDED = ("qwen2_moe", "glm4_moe", "bailing_moe", "olmoe")  # of these, those whose rollouts may be rounded


def save_family(folder: Path, family: str, seed: int = 0, **options: Any) -> Path:
    """A random ``family`` of three layers in ``folder``, the first of an MoE without experts. Biases are random, too:
    transformers starts them at zero, where a bias that is left out would not show; so are norms beside delta nets.
    Sinks are numbers in bf16, the only ones that vLLM takes."""
    options = _OPTIONS.get(family, {}) | options
    options = {"num_hidden_layers": 3, "initializer_range": 0.12} | options
    config = build_tiny_config(family, "nano", **options)
    model = build_model(config, seed)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            is_wide_norm = family == "olmoe" and name.endswith(("q_norm.weight", "k_norm.weight"))
            is_norm = config.model_type.startswith(("qwen3_next", "qwen3_5")) and name.endswith("norm.weight")
            if is_wide_norm or is_norm or name.endswith(("bias", "sinks")):
                tensor.add_(0.1 * torch.randn(tensor.shape, generator=generator))
            if name.endswith("sinks"):
                tensor.copy_(tensor.bfloat16())
    save_checkpoint(model, folder)
    return folder


def save_wrapper(folder: Path, seed: int = 0) -> Path:
    """A random Qwen3.5 that also reads pictures, as it is published: an expert's tensors with those of all others, and
    a layer for guesses of later tokens."""
    import transformers

    kinds = {"layer_types": ["linear_attention", "full_attention"]}
    text = build_tiny_config("qwen3_5_moe_text", "nano", num_hidden_layers=2, **kinds).to_dict()
    heads = {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16, "num_position_embeddings": 16}
    vision = heads | {"out_hidden_size": text["hidden_size"]}
    torch.manual_seed(seed)
    config = transformers.Qwen3_5MoeConfig(text_config=text, vision_config=vision, eos_token_id=EOS_ID)
    save_checkpoint(transformers.Qwen3_5MoeForConditionalGeneration(config), folder)
    tensors = load_file(folder / "model.safetensors")
    for layer in range(2):
        block = f"model.language_model.layers.{layer}.mlp.experts"
        parts = {
            part: torch.stack([tensors.pop(f"{block}.{e}.{part}_proj.weight") for e in range(text["num_experts"])])
            for part in ("gate", "up", "down")
        }
        tensors[f"{block}.gate_up_proj"] = torch.cat([parts["gate"], parts["up"]], dim=1)
        tensors[f"{block}.down_proj"] = parts["down"]
    tensors["mtp.layers.0.mlp.experts.gate_up_proj"] = torch.zeros(4, 64, 128)
    save_file(tensors, folder / "model.safetensors")
    return folder
