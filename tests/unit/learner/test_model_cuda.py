"""What the learner does on a GPU before it has one: devices, groups, layers, refusals. The device is replaced."""

from __future__ import annotations

import importlib.util
import os
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

from megatron_rl.config.learner import LearnerConfig, ParallelConfig
from megatron_rl.config.rollout import RolloutConfig
from megatron_rl.errors import InputError
from megatron_rl.exact import invariant
from megatron_rl.layers import attention
from megatron_rl.learner import learner as learner_module
from megatron_rl.learner import model, optimizer, process_groups
from megatron_rl.model.architecture import read_architecture
from megatron_rl.monitor import run_directory
from megatron_rl.monitor.monitor import PhaseTimer, peak_memory_gib
from tests.support.tiny import MODEL, tiny_recipe

GPU = torch.device("cuda")


class Reached(Exception):
    """The call that a test is about."""


@pytest.fixture
def calls(monkeypatch) -> list[tuple]:
    """What `initialize` asks for, in order, on a node of eight GPUs."""
    made: list[tuple] = []

    def noted(name: str, wanted: str = ""):
        return lambda *args, **kwargs: made.append((name, args, kwargs.get(wanted, os.environ.get(wanted))))

    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    monkeypatch.setenv("LOCAL_RANK", "11")
    monkeypatch.setenv("MASTER_PORT", "1")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "set_device", noted("device", "CUDA_DEVICE_MAX_CONNECTIONS"))
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    monkeypatch.setattr(dist, "init_process_group", noted("world", "timeout"))
    monkeypatch.setattr(parallel_state, "model_parallel_is_initialized", lambda: False)
    monkeypatch.setattr(parallel_state, "initialize_model_parallel", noted("groups", "distributed_timeout_minutes"))
    monkeypatch.setattr(tensor_parallel, "model_parallel_cuda_manual_seed", noted("seed"))
    yield made
    os.environ.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)


@pytest.mark.parametrize(("tensor", "connections"), [(1, None), (2, "1")])
def test_tensor_parallel_ranks_keep_the_order_of_launches(calls, tensor, connections):
    """Set before CUDA starts, whatever a site's files say."""
    assert process_groups.initialize(ParallelConfig(tensor=tensor), "cuda", 0) == torch.device("cuda", 3)
    assert calls[0] == ("device", (torch.device("cuda", 3),), connections)
    assert calls[1][:2] == ("world", ("cpu:gloo,cuda:nccl",))


def test_a_users_number_of_connections_stays(calls, monkeypatch):
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "8")
    process_groups.initialize(ParallelConfig(tensor=2), "cuda", 0)
    assert calls[0][2] == "8"


@pytest.mark.parametrize(("own", "wait", "minutes"), [(None, None, 30), (None, 7200.0, 120), (45, 7200.0, 45)])
def test_collectives_wait_as_long_as_a_rollout_may_take(calls, own, wait, minutes):
    process_groups.initialize(ParallelConfig(timeout_minutes=own), "cuda", 0, wait)
    assert [(name, given) for name, _, given in calls if name in ("world", "groups")] == [
        ("world", timedelta(minutes=minutes)),
        ("groups", minutes),
    ]


def test_the_learner_says_how_long_a_rollout_may_take(monkeypatch):
    def initialize(parallel: Any, device: str, seed: int, longest_wait_s: float) -> None:
        raise Reached(longest_wait_s)

    monkeypatch.setattr(learner_module, "initialize", initialize)
    with pytest.raises(Reached) as reached:
        learner_module.Learner(tiny_recipe(rollout={"deadline_s": 7200.0, "dtype": "fp32"}))
    assert reached.value.args[0] >= 7200.0


def test_no_deadline_is_no_wait_to_wait_for():
    assert RolloutConfig(deadline_s=None).hang_limit_s is None


def test_exact_modes_kernels_are_loaded_before_the_first_pass_on_a_gpu(monkeypatch):
    loaded: list[str] = []
    monkeypatch.setattr(invariant, "kernel_ops", lambda: loaded.append("kernels"))
    assert isinstance(invariant.batch_invariant(torch.device("cpu")), invariant.BatchInvariant)
    assert not loaded
    assert isinstance(invariant.batch_invariant(GPU), invariant.BatchInvariant)
    assert loaded == ["kernels"]


