"""Where the time of a step goes: phases as context managers."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

# Phases spent inside one of the two engines. All other time of a step is our own and counts as overhead:
# packing, rewards, weight sync, checkpoints, logging. A phase inside one of these counts as part of it.
ENGINE_PHASES = frozenset({"generate", "validate", "old_logprobs", "forward_backward", "optimizer"})


@dataclass
class Span:
    """One pass through a phase; set ``tokens`` to have a rate reported."""

    name: str
    tokens: int = 0


class PhaseTimer:
    """Collects seconds and tokens per phase until `collect` turns them into `perf/*` metrics.

    A step's wall time runs from the end of the step before (the previous `collect`) to its own `collect`; the first
    step begins with the first phase, so that start-up does not count.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._step_start: float | None = None
        self._seconds: dict[str, float] = {}
        self._tokens: dict[str, int] = {}
        self._engine_seconds = 0.0
        self._open: list[str] = []
        self.on_enter: Callable[[str], None] | None = None

    @property
    def current(self) -> str | None:
        """The innermost phase that is running, if any."""
        return self._open[-1] if self._open else None

    @contextmanager
    def phase(self, name: str) -> Iterator[Span]:
        """Time the body as `perf/time/<name>` (seconds); phases may nest, and one name may come several times."""
        span, is_engine = Span(name), name in ENGINE_PHASES
        inside_engine = any(outer in ENGINE_PHASES for outer in self._open)
        if self.on_enter is not None:
            self.on_enter(name)
        start = self._clock()
        if self._step_start is None:
            self._step_start = start
        self._open.append(name)
        try:
            yield span
        finally:
            if is_engine and torch.cuda.is_initialized():
                torch.cuda.synchronize()  # kernels still queued belong to this phase, not to whoever waits next
            seconds = self._clock() - start
            self._open.pop()
            self._seconds[name] = self._seconds.get(name, 0.0) + seconds
            self._tokens[name] = self._tokens.get(name, 0) + span.tokens
            if is_engine and not inside_engine:
                self._engine_seconds += seconds

    def collect(self) -> dict[str, float]:
        """End the step: `perf/time/<phase>`, `perf/time/step`, `perf/tokens_per_s/<phase>`, `perf/overhead_frac`,
        `perf/peak_mem_gib`; then start over."""
        now = self._clock()
        wall = now - (now if self._step_start is None else self._step_start)
        metrics = {f"perf/time/{name}": seconds for name, seconds in self._seconds.items()}
        metrics["perf/time/step"] = wall
        for name, tokens in self._tokens.items():
            if tokens and self._seconds[name] > 0:
                metrics[f"perf/tokens_per_s/{name}"] = tokens / self._seconds[name]
        if wall > 0:
            metrics["perf/overhead_frac"] = max(0.0, 1.0 - self._engine_seconds / wall)
        metrics["perf/peak_mem_gib"] = peak_memory_gib()
        self._step_start, self._engine_seconds = now, 0.0
        self._seconds.clear()
        self._tokens.clear()
        return metrics


def peak_memory_gib() -> float:
    """Most memory held so far, GiB: allocated on the CUDA device where one is in use, else the process's resident
    set. What another process holds (a separate engine) is not in it."""
    if torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated() / 2**30
    unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss: bytes on macOS, KiB elsewhere
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30
