"""vLLM inside the learner's process: what it needs set before it is imported, and what it must not leave behind."""

from __future__ import annotations

import gc
import importlib
import logging
import os
import random
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
import torch

from megatron_rl.errors import Fault, InputError

if TYPE_CHECKING:
    from megatron_rl.config.rollout import RolloutConfig

# Set before vLLM is imported, unless the user has set them.
DEFAULTS = {
    "VLLM_LOGGING_LEVEL": "ERROR",  # its warnings on a CPU are about preloading libraries and chat templates
    "VLLM_NO_USAGE_STATS": "1",  # nothing is sent anywhere
    "HF_HUB_OFFLINE": "1",  # checkpoints are folders; a cluster's nodes may have no network
}
# Set whatever the user has set, because the engine has to live in this process.
REQUIRED = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}


def settle_sums(config: RolloutConfig, device: str) -> None:
    """Call `choose_kernels` on CUDA, or raise `InputError` where an engine's ranks cannot add up their parts."""
    if device == "cpu":
        return
    if problem := sharing_problem(config, torch.cuda.device_count()):
        raise InputError(problem)
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"  # so that a server's other processes keep the choice
    choose_kernels()


def choose_kernels() -> None:
    """Settle, before an engine starts, what vLLM would decide by what it finds on a node.

    vLLM is told that there is no FlashInfer: it would use it where nvcc is on PATH (utils/flashinfer.py:
    has_flashinfer), for sums, and for latent attention's rotations and prompts. DeepGEMM's fp8 products are compiled
    with nvcc as well. Processes that are forked later keep the choice.
    """
    os.environ.update(
        VLLM_ALLREDUCE_USE_FLASHINFER="0",
        VLLM_ALLREDUCE_USE_SYMM_MEM="0",
        VLLM_ALLREDUCE_USE_FLASHINFER_PCIE_IPC="0",
        VLLM_USE_NCCL_SYMM_MEM="0",
        VLLM_USE_DEEP_GEMM="0",
        VLLM_MOE_USE_DEEP_GEMM="0",
    )
    importlib.import_module("vllm.utils.flashinfer")
    for module in list(sys.modules.values()):  # those that have imported the function have it under their own name
        if getattr(module, "__name__", "").startswith("vllm.") and "has_flashinfer" in vars(module):
            module.has_flashinfer = _has_no_flashinfer


def _has_no_flashinfer() -> bool:
    return False


def sharing_problem(config: RolloutConfig, gpus_seen: int, environ: Mapping[str, str] = os.environ) -> str | None:
    """Why ranks of an engine cannot add up their parts as ``config`` says, and what to do; None where they can.

    ``gpus_seen``: by this process. vLLM's own kernel asks CUDA about the GPU of each other rank. While graphs are
    captured it opens memory of the others, which cannot be of expandable segments: the process ends without a message.
    """
    if config.tensor_parallel == 1 or config.all_reduce == "nccl":
        return None
    found = f"rollout.all_reduce: {config.all_reduce} with rollout.tensor_parallel: {config.tensor_parallel}, but "
    if gpus_seen < config.tensor_parallel:
        return (
            f"{found}this rank sees {gpus_seen} GPU{'' if gpus_seen == 1 else 's'} (--gpus-per-task?); let each rank "
            "see all GPUs of its node (--gpus-per-node), or set rollout.all_reduce: nccl"
        )
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        if "expandable_segments:true" in environ.get(name, "").lower().replace(" ", "") and not config.enforce_eager:
            return f"{found}{name} is {environ[name]}; take expandable_segments out, or set rollout.all_reduce: nccl"
    return None


@contextmanager
def contained(rank: int, gpu: int | None = None) -> Iterator[None]:
    """A context to start an engine in. Environment, random states and thread settings are put back afterwards.

    ``gpu``: index of the GPU that the engine has to use among the visible ones, on a CPU None. vLLM takes LOCAL_RANK
    for this index, and refuses one that is not smaller than the number of visible GPUs.

    vLLM seeds every global generator, replaces ``torch.set_num_threads`` by a function that does nothing, and puts
    libraries into ``LD_PRELOAD``, which reward workers would inherit.
    """
    environment = dict(os.environ)
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)
    os.environ.update(REQUIRED)
    # vLLM turns expandable segments off for its memory pool, which cannot be of them, where it finds them under the
    # older of the two names that torch knows.
    if (allocator := os.environ.get("PYTORCH_ALLOC_CONF")) is not None:
        os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", allocator)
    # Read by vLLM's external launcher; ranks that were spawned rather than launched may lack them.
    os.environ.update(RANK=str(rank), LOCAL_RANK=os.environ.get("LOCAL_RANK", str(rank)) if gpu is None else str(gpu))
    set_num_threads = torch.set_num_threads
    # Its warning says at every start that Triton is absent, which is so on every CPU.
    triton_log = logging.getLogger("torch._library.triton")
    triton_log_level = triton_log.level
    triton_log.setLevel(logging.ERROR)
    python_state, numpy_state = random.getstate(), np.random.get_state()
    # Of this rank's device alone: torch would start CUDA on every GPU of the node, hundreds of MiB on each.
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        triton_log.setLevel(triton_log_level)
        torch.set_num_threads = set_num_threads
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        _restore_environment(environment)


