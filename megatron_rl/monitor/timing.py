"""Times the phases of a step, with context managers."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

# Phases inside one of the two engines. The rest of a step counts as overhead: packing, rewards, weight sync,
# checkpoints, logging. A phase inside one of these counts as part of it.
ENGINE_PHASES = frozenset({"generate", "validate", "old_logprobs", "forward_backward", "optimizer"})


@dataclass
class Span:
    """One pass through a phase. If ``tokens`` is set, the phase's tokens per second are reported."""

    name: str
    tokens: int = 0


class PhaseTimer:
    """Adds up seconds and tokens per phase; `collect` returns them as `perf/*` metrics.

    A step's wall time runs from the previous `collect` to its own; the first step begins with its first phase, so that
    start-up does not count. ``clock`` returns seconds and may be replaced between steps.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self._step_start: float | None = None
        self._seconds: dict[str, float] = {}
        self._tokens: dict[str, int] = {}
        self._engine_seconds = 0.0
        self._open: list[str] = []
        self.on_enter: Callable[[str], None] | None = None

    @property
    def current(self) -> str | None:
        """The innermost running phase, or None."""
        return self._open[-1] if self._open else None

    @contextmanager
    def phase(self, name: str) -> Iterator[Span]:
        """Time the body as `perf/time/<name>` (seconds). Phases may nest and repeat; repeats are added up."""
        span, is_engine = Span(name), name in ENGINE_PHASES
        inside_engine = any(outer in ENGINE_PHASES for outer in self._open)
        if self.on_enter is not None:
            self.on_enter(name)
        start = self.clock()
        if self._step_start is None:
            self._step_start = start
        self._open.append(name)
        try:
            yield span
        finally:
            if is_engine and (cuda := _cuda()):
                cuda.synchronize()  # count queued kernels in this phase, not in the next one that waits
            seconds = self.clock() - start
            self._open.pop()
            self._seconds[name] = self._seconds.get(name, 0.0) + seconds
            self._tokens[name] = self._tokens.get(name, 0) + span.tokens
            if is_engine and not inside_engine:
                self._engine_seconds += seconds

    def collect(self) -> dict[str, float]:
        """End the step, reset all sums and return the step's metrics.

        They are `perf/time/<phase>`, `perf/time/step`, `perf/tokens_per_s/<phase>`, `perf/overhead_frac`,
        `perf/reward_frac` (share of the step that waits for rewards) and `perf/peak_mem_gib`.
        """
        now = self.clock()
        wall = now - (now if self._step_start is None else self._step_start)
        metrics = {f"perf/time/{name}": seconds for name, seconds in self._seconds.items()}
        metrics["perf/time/step"] = wall
        for name, tokens in self._tokens.items():
            if tokens and self._seconds[name] > 0:
                metrics[f"perf/tokens_per_s/{name}"] = tokens / self._seconds[name]
        if wall > 0:
            metrics["perf/reward_frac"] = self._seconds.get("reward", 0.0) / wall
            metrics["perf/overhead_frac"] = max(0.0, 1.0 - self._engine_seconds / wall)
        metrics["perf/peak_mem_gib"] = peak_memory_gib()
        self._step_start, self._engine_seconds = now, 0.0
        self._seconds.clear()
        self._tokens.clear()
        return metrics


def peak_memory_gib() -> float:
    """Return this process's peak memory in GiB: allocated on the CUDA device if one is in use, else resident.

    It does not include other processes, such as a separate engine.
    """
    if cuda := _cuda():
        return cuda.max_memory_allocated() / 2**30
    unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss: bytes on macOS, KiB elsewhere
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30


def _cuda() -> Any:
    """`torch.cuda` where this process uses a GPU, else None. Commands that read a run never import torch."""
    torch = sys.modules.get("torch")
    return torch.cuda if torch and torch.cuda.is_initialized() else None
