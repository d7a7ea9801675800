"""Which device a process uses, and how ranks wait for each other on it."""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING, Any

from megatron_rl.errors import InputError

if TYPE_CHECKING:
    import torch


def default_device() -> str:
    """What `runtime.device: auto` stands for: "cuda" where the driver names a GPU, else "cpu".

    The driver is asked through NVML. The CUDA runtime, asked in its place, could not be used by any process that is
    forked from this one, and vLLM forks its workers.
    """
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    try:
        import torch
    except ModuleNotFoundError:  # commands that need no engine run without it
        return "cpu"
    return "cuda" if torch.cuda.is_available() else "cpu"


def local_gpu() -> int:
    """Index of this rank's GPU among the GPUs that it sees. Learner, engine and doctor all use this one rule.

    The index is LOCAL_RANK modulo the number of visible GPUs. So a rank that sees all GPUs of its node takes the one of
    its own number, and a rank that sees a single one (`--gpus-per-task=1`) takes that one. Raises `InputError` where no
    GPU is visible. `refuse_shared_gpus` finds ranks that would share a GPU.
    """
    import torch

    if (count := torch.cuda.device_count()) == 0:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        raise InputError(
            "runtime.device: cuda, but this rank sees no GPU "
            f"(CUDA_VISIBLE_DEVICES is {'not set' if visible is None else repr(visible)}); ask Slurm for GPUs "
            "(--gpus-per-node=8), or use runtime.device: cpu"
        )
    return int(os.environ.get("LOCAL_RANK", 0)) % count


def refuse_shared_gpus(index: int) -> None:
    """Raise `InputError` on every rank where two ranks of the job use one GPU. Collective.

    ``index``: of this rank's GPU. GPUs are compared by the driver's identifiers, which do not depend on
    CUDA_VISIBLE_DEVICES. The message of 100 bytes a rank goes over gloo.
    """
    import torch

    from megatron_rl.process.ranks import gather_objects, world_size

    if world_size() == 1:
        return
    node = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    own = (str(torch.cuda.get_device_properties(index).uuid), node, torch.cuda.device_count())
    if problem := sharing(gather_objects(own)):
        raise InputError(problem)


def sharing(gpus: list[tuple[str, str, int]]) -> str:
    """Which ranks use one GPU together, and what to do; "" if none do, or if they do on purpose.

    ``gpus``: for each rank its GPU's identifier, its node and how many GPUs it sees. On purpose, for tests: with
    MRL_SHARE_GPUS=1, where each rank has an NCCL_HOSTID of its own, or with NCCL's NCCL_MULTI_RANK_GPU_ENABLE=1 (2.30).
    """
    if "1" in (os.environ.get("MRL_SHARE_GPUS"), os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE")):
        return ""
    users: dict[str, list[int]] = {}
    for rank, (gpu, _, _) in enumerate(gpus):
        users.setdefault(gpu, []).append(rank)
    shared = [ranks for ranks in users.values() if len(ranks) > 1]
    if not shared:
        return ""
    _, node, seen = gpus[shared[0][0]]
    there = sum(name == node for _, name, _ in gpus)
    return (
        f"ranks {', '.join(map(str, shared[0]))} use the same GPU of node {node}"
        + (f", and {len(shared) - 1} more GPUs are shared" if len(shared) > 1 else "")
        + f": {there} ranks run on that node, and each of these sees {seen} GPU{'' if seen == 1 else 's'}. "
        f"Start one rank a GPU: --gpus-per-node={there}, or --ntasks-per-node (MRL_RANKS_PER_NODE, --nproc-per-node) "
        "no larger than the number of GPUs"
    )


def barrier_devices(device: torch.device) -> list[int] | None:
    """What `torch.distributed.barrier` takes as ``device_ids`` on a rank that computes on ``device``.

    NCCL's barrier is an all-reduce on a GPU, and NCCL guesses which. `torch.cuda.set_device` has no part in its guess:
    it takes the smallest index that the group has used, and in a new group the rank modulo the number of GPUs. A guess
    that differs from the GPU of the tensors opens a second communicator, on which ranks wait for each other for ever.
    """
    import torch

    if device.type == "cpu" and torch.accelerator.current_accelerator() is not None:
        return None  # a build for GPUs takes an index for a GPU's, and there may be none
    return [device.index or 0]


def leave_default_stream(device: torch.device) -> None:
    """Make another stream than CUDA's default one current: before anything is computed, and once vLLM is imported.

    vLLM makes a stream of its own current when it starts, unless it knows of a current one, because no graph can be
    captured on the default stream. It knows of those that were set after its import (`torch.cuda.set_stream` is then
    its own function), so the stream that is current already is set once more. Autograd binds a parameter's gradient to
    the stream that was current when its accumulator was made. A learner built before vLLM started would otherwise wait
    for streams at every parameter.
    """
    import torch

    if device.type == "cuda" and torch.cuda.is_available():
        own = torch.cuda.Stream(device) if is_default(torch.cuda) else torch.cuda.current_stream()
        torch.cuda.set_stream(own)


def is_default(cuda: Any) -> bool:
    return cuda.current_stream() == cuda.default_stream()