def _restore_environment(before: dict[str, str]) -> None:
    """Undo changes of the environment, except of vLLM's own variables, which it reads again while it runs."""
    changed = {name for name in before.keys() | os.environ.keys() if before.get(name) != os.environ.get(name)}
    for name in changed:
        if name.startswith("VLLM_"):
            continue
        if name in before:
            os.environ[name] = before[name]
        else:
            del os.environ[name]


@contextmanager
def global_rng_untouched() -> Iterator[None]:
    """Keep torch's CPU generator as it is: seeded requests draw from it at every step, and the learner uses it, too."""
    state = torch.get_rng_state()
    try:
        yield
    finally:
        torch.set_rng_state(state)


@contextmanager
def compilation(allowed: bool) -> Iterator[None]:
    """Switch torch.compile off unless ``allowed``: functions run as written.

    vLLM compiles one small function of its sampler even in eager mode, which on a CPU costs seconds and needs a C++
    compiler that a bare machine may lack.
    """
    if allowed:
        yield
    else:
        with torch.compiler.set_stance("force_eager"):
            yield


def forget_stacks() -> None:
    """Drop the tracebacks of exceptions that are kept somewhere, are handled by nobody, and reach an engine.

    A traceback holds the frames of all callers, and their variables. vLLM keeps the ImportError of an optional package
    (`vllm.multimodal.media.audio` that of torchcodec, which does not load without FFmpeg). It was raised inside the
    call that made the engine, so it would keep the engine and its weights until the process ends. An exception that is
    being handled, its causes, and errors of this package keep theirs. Looks at all objects once: tenths of a second.
    """
    gc.unfreeze()  # vLLM hides all objects of its start from the collector (freeze_gc_heap), kept exceptions too
    # By type: `isinstance` asks an object for its class, and some objects of torch then warn that they are deprecated.
    kept: list[BaseException] = [
        candidate for candidate in gc.get_objects() if issubclass(type(candidate), BaseException)
    ]
    ours = [error for error in kept if isinstance(error, (Fault, InputError))]
    spared = {id(error) for first in (*_handled(), *ours) for error in _with_causes(first)}
    for error in kept:
        if id(error) not in spared and _reaches_engine(error):
            error.__traceback__ = None


def _handled() -> list[BaseException]:
    """What each thread handles right now. Python 3.11 tells type and traceback along with each."""
    errors = [error[1] if isinstance(error, tuple) else error for error in sys._current_exceptions().values()]
    return [error for error in errors if error is not None]


def _with_causes(error: BaseException) -> list[BaseException]:
    chain, left = [], [error]
    while left:
        if (one := left.pop()) is not None and all(one is not known for known in chain):
            chain.append(one)
            left += [one.__cause__, one.__context__]
    return chain


def _reaches_engine(error: BaseException) -> bool:
    """Whether the traceback of ``error`` holds a frame of vLLM, or of a caller of vLLM in this package."""
    trace, frames = error.__traceback__, []
    while trace is not None:
        frames.append(trace.tb_frame)
        trace = trace.tb_next
    frame = frames[0].f_back if frames else None
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    names = [str(one.f_globals.get("__name__")) for one in frames]
    return any(f"{name}.".startswith(("vllm.", f"{__package__}.")) for name in names)


def destroy_engine_groups() -> None:
    """End vLLM's process groups, those of a failed start too: its own clean-up would destroy the learner's world."""
    from vllm.distributed import parallel_state

    parallel_state.destroy_model_parallel()
    if parallel_state._WORLD is not None:
        parallel_state._WORLD.destroy()
        parallel_state._WORLD = None
    parallel_state._NODE_COUNT = None
    gc.collect()


def sums_of_ranks() -> str:
    """What adds the parts that the ranks of this process's engine have: vLLM's own kernels, or its communicator."""
    from vllm.distributed.parallel_state import get_tp_group

    communicator = get_tp_group().device_communicator
    own = {"ca_comm": "custom", "qr_comm": "quick", "symm_mem_comm": "symmetric memory", "fi_ar_comm": "FlashInfer"}
    parts = {kind: getattr(communicator, name, None) for name, kind in own.items()}
    used = [kind for kind, part in parts.items() if part is not None and not getattr(part, "disabled", False)]
    return ", ".join([*used, type(communicator).__name__])