def test_exact_mode_wants_triton_on_a_gpu(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        InputError, match=r"rollout\.engine: exact on cuda.*Triton is not installed.*or use runtime\.dev"
    ):
        model.build_model(read_architecture(MODEL), LearnerConfig(), GPU, exact=True)


def test_a_transformer_engine_that_megatron_cannot_import_is_refused(monkeypatch):
    """Else a run on GPUs would go on with Megatron's own layers, and nobody would know."""
    monkeypatch.setattr(model, "HAVE_TE", False)
    monkeypatch.setattr(model.importlib.util, "find_spec", lambda name: object())
    with pytest.raises(InputError, match=r"TransformerEngine is installed, but Megatron-Core cannot import it"):
        model.use_transformer_engine(GPU)
    monkeypatch.setattr(model.importlib.util, "find_spec", lambda name: None)
    assert model.use_transformer_engine(GPU) is False
    monkeypatch.setattr(model, "HAVE_TE", True)
    assert model.use_transformer_engine(GPU) is True
    assert model.use_transformer_engine(torch.device("cpu")) is False


def test_attention_over_packed_rows_is_asked_for_before_the_model_is_built(monkeypatch):
    def refuse(config: Any) -> None:
        raise Reached(config)

    monkeypatch.setattr(model, "HAVE_TE", True)
    monkeypatch.setattr(model, "transformer_config", lambda *args: "its configuration")  # fused parts want TE itself
    monkeypatch.setattr(model, "refuse_unfused_attention", refuse)
    with pytest.raises(Reached, match="its configuration"):
        model.build_model(read_architecture(MODEL), LearnerConfig(), GPU)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_unfused_attention_is_refused_with_the_gpus_capability(monkeypatch, dtype):
    monkeypatch.setattr(attention, "packed_attention", lambda config: "unfused")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    config = attention.TransformerConfig(num_layers=1, hidden_size=64, num_attention_heads=2, params_dtype=dtype)
    if dtype == torch.float32:
        attention.refuse_unfused_attention(config)
        return
    with pytest.raises(InputError, match=r"compute capability 8\.0\).*install 'flash-attn"):
        attention.refuse_unfused_attention(config)


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_gloo_twins_of_groups_where_nccl_is_the_backend(monkeypatch, device):
    asked: dict[str, Any] = {}

    class Wrapped:
        def __init__(self, *args: Any):
            self.config = args[0]

    def adam(settings: Any, models: Any, **kwargs: Any) -> Any:
        asked.update(kwargs)
        return type("Adam", (), {"scale_loss": None})()

    monkeypatch.setattr(optimizer, "DistributedDataParallel", Wrapped)
    monkeypatch.setattr(optimizer, "get_megatron_optimizer", adam)
    module = torch.nn.Linear(1, 1)
    module.config = type("Config", (), {})()
    optimizer.with_optimizer(module, LearnerConfig(), torch.device(device), None)
    assert asked == {"use_gloo_process_groups": device == "cuda"}


def test_hardware_names_every_gpu(monkeypatch):
    properties = type("Properties", (), {"name": "NVIDIA H100 80GB HBM3", "total_memory": 81559 << 20})
    monkeypatch.setattr(run_directory, "default_device", lambda: "cuda")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 29, 7))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    hardware = run_directory.hardware()
    assert hardware["gpus"] == [{"name": "NVIDIA H100 80GB HBM3", "memory_gib": 79.6}] * 2
    assert hardware["cuda"] == "13.0"
    assert hardware["nccl"] == "2.29.7"


def test_a_phase_ends_when_its_kernels_have(monkeypatch):
    """Time and memory of a phase are the GPU's, where it is in use."""
    order: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: order.append("synchronized"))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 3 << 30)

    def clock() -> float:
        order.append("clock")
        return float(len(order))

    timer = PhaseTimer(clock)
    with timer.phase("generate"), timer.phase("reward"):
        pass
    assert order[-2:] == ["synchronized", "clock"]
    assert order.count("synchronized") == 1, "a phase without kernels waits for none"
    assert peak_memory_gib() == 3.0
