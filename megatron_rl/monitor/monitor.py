"""The monitor of a run: times the phases of a step, adds derived metrics, and passes all to the sinks.

`GradientNoiseScale` takes the norms that the learner measures (`megatron_rl.learner.gradient_noise`):
B_simple = tr(Σ) / |G|² [McCandlish et al., arXiv 1812.06162, Eq 2.9]: the batch size at which noise and signal of the
gradient are equally strong, estimated from squared gradient norms at two batch sizes (their Appendix A.1).
"""

from __future__ import annotations

import contextlib
import math
import resource
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_rl.config.monitor import AlarmRule, MonitorConfig
from megatron_rl.errors import Fault, OwnWarning
from megatron_rl.monitor.alarms import BUILT_IN, AlarmEvent, Alarms, LogGrowth
from megatron_rl.monitor.run_directory import JsonlSink, RunDirectory
from megatron_rl.monitor.samples import SampleFile, choose, collect, rollout_metrics
from megatron_rl.monitor.sinks import TensorBoardSink, WandbSink
from megatron_rl.monitor.terminal import TerminalSink
from megatron_rl.types import Group


def noise_scale_parts(sq_small: float, sq_big: float, batch_small: float, batch_big: float) -> tuple[float, float]:
    """Return unbiased estimates of (|G|², tr Σ) from |G_small|² and |G_big|² [arXiv 1812.06162, App. A.1].

    Both gradients must be means over their batches (``batch_small`` < ``batch_big`` sequences); ``sq_small`` may be an
    average over several small batches. A single estimate is noisy and |G|² may come out negative: average before
    dividing. Raises ValueError for sizes that are not ordered.
    """
    if not 0 < batch_small < batch_big:
        raise ValueError(f"batch sizes {batch_small} and {batch_big}: two different sizes are needed, small one first")
    grad_sq = (batch_big * sq_big - batch_small * sq_small) / (batch_big - batch_small)
    trace_cov = (sq_small - sq_big) / (1.0 / batch_small - 1.0 / batch_big)
    return grad_sq, trace_cov


class _Remembers:
    """Keeps its `FIELDS` over a restart."""

    FIELDS: tuple[str, ...]

    def state_dict(self) -> dict[str, float]:
        """Return the state as JSON values."""
        return {name: getattr(self, name) for name in self.FIELDS}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Continue from `state_dict`."""
        for name in self.FIELDS:
            setattr(self, name, state[name])


class GradientNoiseScale(_Remembers):
    """Running estimate of B_simple: the exponential mean of tr Σ divided by that of |G|².

    Both means lack the same factor, 1 − decay^n after n observations.
    """

    FIELDS = ("grad_sq", "trace_cov")

    def __init__(self, decay: float) -> None:
        self.decay = decay
        self.grad_sq = self.trace_cov = 0.0

    def observe(self, sq_small: float, sq_big: float, batch_small: float, batch_big: float) -> float:
        """Add one step's squared norms (see `noise_scale_parts`) and return B_simple so far, in sequences."""
        grad_sq, trace_cov = noise_scale_parts(sq_small, sq_big, batch_small, batch_big)
        if math.isfinite(grad_sq) and math.isfinite(trace_cov):
            keep = 1.0 - self.decay
            self.grad_sq = self.decay * self.grad_sq + keep * grad_sq
            self.trace_cov = self.decay * self.trace_cov + keep * trace_cov
        # NaN while the averaged |G|² is not above 0: the noise is too large.
        return self.trace_cov / self.grad_sq if self.grad_sq > 0 else math.nan


class RunningMean(_Remembers):
    """Bias-corrected exponential mean; values that are not finite are skipped."""

    FIELDS = ("sum", "weight")

    def __init__(self, decay: float) -> None:
        self.decay, self.sum, self.weight = decay, 0.0, 0.0

    def observe(self, value: float) -> float:
        """Add one value and return the mean (NaN before the first finite value)."""
        if math.isfinite(value):
            self.sum = self.decay * self.sum + (1.0 - self.decay) * value
            self.weight = self.decay * self.weight + (1.0 - self.decay)
        return self.sum / self.weight if self.weight else math.nan


