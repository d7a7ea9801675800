"""Small random models of every family; those with experts have one layer without them in front."""

from __future__ import annotations

from pathlib import Path

import torch

from tools.dev.make_tiny_checkpoint import build_model, build_tiny_config, save_checkpoint

DENSE = ("qwen3", "qwen2", "llama")
_DENSE_FIRST = {"qwen2_moe": {"mlp_only_layers": [0]}, "glm4_moe": {"first_k_dense_replace": 1}, "deepseek_v3": {}}
MOE = tuple(_DENSE_FIRST)  # beside Qwen3-MoE, which most tests are about


def save_family(folder: Path, family: str) -> Path:
    """A random ``family`` of three layers in ``folder``, the first of an MoE without experts. Biases are random, too:
    transformers starts them at zero, where a bias that is left out would not show."""
    config = build_tiny_config(
        family, "nano", num_hidden_layers=3, initializer_range=0.12, **_DENSE_FIRST.get(family, {})
    )
    model = build_model(config)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if name.endswith("bias"):
                tensor.copy_(0.1 * torch.randn(tensor.shape, generator=generator))
    save_checkpoint(model, folder)
    return folder
