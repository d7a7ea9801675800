"""Start-up of the one distributed runtime there is: torch.distributed plus Megatron's process groups."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.jit import disable_jit_fuser

from megatron_rl.config.learner import ParallelConfig
from megatron_rl.errors import Fault, InputError

T = TypeVar("T")


def resolve_device(device: str) -> torch.device:
    """``auto | cuda | cpu`` → the device of this process (``LOCAL_RANK`` picks the GPU)."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())
    return torch.device("cpu")


def initialize(parallel: ParallelConfig, device: str, seed: int) -> torch.device:
    """Join the job (torchrun's or srun's RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT; alone without them).

    Idempotent within a process for the same layout. Model-parallel generators are seeded with ``seed``.
    """
    where = resolve_device(device)
    if where.type == "cuda":
        torch.cuda.set_device(where)
    else:
        # Fused elementwise functions are torch.compile'd by Megatron: ~20 s of C++ compilation per process on a
        # CPU, for nothing.
        disable_jit_fuser()
        # Oversubscribed OpenMP threads cost up to 20×: without a word from the user, each process takes one.
        if "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(1)
    timeout = timedelta(minutes=parallel.timeout_minutes)
    if not dist.is_initialized():
        # Alone, the store is handed over instead of named in the environment, which other processes would inherit.
        if "MASTER_PORT" not in os.environ:
            store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True)
            dist.init_process_group(_backend(where), store=store, rank=0, world_size=1, timeout=timeout)
        else:
            dist.init_process_group(_backend(where), timeout=timeout)
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=parallel.tensor,
            pipeline_model_parallel_size=parallel.pipeline,
            expert_model_parallel_size=parallel.expert,
            expert_tensor_parallel_size=parallel.expert_tensor,
            distributed_timeout_minutes=parallel.timeout_minutes,
        )
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
    return where


def _backend(device: torch.device) -> str:
    # Objects and CPU tensors (groups of rollouts, checkpoints' metadata) travel over gloo also on GPU nodes.
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"


def shutdown() -> None:
    """Leave the job; safe to call twice."""
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()


def world_rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def gather_objects(item: T) -> list[T]:
    """One picklable object of every rank, in rank order, on every rank. Only ever our own ranks' data."""
    if world_size() == 1:
        return [item]
    items: list[Any] = [None] * world_size()
    dist.all_gather_object(items, item)
    return items


def broadcast_object(item: T) -> T:
    """Rank 0's ``item`` on every rank."""
    if world_size() == 1:
        return item
    items = [item]
    dist.broadcast_object_list(items, src=0)
    return items[0]


def any_rank(flag: bool) -> bool:
    """True on every rank if ``flag`` is true on one: how a stop request becomes a decision of all."""
    if world_size() == 1:
        return flag
    value = torch.tensor([int(flag)])
    dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return bool(value.item())


def on_main_rank(action: Callable[[], T]) -> T:
    """What ``action`` returns on rank 0, on every rank; an `InputError` that it raises there is raised on all."""
    if world_size() == 1:
        return action()
    result, problem = None, None
    if world_rank() == 0:
        try:
            result = action()
        except InputError as error:
            problem = str(error)
    result, problem = broadcast_object((result, problem))
    if problem is not None:
        raise InputError(problem)
    return result


def _type_and_text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def together(
    what: str,
    action: Callable[[], T],
    *,
    fault: type[Fault] = Fault,
    describe: Callable[[Exception], str] = _type_and_text,
) -> T:
    """``action()`` of this rank, once it has succeeded on all of them.

    Where it raised on one, every rank raises: that rank's `InputError` as one, anything else as a ``fault`` that begins
    with ``what`` and goes on as ``describe`` says. Without this the other ranks would wait in their next collective for
    one that has left.
    """
    result, problem, found = None, None, None
    try:
        result = action()
    except Exception as error:  # noqa: BLE001 - whatever it is, the other ranks are waiting
        problem = error
        is_input = isinstance(error, InputError)
        found = (is_input, str(error) if is_input else describe(error))
    for rank, failure in enumerate(gather_objects(found)):
        if failure is None:
            continue
        is_input, text = failure
        if is_input:
            raise InputError(text) from problem
        raise fault(f"{what}: " + (f"rank {rank}: " if world_size() > 1 else "") + text) from problem
    return result  # type: ignore[return-value]