NOISE_DECAY = 0.9  # of the running means, per step


class NoiseMonitor:
    """Computes `noise/grad_norm_ema`, and `noise/gns` if the learner reports the squared norms that it needs.

    Reads `actor/grad_norm`, and `noise/{sq_small,sq_big,batch_small,batch_big}` (see `noise_scale_parts`).
    """

    INPUTS = ("noise/sq_small", "noise/sq_big", "noise/batch_small", "noise/batch_big")

    def __init__(self, decay: float = NOISE_DECAY) -> None:
        self.grad_norm, self.scale = RunningMean(decay), GradientNoiseScale(decay)

    def observe(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Return this step's noise metrics; those whose inputs are missing are left out."""
        figures = {}
        if "actor/grad_norm" in metrics:
            figures["noise/grad_norm_ema"] = self.grad_norm.observe(metrics["actor/grad_norm"])
        if all(name in metrics for name in self.INPUTS):
            figures["noise/gns"] = self.scale.observe(*(metrics[name] for name in self.INPUTS))
        return figures

    def state_dict(self) -> dict[str, Any]:
        """Return the state as JSON values."""
        return {"grad_norm": self.grad_norm.state_dict(), "scale": self.scale.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict`."""
        self.grad_norm.load_state_dict(state["grad_norm"])
        self.scale.load_state_dict(state["scale"])


class StepCorrelation(_Remembers):
    """Running Pearson correlation of a metric with its step, in constant memory [OH §5, Eq 23].

    For J = Σ A (φ - 1) it is `hacking/J_pcc`: a value well above 0 means that training increases the spurious part of
    the objective. Means and co-moments are updated one observation at a time (Welford), so that a resumed run
    continues bit for bit.
    """

    FIELDS = ("_count", "_mean_step", "_mean_value", "_step_2", "_value_2", "_cross")

    def __init__(self):
        self._count = 0
        self._mean_step = self._mean_value = 0.0
        self._step_2 = self._value_2 = self._cross = 0.0

    def observe(self, step: int, value: float) -> float | None:
        """Add a value and return the correlation so far; None with fewer than 3 observations or a constant metric.

        Values that are not finite are skipped.
        """
        if math.isfinite(value):
            self._count += 1
            from_step, from_value = step - self._mean_step, value - self._mean_value
            self._mean_step += from_step / self._count
            self._mean_value += from_value / self._count
            self._step_2 += from_step * (step - self._mean_step)
            self._value_2 += from_value * (value - self._mean_value)
            self._cross += from_step * (value - self._mean_value)
        scale = math.sqrt(self._step_2 * self._value_2)
        if self._count < 3 or scale == 0:
            return None
        return max(-1.0, min(1.0, self._cross / scale))


# Phases inside one of the two engines. The rest of a step counts as overhead: packing, rewards, weight sync,
# checkpoints, logging. A phase inside one of these counts as part of it.
ENGINE_PHASES = frozenset(
    {"generate", "validate", "reference", "scoring", "teacher", "old_logprobs", "forward_backward", "optimizer"}
)


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

    @contextmanager
    def phase(self, name: str) -> Iterator[Span]:
        """Time the body as `perf/time/<name>` (seconds). Phases may nest and repeat; repeats are added up."""
        span, is_engine = Span(name), name in ENGINE_PHASES
        inside_engine = any(outer in ENGINE_PHASES for outer in self._open)
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


class LostSteps(Fault):
    """Lines of metrics.jsonl could not be written to the end."""

    explains_itself = True


class Monitor:
    """Records steps on the main rank. On other ranks it only times phases and receives the alarms.

    ``recipe_summary`` is printed at the start; its `num_steps` gives progress and ETA. ``share(x)`` returns the main
    rank's ``x`` on every rank (a broadcast), so that all ranks act on the same alarms; one rank needs none.
    ``levels``: rules beside those of the recipe (`level_rules`). ``first_alarms``: rules on the run's first step
    (`Alarms`). ``timer``: of phases, where others have it already.
    """

    def __init__(
        self,
        run_dir: RunDirectory | Path,
        config: MonitorConfig,
        recipe_summary: Mapping[str, Any],
        is_main_rank: bool,
        share: Callable[[Any], Any] = lambda value: value,
        first_alarms: Sequence[AlarmRule] = (),
        levels: Sequence[AlarmRule] = (),
        timer: PhaseTimer | None = None,
    ) -> None:
        self.run_dir = run_dir if isinstance(run_dir, RunDirectory) else RunDirectory(Path(run_dir))
        self.config, self.is_main_rank, self._share = config, is_main_rank, share
        self.timer = timer or PhaseTimer()
        self.alarms = Alarms(config.alarms, [*BUILT_IN, *levels], first_alarms)
        self.gone_off: dict[str, int] = {}  # rule → the first step at which it went off
        self._noise = NoiseMonitor()
        self._growth = LogGrowth(config.growth_window)
        self._hacking = StepCorrelation()
        self._broken: set[str] = set()  # sinks whose failure was already reported
        self._sinks: dict[str, Any] = {}
        if is_main_rank:
            self.run_dir.create()
            self._terminal = TerminalSink(self.run_dir.log, config.terminal == "off", recipe_summary.get("num_steps"))
            self._record = JsonlSink(self.run_dir.metrics)
            self._sinks = {"metrics.jsonl": self._record, "terminal": self._terminal}
            self._samples = SampleFile(self.run_dir.samples)
            if config.tensorboard:
                self._sinks["tensorboard"] = TensorBoardSink(self.run_dir.tensorboard)
            if config.sinks.wandb is not None:
                self._sinks["wandb"] = WandbSink(config.sinks.wandb, self.run_dir)
            self._guard("terminal", self._terminal.header, recipe_summary)

    def phase(self, name: str) -> AbstractContextManager[Span]:
        """Time the body as `perf/time/<name>`; see `PhaseTimer`."""
        return self.timer.phase(name)

    def log(self, message: str, style: str | None = None) -> None:
        """Write one line to the terminal and to log.txt."""
        if self.is_main_rank:
            self._guard("terminal", self._terminal.log, message, style)

    def resume_at(self, step: int) -> None:
        """Drop the records of ``step`` and later from the sinks: at a start, or where the run goes back to ``step``."""
        for name, sink in self._sinks.items():
            self._guard(name, sink.resume_at, step)
        if self.is_main_rank:
            self._guard("samples.jsonl", self._samples.resume_at, step)

    def record(
        self,
        step: int,
        metrics: Mapping[str, float],
        groups: Sequence[Group] | None = None,
        ratios: Mapping[int, dict[str, float] | None] | None = None,
    ) -> list[AlarmEvent]:
        """Write the metrics of ``step`` and return the alarms that went off, the same on every rank.

        Adds the metrics derived from ``groups``, clocks and earlier steps; a metric in ``metrics`` takes precedence
        over a derived one of the same name. ``ratios``: `rho_summary` of the samples (`samples_wanted`) by place. A
        failing sink warns once and never raises here.
        """
        events: list[AlarmEvent] = []
        if self.is_main_rank:
            everything = {
                **(rollout_metrics(groups) if groups else {}),
                **self.timer.collect(),
                **metrics,
            }
            everything |= self._noise.observe(everything) | self._mismatch_growth(step, everything)
            everything |= self._hacking_trend(step, everything)
            events = self.alarms.observe(step, everything)
            everything |= self.alarms.metrics(events)
            for name, sink in self._sinks.items():
                self._guard(name, sink.write, step, everything)
            for event in events:
                self.gone_off.setdefault(event.name, event.step)
                self.log(event.message, style="bold red")
            self._keep_samples(step, groups or (), ratios)
        return self._share(events)

    def _mismatch_growth(self, step: int, metrics: Mapping[str, float]) -> dict[str, float]:
        slope = (
            self._growth.observe(step, float(metrics["mismatch/rho_std"])) if "mismatch/rho_std" in metrics else None
        )
        if slope is None:
            return {}
        return {
            "mismatch/growth": slope.value,
            "mismatch/growth_lower": slope.lower,
            "mismatch/growth_upper": slope.upper,
        }

    def _hacking_trend(self, step: int, metrics: Mapping[str, float]) -> dict[str, float]:
        correlation = self._hacking.observe(step, metrics["hacking/J"]) if "hacking/J" in metrics else None
        return {} if correlation is None else {"hacking/J_pcc": correlation}

    def samples_wanted(self, step: int, groups: Sequence[Group]) -> list[int]:
        """Return the places, in the order of groups and rollouts, of the samples to record; same on every rank."""
        config = self.config.samples
        if not config.every or step % config.every:
            return []
        return sorted(place for _, place in choose(groups, config.number))

    def _keep_samples(
        self, step: int, groups: Sequence[Group], ratios: Mapping[int, dict[str, float] | None] | None
    ) -> None:
        config = self.config.samples
        if not config.every or step % config.every or not groups:
            return
        self._guard("samples.jsonl", self._samples.write, collect(step, groups, config, ratios))

    def _guard(self, name: str, action: Callable[..., None], *arguments: Any) -> None:
        """Call a sink. A failure (such as a full disk) is reported once and tried again at the next step."""
        try:
            action(*arguments)
        except Exception as error:  # noqa: BLE001 - no error of a sink may end the run
            if name not in self._broken:
                self._broken.add(name)
                self._say_broken(name, f"monitor: {name} failed ({error}); training goes on without it")

    def _say_broken(self, name: str, message: str) -> None:
        """Write ``message`` to the terminal and log.txt; as a warning if the terminal is off or has failed.

        The terminal comes first because a thread inside `warnings.catch_warnings` can swallow a warning.
        """
        if name != "terminal":
            self.log(message, style="bold red")
        if name == "terminal" or self.config.terminal == "off":
            warnings.warn(message, OwnWarning, stacklevel=3)

    def state_dict(self) -> dict[str, Any]:
        """Return the monitor's memory of earlier steps as JSON values. Save that of the main rank."""
        return {
            "alarms": self.alarms.state_dict(),
            "noise": self._noise.state_dict(),
            "growth": self._growth.state_dict(),
            "hacking": self._hacking.state_dict(),
            "gone_off": self.gone_off,
        } | ({"unwritten": self._record.waiting} if self.is_main_rank and self._record.waiting else {})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`, so that metrics and alarms continue as in an uninterrupted run."""
        self.alarms.load_state_dict(state["alarms"])
        self._noise.load_state_dict(state["noise"])
        self._growth.load_state_dict(state["growth"])
        self._hacking.load_state_dict(state["hacking"])
        self.gone_off = dict(state.get("gone_off", {}))
        if self.is_main_rank:
            self._record.take_back(state.get("unwritten", []))

    def refuse_lost_steps(self) -> None:
        """Raise `LostSteps` on every rank if lines of metrics.jsonl could not be written. The checkpoint holds them.

        Collective: every rank must call it.
        """
        problem = ""
        if self.is_main_rank:
            with contextlib.suppress(OSError):
                self._record.close()
            if lost := len(self._record.waiting):
                problem = (
                    f"{self.run_dir.metrics}: {lost} steps could not be written, so the run is not complete. "
                    "The checkpoint holds them: make the file writable, then repeat the same command to write them"
                )
        if problem := self._share(problem):
            raise LostSteps(problem)

    def close(self) -> None:
        """Close the sinks at the end of the run and draw the curves if the recipe asks for it."""
        for name, sink in self._sinks.items():
            self._guard(name, sink.close)
        if "wandb" in self._sinks and any(self.run_dir.root.glob("wandb/offline-run-*")):
            self.log(f"offline: `wandb sync {self.run_dir.root}/wandb/offline-run-*` sends the curves")
        if self.is_main_rank and self.config.plots and self.run_dir.metrics.is_file():
            from megatron_rl.monitor.plots import plot_run  # matplotlib is slow to import

            self._guard("plots", plot_run, self.run_dir)
            if (curves := self.run_dir.plots / "curves.png").is_file():
                self.log(f"curves: {curves}")
        if self.gone_off:
            self.log(self._gone_off_text(), style="bold red")

    def _gone_off_text(self) -> str:
        first = ", ".join(f"{name} (step {step})" for name, step in self.gone_off.items())
        return f"alarms went off, first at: {first}; `megatron-rl run why {self.run_dir.root}` says what changed"

    def __enter__(self) -> Monitor:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
