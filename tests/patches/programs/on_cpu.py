"""Megatron-LM's own programs and tests on a CPU: stand-ins for what torch answers about CUDA, and makes on it.

As a plugin of pytest (`--noconftest -p on_cpu`, with ``OUTCOMES`` in the environment) it runs Megatron's unit tests:
process groups that ask for NCCL get Gloo, and the file ``OUTCOMES`` gets a line of JSON for each file that is read,
each test that is begun, each outcome, and the end. Megatron's own conftest.py, which downloads data, is left out.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import typing
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import pytest
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


def note(test: str, outcome: str) -> None:
    with open(os.environ["OUTCOMES"], "a") as stream:  # a test may end this process
        stream.write(json.dumps([test, outcome]) + "\n")


def pytest_load_initial_conftests() -> None:
    replace_cuda()
    start = torch.distributed.init_process_group

    def start_on_gloo(*positional: Any, **options: Any) -> None:
        start("gloo", **{key: value for key, value in options.items() if key not in ("backend", "device_id")})

    torch.distributed.init_process_group = start_on_gloo
    from megatron.core import utils
    from packaging.version import Version

    utils.get_te_version = lambda: Version("0")  # None, where it is not installed: tests compare it


@pytest.fixture(scope="session")
def tmp_path_dist_ckpt(tmp_path_factory: Any) -> Path:
    """As in Megatron's conftest.py."""
    return tmp_path_factory.mktemp("checkpoints")


def pytest_collectstart(collector: Any) -> None:
    note(collector.nodeid, "read")


def pytest_runtest_logstart(nodeid: str) -> None:
    note(nodeid, "begun")


def pytest_runtest_logreport(report: Any) -> None:
    if report.when == "call" or report.outcome != "passed":
        note(report.nodeid, report.outcome)


def pytest_sessionfinish() -> None:
    note("", "end")
