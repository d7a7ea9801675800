"""A closed engine gives its memory back, so that a second one can start in the same process. One start of two engines.

On CUDA, what is left of the first stops the second: "CuMem allocator can only be used for one instance per process".
"""

from __future__ import annotations

import gc
import sys
import weakref
from contextlib import closing
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_rl.config.rollout import RolloutConfig
from megatron_rl.errors import Fault
from megatron_rl.rollout import process_state
from megatron_rl.rollout.generator import RolloutError
from megatron_rl.rollout.vllm_engine import VllmGenerator
from tests.support import heap
from tests.support.tiny import MODEL


def weights_of(generator: Any) -> list[weakref.ref]:
    """The parameters and the cache of a running engine."""
    runner = generator._llm.llm_engine.model_executor.driver_worker.worker.model_runner
    return [weakref.ref(tensor) for tensor in (*runner.model.parameters(), *runner.kv_caches)]


def alive(tensors: list[weakref.ref]) -> int:
    gc.collect()
    return sum(tensor() is not None for tensor in tensors)


def test_two_engines_one_after_the_other(tmp_path):
    from megatron_rl.doctor.checks import Setting, tiny
    from megatron_rl.doctor.engine import _NO_TRIAL, SMALL, generate, start_engine
    from megatron_rl.doctor.learner import overrides
    from megatron_rl.learner.learner import Learner
    from megatron_rl.learner.process_groups import shutdown

    setting = Setting("cpu", 1, str(tmp_path), scratch=str(tmp_path))
    recipe = tiny(setting, *overrides({}, "fp32"), *SMALL, "rollout.dtype=fp32", *_NO_TRIAL)
    learner = Learner(recipe)
    at_shutdown = []
    for _ in range(2):
        with closing(start_engine(recipe, learner, sleeps=False)) as generator:
            assert not generator._sleeps
            generate(recipe, learner, generator)
            tensors = weights_of(generator)
            executor = generator._llm.llm_engine.engine_core.engine_core.model_executor
            own = executor.shutdown
            executor.shutdown = lambda own=own, tensors=tensors: (own(), at_shutdown.append(alive(tensors)))
            del executor, own
        assert tensors
        assert alive(tensors) == 0
    learner.close()
    shutdown()
    assert at_shutdown == [0, 0], "vLLM frees the pool that they lie in right there"


def test_an_engine_starts_after_one_that_did_not(monkeypatch):
    """The first has the learner's world, which ends before the second starts."""
    from vllm.v1.worker.cpu_worker import CPUWorker

    def start() -> VllmGenerator:
        return VllmGenerator(RolloutConfig(dtype="fp32", kv_cache_gib=0.0625), MODEL, max_prompt_length=16)

    def broken(self: CPUWorker, **_: Any) -> None:
        raise ValueError("no such weights")

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with monkeypatch.context() as patch:
        patch.setattr(CPUWorker, "load_model", broken)
        with pytest.raises(RolloutError, match="vLLM did not start: ValueError: no such weights"):
            start()
    dist.destroy_process_group()
    with closing(start()) as generator:
        assert weights_of(generator)


class Kept:
    """What a frame holds."""


def fails_in(module: str, holder: list) -> weakref.ref:
    """Raise inside a function of ``module`` and keep the exception in ``holder``; what its frame holds."""
    space = {"__name__": module, "Kept": Kept, "weakref": weakref}
    exec(
        "def start(holder):\n    held = Kept()\n    try:\n        raise ImportError('optional')\n"
        "    except ImportError as error:\n        holder.append(error)\n    return weakref.ref(held)\n",
        space,
    )
    return space["start"](holder)


@pytest.fixture
def own_freezing(monkeypatch):
    """The collector's own functions, which tests do without."""
    with monkeypatch.context() as patch:
        patch.setattr(gc, "freeze", heap.FREEZE)
        patch.setattr(gc, "unfreeze", heap.UNFREEZE)
        yield
    heap.hide()


@pytest.mark.parametrize(("module", "is_dropped"), [("vllm.multimodal", True), ("vllm", True), ("elsewhere", False)])
def test_a_kept_exception_keeps_no_engine(module, is_dropped, own_freezing):
    holder: list[BaseException] = []
    held = fails_in(module, holder)
    gc.collect()
    assert held() is not None, "a traceback keeps its frames"
    gc.freeze()  # as vLLM does when an engine has started
    process_state.forget_stacks()
    gc.collect()
    assert (held() is None) == is_dropped
    assert (holder[0].__traceback__ is None) == is_dropped
    assert str(holder[0]) == "optional"


def test_an_exception_that_is_handled_keeps_its_traceback():
    holder: list[BaseException] = []
    fails_in("vllm.v1", holder)
    try:
        raise Fault("generation failed") from holder[0]
    except Fault:
        process_state.forget_stacks()
    assert holder[0].__traceback__ is not None
    assert sys.exception() is None


def test_a_fault_that_is_kept_keeps_its_causes():
    holder: list[BaseException] = []
    fails_in("vllm.v1", holder)
    fault = Fault("generation failed")
    fault.__cause__ = holder[0]
    process_state.forget_stacks()
    assert holder[0].__traceback__ is not None


@pytest.mark.parametrize("place", ["beside the learner", "server"])
def test_an_engine_that_shut_down_has_no_weights(place):
    from megatron_rl.rollout.worker_extension import ServerWeightTransfer, StreamWeightTransfer

    kind = ServerWeightTransfer if place == "server" else StreamWeightTransfer
    transfer, model = kind.__new__(kind), torch.nn.Linear(1, 1)
    transfer.model = transfer._default_model = model
    transfer.shutdown()
    held = weakref.ref(model)
    del model
    assert alive([held]) == 0
