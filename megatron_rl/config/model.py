"""The `model` and `runtime` sections: what is trained, and where."""

from __future__ import annotations

from typing import Annotated, Literal

from megatron_rl.config.base import AnyPath, LookedUp, Section


class ModelConfig(Section):
    path: Annotated[AnyPath, LookedUp(hub="model")]
    """Folder of the starting checkpoint in Hugging Face layout (config.json, *.safetensors, tokenizer files).
    A relative path is looked up from the recipe's folder first, then from the working directory. Else a name of the
    Hugging Face hub, OWNER/NAME or OWNER/NAME@REVISION, that `hf download` has brought into the local cache."""


class RuntimeConfig(Section):
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """`auto` is CUDA where PyTorch sees a device. The only switch between a laptop and a cluster."""
