"""Start-up of the one distributed runtime there is: torch.distributed plus Megatron's process groups."""

from __future__ import annotations

import atexit
import os
from datetime import timedelta

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.jit import disable_jit_fuser

from megatron_rl.config.learner import ParallelConfig
from megatron_rl.process.devices import default_device, leave_default_stream, local_gpu, refuse_shared_gpus
from megatron_rl.process.host import wait_until_idle

DEFAULT_TIMEOUT_MINUTES = 30.0
_replica: dist.ProcessGroup | None = None  # where it is not Megatron's model-parallel group


def resolve_device(device: str) -> torch.device:
    """Return the device of this process for ``auto | cuda | cpu`` (`process.devices.local_gpu` picks the GPU)."""
    if device == "auto":
        device = default_device()
    if device == "cuda":
        return torch.device("cuda", local_gpu())
    return torch.device("cpu")


def initialize(parallel: ParallelConfig, device: str, seed: int, longest_wait_s: float | None = None) -> torch.device:
    """Join the job (torchrun's or srun's RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT; alone without them).

    Idempotent within a process for the same layout. Model-parallel generators are seeded with ``seed``.
    ``longest_wait_s``: how long a rank may rightly wait for another, whose engine is still generating; without
    ``parallel.timeout_minutes`` collectives give up no earlier.
    """
    where = resolve_device(device)
    if where.type == "cuda":
        if parallel.tensor > 1:
            # Megatron overlaps tensor-parallel communication with products by the order of their launches, which one
            # connection keeps. CUDA reads it when it starts.
            os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
        torch.cuda.set_device(where)
        leave_default_stream(where)
    else:
        # Megatron compiles fused elementwise functions: about 20 s of C++ compilation a process on a CPU, without
        # gain.
        disable_jit_fuser()
        # Oversubscribed OpenMP threads cost up to 20×, so each process takes one unless the user says otherwise.
        if "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(1)
    minutes = parallel.timeout_minutes or max(DEFAULT_TIMEOUT_MINUTES, (longest_wait_s or 0.0) / 60)
    timeout = timedelta(minutes=minutes)
    if not dist.is_initialized():
        atexit.unregister(wait_until_idle)  # once, however often the process joins
        atexit.register(wait_until_idle)
        # A job of one process gets its store as an object: other processes would inherit the environment variables.
        if "MASTER_PORT" not in os.environ:
            store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True)
            dist.init_process_group(_backend(where), store=store, rank=0, world_size=1, timeout=timeout)
        else:
            dist.init_process_group(_backend(where), timeout=timeout)
        if where.type == "cuda":
            refuse_shared_gpus(where.index)
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=parallel.tensor,
            pipeline_model_parallel_size=parallel.pipeline,
            context_parallel_size=parallel.context,
            expert_model_parallel_size=parallel.expert,
            expert_tensor_parallel_size=parallel.expert_tensor,
            distributed_timeout_minutes=minutes,
        )
        _join_replica(parallel, timeout)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
    return where


def _join_replica(parallel: ParallelConfig, timeout: timedelta) -> None:
    """Megatron has a group of the tensor- and pipeline-parallel ranks, none with the context-parallel ones as well."""
    global _replica
    _replica = None
    if parallel.context == 1:
        return
    p, data = parallel, parallel_state.get_data_parallel_world_size()
    order = parallel_state.RankGenerator(p.tensor, 1, data, p.pipeline, p.context, order="tp-cp-ep-dp-pp")
    _replica, _ = dist.new_subgroups_by_enumeration(order.get_ranks("tp-cp-pp"), timeout=timeout)


def replica_group() -> dist.ProcessGroup:
    """The ranks of this data-parallel replica: all that have a part of its sequences or of its layers."""
    return _replica or parallel_state.get_model_parallel_group()


def _backend(device: torch.device) -> str:
    # Objects and CPU tensors (groups of rollouts, checkpoints' metadata) travel over gloo also on GPU nodes. With gloo
    # beside NCCL, torch also sends barriers without a device over gloo, such as Megatron's own. The world has no
    # device_id: it would open a communicator for each of Megatron's groups by a collective of all ranks, and with 256
    # ranks there are more than a thousand such groups.
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"


def shutdown() -> None:
    """Leave the job; safe to call twice."""
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()
