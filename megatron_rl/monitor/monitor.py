"""The monitor of a run: adds derived metrics to those of each step and passes all to the sinks."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from megatron_rl.config.monitor import AlarmRule, MonitorConfig
from megatron_rl.errors import Fault, OwnWarning
from megatron_rl.monitor.alarms import BUILT_IN, AlarmEvent, Alarms, LogGrowth
from megatron_rl.monitor.noise_scale import NoiseMonitor, StepCorrelation
from megatron_rl.monitor.run_directory import JsonlSink, RunDirectory
from megatron_rl.monitor.samples import SampleFile, choose, collect, render, rollout_metrics
from megatron_rl.monitor.sinks import TensorBoardSink, service_sinks, verl_names
from megatron_rl.monitor.terminal import TerminalSink
from megatron_rl.monitor.timing import PhaseTimer, Span
from megatron_rl.types import Batch, Group


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
        self._noise = NoiseMonitor(config.noise_ema)
        self._growth = LogGrowth(config.growth_window)
        self._hacking = StepCorrelation()
        self.latest: dict[str, float] = {}  # all metrics of the latest record, on the main rank
        self._broken: set[str] = set()  # sinks whose failure was already reported
        self._sinks: dict[str, Any] = {}
        if is_main_rank:
            self.run_dir.create()
            self._terminal = TerminalSink(self.run_dir.log, config.terminal, recipe_summary.get("num_steps"))
            self._record = JsonlSink(self.run_dir.metrics)
            self._sinks = {"metrics.jsonl": self._record, "terminal": self._terminal}
            self._samples = SampleFile(self.run_dir.samples, config.samples.max_mib)
            self._room_for_texts = self._samples.max_bytes  # that sample texts may still take in TensorBoard's files
            if config.tensorboard:
                self._sinks["tensorboard"] = TensorBoardSink(self.run_dir.tensorboard)
            self._sinks |= service_sinks(config.sinks, self.run_dir)
            self.timer.on_enter = lambda name: self._guard("terminal", self._terminal.enter_phase, name)
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
        batch: Batch | None = None,
        epoch: int | None = None,
        ratios: Mapping[int, dict[str, float] | None] | None = None,
    ) -> list[AlarmEvent]:
        """Write the metrics of ``step`` and return the alarms that went off, the same on every rank.

        Adds the metrics derived from ``groups``, clocks and earlier steps; a metric in ``metrics`` takes precedence
        over a derived one of the same name. ``batch`` (of these groups) and ``epoch`` (of the prompts) go to
        TensorBoard, together with verl's names (`verl_names`). ``ratios``: `rho_summary` of the samples
        (`samples_wanted`) by place. A failing sink warns once and never raises here.
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
            self.latest = everything
            for name, sink in self._sinks.items():
                also = self._also_in_tensorboard(step, batch, epoch) if name == "tensorboard" else {}
                self._guard(name, sink.write, step, everything | also)
            for event in events:
                self.gone_off.setdefault(event.name, event.step)
                self.log(event.message, style="bold red")
            self._keep_samples(step, groups or (), ratios)
        return self._share(events)

    def _also_in_tensorboard(self, step: int, batch: Batch | None, epoch: int | None) -> dict[str, float]:
        values = verl_names(step, self.latest, batch)
        return values if epoch is None else values | {"training/epoch": float(epoch)}

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
        samples = collect(step, groups, config, ratios)
        self._guard("samples.jsonl", self._samples.write, samples)
        if (board := self._sinks.get("tensorboard")) is not None:
            texts = {f"samples/{number}": render(sample) for number, sample in enumerate(samples, start=1)}
            self._room_for_texts -= sum(len(text.encode()) for text in texts.values())
            if self._room_for_texts >= 0:
                self._guard("tensorboard", board.write_texts, step, texts)

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
        """Raise `Fault` on every rank if lines of metrics.jsonl could not be written. The checkpoint holds them.

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
            raise Fault(problem)

    def close(self) -> None:
        """Close the sinks at the end of the run and draw the curves if the recipe asks for it."""
        for name, sink in self._sinks.items():
            self._guard(name, sink.close)
        wandb = self.config.sinks.wandb
        if "wandb" in self._sinks and wandb is not None and wandb.mode == "offline":
            self.log(f"offline: `wandb sync {self.run_dir.root}/wandb/offline-run-*` sends the curves")
        if self.is_main_rank and self.config.plots and self.run_dir.metrics.is_file():
            from megatron_rl.monitor.plots import plot_run  # matplotlib is slow to import

            self._guard("plots", plot_run, self.run_dir)
            self.log(f"curves: {self.run_dir.plots / 'curves.png'}")
        if self.gone_off:
            self.log(self._gone_off_text(), style="bold red")

    def _gone_off_text(self) -> str:
        first = ", ".join(f"{name} (step {step})" for name, step in self.gone_off.items())
        return f"alarms went off, first at: {first}; `megatron-rl run why {self.run_dir.root}` says what changed"

    def __enter__(self) -> Monitor:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
