"""What starting an engine in a rank's own process leaves alone."""

import os
import re
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from megatron_rl.config.rollout import RolloutConfig
from megatron_rl.errors import InputError
from megatron_rl.learner import process_groups
from megatron_rl.process.devices import local_gpu
from megatron_rl.rollout import process_state


def test_starting_an_engine_touches_no_gpu_but_its_own(monkeypatch):
    """Random states are put back afterwards: those of all GPUs would start CUDA on each of them."""
    forked, fork_rng = [], torch.random.fork_rng

    def noted(devices=None, *args, **kwargs):
        forked.append(devices)
        return fork_rng([], *args, **kwargs)

    monkeypatch.setattr(torch.random, "fork_rng", noted)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    for initialized in (True, False):
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda answer=initialized: answer)
        with process_state.contained(3):
            pass
    assert forked == [[3], []]


@pytest.mark.parametrize(
    "visible", [None, "0", "3", "3,1,0,2", "5,4"], ids=["all", "one", "another", "permuted", "two a task"]
)
def test_the_engine_takes_the_learners_gpu(visible, monkeypatch):
    """vLLM maps LOCAL_RANK through CUDA_VISIBLE_DEVICES, and asserts that it is smaller than the number of devices."""
    from vllm.platforms.interface import Platform

    class Cuda(Platform):
        device_control_env_var = "CUDA_VISIBLE_DEVICES"

    count = 4 if visible is None else len(visible.split(","))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    for local_rank in range(4):
        monkeypatch.setenv("LOCAL_RANK", str(local_rank))
        learners = process_groups.resolve_device("cuda")
        with process_state.contained(local_rank, local_gpu()):
            engines = int(os.environ["LOCAL_RANK"])
            assert engines < count
            assert Cuda.logical_device_id_to_visible_device_id(engines) == learners.index
        assert os.environ["LOCAL_RANK"] == str(local_rank)


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_expandable_segments_are_off_for_the_engines_memory(name, monkeypatch):
    """CUDA's memory pools cannot be made of them, and vLLM 0.30 knows one of torch's names of the variable."""
    from vllm.device_allocator import cumem

    settings: list[str] = []
    for known in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(known, raising=False)
    monkeypatch.setenv(name, "expandable_segments:True")
    monkeypatch.setattr(torch.cuda.memory, "_set_allocator_settings", settings.append)
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", settings.append, raising=False)  # vLLM 0.32
    pool = (SimpleNamespace(snapshot=list), None)
    monkeypatch.setattr(cumem, "use_memory_pool_with_allocator", lambda *_: nullcontext(pool))
    with process_state.contained(0), cumem.CuMemAllocator().use_memory_pool("weights"):
        assert settings == ["expandable_segments:False"]
    assert settings == ["expandable_segments:False", "expandable_segments:True"]
    assert {known for known in os.environ if known.endswith("_ALLOC_CONF")} == {name}


def test_kernels_are_not_what_a_node_has(monkeypatch):
    from vllm import envs
    from vllm.utils import flashinfer
    from vllm.v1.attention.backends.mla import flashinfer_mla_sparse  # noqa: F401 - imported before the choice

    for name in ("VLLM_ALLREDUCE_USE_FLASHINFER", "VLLM_ALLREDUCE_USE_SYMM_MEM", "VLLM_USE_DEEP_GEMM"):
        monkeypatch.setenv(name, "1")
    for name in ("VLLM_ALLREDUCE_USE_FLASHINFER_PCIE_IPC", "VLLM_USE_NCCL_SYMM_MEM", "VLLM_MOE_USE_DEEP_GEMM"):
        monkeypatch.setenv(name, "1")
    having = [m for m in sys.modules.values() if getattr(m, "__name__", "").startswith("vllm.") and hasattr(m, FOUND)]
    for module in having:
        monkeypatch.setattr(module, FOUND, lambda: True)
    assert flashinfer in having
    assert len(having) > 1
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    process_state.settle_sums(RolloutConfig(), "cuda")
    assert envs.VLLM_WORKER_MULTIPROC_METHOD == "fork"
    assert {getattr(module, FOUND)() for module in having} == {False}
    assert not envs.VLLM_ALLREDUCE_USE_FLASHINFER
    assert not envs.VLLM_ALLREDUCE_USE_SYMM_MEM
    never = ("ALLREDUCE_USE_FLASHINFER_PCIE_IPC", "USE_NCCL_SYMM_MEM", "USE_DEEP_GEMM", "MOE_USE_DEEP_GEMM")
    assert [getattr(envs, f"VLLM_{name}") for name in never] == [False] * 4


FOUND = "has_flashinfer"
SEGMENTS = {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64, expandable_segments: True"}


@pytest.mark.parametrize(
    ("keys", "gpus", "environ", "says"),
    [
        ({}, 8, {}, None),
        ({}, 1, {}, r"sees 1 GPU \(--gpus-per-task\?\); .* or set rollout.all_reduce: nccl"),
        ({"all_reduce": "nccl"}, 1, SEGMENTS, None),
        ({"tensor_parallel": 1}, 1, SEGMENTS, None),
        ({}, 8, SEGMENTS, "PYTORCH_CUDA_ALLOC_CONF is max_split.*take expandable_segments out"),
        ({}, 8, {"PYTORCH_ALLOC_CONF": "expandable_segments:False"}, None),
        ({"enforce_eager": True}, 8, SEGMENTS, None),
    ],
)
def test_ranks_that_cannot_add_up_their_parts_are_told_before_the_engine_starts(keys, gpus, environ, says):
    config = RolloutConfig(**{"tensor_parallel": 2} | keys)
    problem = process_state.sharing_problem(config, gpus, environ)
    assert problem is None if says is None else re.search(says, problem)


def test_an_engine_whose_ranks_cannot_add_up_does_not_start(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(InputError, match=r"or set rollout\.all_reduce: nccl"):
        process_state.settle_sums(RolloutConfig(tensor_parallel=2), "cuda")
    process_state.settle_sums(RolloutConfig(tensor_parallel=2), "cpu")
