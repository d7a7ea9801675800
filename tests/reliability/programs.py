"""What the children of `tests.support.zygote` run: whole runs on the real learner, with a fault at a chosen place.

Responses are made from seeds instead of sampled, so that a run costs a second; the faults here are those of everything
but the engine (tests/e2e/test_engine_faults.py has vLLM's).
"""

import errno
import importlib
import os
import resource
import signal
import time
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError

import megatron_rl.run.start as run_module
from megatron_rl.__main__ import main
from megatron_rl.learner.learner import Learner
from megatron_rl.monitor.monitor import PhaseTimer
from megatron_rl.rollout import RolloutError
from megatron_rl.rollout.generator import RolloutInterrupted
from megatron_rl.rollout.requests import make_groups, make_requests
from megatron_rl.types import Group, Rollout

RECIPE = Path(__file__).parent / "recipe.yaml"


class SeededResponses:
    """A `Generator` whose responses follow from seed and policy version; they grow longer with the step."""

    def __init__(self, recipe: Any) -> None:
        self._config, self.version, self.calls = recipe.rollout, 0, 0
        self.variant = os.environ.get("RESPONSES", "")

    def rollout(self, prompts, num_samples, *, policy_version, step, sampling=None) -> list[Group]:
        assert policy_version == self.version, "a refit is missing"
        self.calls += 1
        requests = make_requests(prompts, num_samples, seed=self._config.seed, step=step)
        return make_groups(prompts, num_samples, [self._response(request, step) for request in requests])

    def _response(self, request, step: int) -> Rollout:
        random = np.random.default_rng([request.seed, self.version])
        length = 1 if self.variant == "empty" else int(random.integers(3, 6) + 2 * step)
        correct = bool(random.integers(2)) and self.variant != "wrong"
        return Rollout(
            id=request.sequence_id,
            prompt=request.prompt.tokens,
            tokens=random.integers(3, 98, length).astype(np.int32),
            inference_logprobs=random.normal(-3.0, 1.0, length).clip(max=-0.01).astype(np.float32),
            finish_reason="stop",
            policy_versions=np.full(length, self.version, dtype=np.int32),
            text=request.prompt.answer if correct and self.variant != "empty" else "",
        )

    def refit(self, weights, policy_version: int) -> None:
        for _, tensor in weights:
            assert tensor.isfinite().all()
        self.version = policy_version

    def sleep(self) -> None: ...
    def wake(self) -> None: ...
    def close(self) -> None: ...
    def stats(self) -> dict[str, float]:
        return {}

    def describe_precision(self) -> dict[str, str]:
        return {}


def train(
    root: str,
    name: str,
    overrides: tuple[str, ...] = (),
    resume: str = "auto",
    faults: tuple[dict, ...] = (),
    responses: str = "",
    flags: tuple[str, ...] = (),
    skipped_updates: tuple[int, ...] = (),
) -> int:
    """`python -m megatron_rl train`, with responses from seeds and ``faults`` armed; its exit status.

    ``skipped_updates``: steps whose update is not made.
    """
    own_update = Learner.update
    Learner.update = lambda self, batch, *rest: {} if batch.step in skipped_updates else own_update(self, batch, *rest)
    os.environ["RESPONSES"] = responses
    made: list[SeededResponses] = []
    run_module.start_generator = lambda recipe, *_, **__: made.append(SeededResponses(recipe)) or made[0]
    for fault in faults:
        arm(**fault)
    settings = [f"name={name}", f"run_root={root}", *overrides]
    arguments = ["train", str(RECIPE), "--resume", resume, *flags]
    return main(arguments + [part for setting in settings for part in ("--set", setting)])


def arm(at: str, do: str, call: int = 1, when: str = "before", **details: Any) -> None:
    """Let ``do`` happen before or after the ``call``-th call of ``at``: "phase:<name>" or "module:attribute"."""
    count = 0

    def happens() -> bool:
        nonlocal count
        count += 1
        return count == call or (details.get("always", False) and count > call)

    module, _, attribute = at.partition(":")
    if module == "phase":
        own_phase = PhaseTimer.phase  # the learner has the timer, the loop goes through the monitor to it

        @contextmanager
        def phase(self, name):
            hit = name == attribute and happens()
            if hit and when == "before":
                FAULTS[do](**details)
            with own_phase(self, name) as span:
                yield span
            if hit and when == "after":
                FAULTS[do](**details)

        PhaseTimer.phase = phase
        return
    owner: Any = importlib.import_module(module)
    *path, last = attribute.split(".")
    for part in path:
        owner = getattr(owner, part)
    function: Callable = getattr(owner, last)

    def wrapped(*arguments, **keywords):
        hit = happens()
        if hit and when == "before":
            FAULTS[do](**details)
        result = function(*arguments, **keywords)
        if hit and when == "after":
            FAULTS[do](**details)
        return result

    setattr(owner, last, wrapped)


def _kill(**_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _terminate(**_: Any) -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def _interrupt(times: int = 1, **_: Any) -> None:
    for _time in range(times):
        os.kill(os.getpid(), signal.SIGINT)


def _disk_full(**_: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def _safetensors_fails(**_: Any) -> None:
    raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")


def _small_files(size: int, **_: Any) -> None:
    """Writes beyond ``size`` bytes of a file fail from now on, as they do on a full disk."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


def _engine_error(**_: Any) -> None:
    raise RolloutError("vLLM failed on prompts a …: the engine is gone")


def _interrupted(**_: Any) -> None:
    raise RolloutInterrupted("a stop was asked for while waiting for a server")


def _worker_error(**_: Any) -> None:
    raise RuntimeError("a reward worker did not start")


def _wait_for(file: str, **_: Any) -> None:
    Path(file).with_suffix(".waiting").touch()
    while not Path(file).exists():
        time.sleep(0.02)


def _clock_jumps(**_: Any) -> None:
    own, start = time.time, time.time()
    time.time = lambda: start - 86400.0 - (own() - start)  # a day back, and backwards from there


FAULTS = {
    "kill": _kill,
    "terminate": _terminate,
    "interrupt": _interrupt,
    "disk full": _disk_full,
    "safetensors fails": _safetensors_fails,
    "small files": _small_files,
    "engine error": _engine_error,
    "interrupted": _interrupted,
    "worker error": _worker_error,
    "wait": _wait_for,
    "clock jumps": _clock_jumps,
}
