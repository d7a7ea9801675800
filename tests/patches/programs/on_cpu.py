"""Megatron-LM's own programs on a CPU: stand-ins for what torch answers about CUDA, and makes on it."""

from __future__ import annotations

import importlib.util
import sys
import typing
from contextlib import nullcontext
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import torch
import typing_extensions
from torch.overrides import TorchFunctionMode

UNUSED = ("six", "wandb")  # imported by tokenizers and logs that nothing here uses


class OnCpu(TorchFunctionMode):
    """Tensors that are asked for on CUDA are made on the CPU."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if "cuda" in str(kwargs.get("device", "")):
            kwargs["device"] = "cpu"
        return function(*args, **kwargs)


class Stream:
    def wait_stream(self, other: Stream) -> None:
        pass


def replace_cuda() -> None:
    answers = {
        "device_count": 1,
        "set_device": None,
        "current_device": "cpu",
        "current_stream": Stream(),
        "stream": nullcontext(),
        "synchronize": None,
        "empty_cache": None,
        "memory_allocated": 0,
        "max_memory_allocated": 0,
        "memory_reserved": 0,
        "max_memory_reserved": 0,
        "device_memory_used": 0,
        "get_device_capability": (8, 0),
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, lambda *_, answer=answer, **__: answer)
    torch.cuda.get_rng_state = lambda *_: torch.get_rng_state()
    torch.cuda.set_rng_state = lambda state, *_: torch.set_rng_state(state)
    torch.cuda.manual_seed = torch.manual_seed
    torch.cuda.Stream = Stream
    torch.Tensor.cuda = torch.nn.Module.cuda = lambda self, *_, **__: self
    kernels = ModuleType("megatron.core.transformer.custom_layers.batch_invariant_kernels")  # Triton's
    kernels.__getattr__ = lambda name: MagicMock()
    sys.modules[kernels.__name__] = kernels
    for name in UNUSED:
        if importlib.util.find_spec(name) is None:
            sys.modules[name] = MagicMock(__spec__=None, __path__=[])
    typing.override = typing_extensions.override  # Python 3.11 has none; from 0.18 on megatron/training imports it
    OnCpu().__enter__()
