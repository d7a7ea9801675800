"""The `model` and `runtime` sections: what is trained, and where."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from megatron_rl.config.base import Section


class ModelConfig(Section):
    path: Path
    """Folder of the starting checkpoint in Hugging Face layout (config.json, *.safetensors, tokenizer files).
    A relative path is looked up from the recipe's folder first, then from the working directory."""


class RuntimeConfig(Section):
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """`auto` is CUDA where PyTorch sees a device. The only switch between a laptop and a cluster."""
