"""vLLM inside the learner's process: what it needs set before it is imported, and what it must not leave behind."""

from __future__ import annotations

import gc
import logging
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

# Set before vLLM is imported, unless the user has set them.
DEFAULTS = {
    "VLLM_LOGGING_LEVEL": "ERROR",  # its warnings on a CPU are about preloading libraries and chat templates
    "VLLM_NO_USAGE_STATS": "1",  # nothing is sent anywhere
    "HF_HUB_OFFLINE": "1",  # checkpoints are folders; a cluster's nodes may have no network
}
# Set whatever the user has set, because the engine has to live in this process.
REQUIRED = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}


@contextmanager
def contained(rank: int) -> Iterator[None]:
    """A context to start an engine in. Environment, random states and thread settings are put back afterwards.

    vLLM seeds every global generator, replaces ``torch.set_num_threads`` by a function that does nothing, and puts
    libraries into ``LD_PRELOAD``, which reward workers would inherit.
    """
    environment = dict(os.environ)
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)
    os.environ.update(REQUIRED)
    # Read by vLLM's external launcher; ranks that were spawned rather than launched may lack them.
    os.environ.update(RANK=str(rank), LOCAL_RANK=os.environ.get("LOCAL_RANK", str(rank)))
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
    """Unless ``allowed``, functions marked for torch.compile run as they are written.

    vLLM compiles one small function of its sampler even in eager mode, which on a CPU costs seconds and needs a C++
    compiler that a bare machine may lack.
    """
    if allowed:
        yield
    else:
        with torch.compiler.set_stance("force_eager"):
            yield


def destroy_engine_groups() -> None:
    """End vLLM's process groups and nothing else: its own clean-up would destroy the learner's world as well."""
    from vllm.distributed import parallel_state

    parallel_state.destroy_model_parallel()
    if parallel_state._WORLD is not None:
        parallel_state._WORLD.destroy()
        parallel_state._WORLD = None
    parallel_state._NODE_COUNT = None
    gc.collect()
