"""The monitor of a run: takes each step's metrics, adds what follows from them, and hands them to the sinks."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from megatron_rl.config.monitor import MonitorConfig
from megatron_rl.errors import OwnWarning
from megatron_rl.monitor.alarms import BUILT_IN, AlarmEvent, Alarms
from megatron_rl.monitor.growth import LogGrowth
from megatron_rl.monitor.hacking import StepCorrelation
from megatron_rl.monitor.jsonl import JsonlSink
from megatron_rl.monitor.noise_scale import NoiseMonitor
from megatron_rl.monitor.rollouts import rollout_metrics
from megatron_rl.monitor.run_directory import RunDirectory
from megatron_rl.monitor.samples import SampleFile, choose, collect, render
from megatron_rl.monitor.sinks import service_sinks
from megatron_rl.monitor.tensorboard import TensorBoardSink
from megatron_rl.monitor.terminal import TerminalSink
from megatron_rl.monitor.timing import PhaseTimer, Span
from megatron_rl.monitor.verl_names import verl_names
from megatron_rl.types import Batch, Group

SAMPLE_CHARACTERS = 400  # of a printed sample response, at most


class Monitor:
    """Records steps on the main rank; on the others only `phase` and the sharing of alarms do anything.

    ``recipe_summary`` is printed at the start; its `num_steps` gives progress and ETA. ``share(x)`` returns the main
    rank's ``x`` on every rank (a broadcast), so that all ranks act on the same alarms; one rank needs none.
    """

    def __init__(
        self,
        run_dir: RunDirectory | Path,
        config: MonitorConfig,
        recipe_summary: Mapping[str, Any],
        is_main_rank: bool,
        share: Callable[[Any], Any] = lambda value: value,
    ) -> None:
        self.run_dir = run_dir if isinstance(run_dir, RunDirectory) else RunDirectory(Path(run_dir))
        self.config, self.is_main_rank, self._share = config, is_main_rank, share
        self.timer = PhaseTimer()
        self.alarms = Alarms(config.alarms, BUILT_IN)
        self._noise = NoiseMonitor(config.noise_ema)
        self._growth = LogGrowth(config.growth_window)
        self._hacking = StepCorrelation()
        self.latest: dict[str, float] = {}  # all metrics of the latest record, on the main rank
        self._broken: set[str] = set()  # sinks that have failed and said so
        self._sinks: dict[str, Any] = {}
        if is_main_rank:
            self.run_dir.create()
            self._terminal = TerminalSink(self.run_dir.log, config.terminal, recipe_summary.get("num_steps"))
            self._sinks = {"metrics.jsonl": JsonlSink(self.run_dir.metrics), "terminal": self._terminal}
            self._samples = SampleFile(self.run_dir.samples, config.samples.max_mib)
            self._room_for_texts = self._samples.max_bytes  # in TensorBoard's files
            if config.tensorboard:
                self._sinks["tensorboard"] = TensorBoardSink(self.run_dir.tensorboard)
            self._sinks |= service_sinks(config.sinks, self.run_dir)
            self.timer.on_enter = lambda name: self._guard("terminal", self._terminal.enter_phase, name)
            self._guard("terminal", self._terminal.header, recipe_summary)

    def phase(self, name: str) -> AbstractContextManager[Span]:
        """Time the body as `perf/time/<name>`; see `PhaseTimer`."""
        return self.timer.phase(name)

    def log(self, message: str, style: str | None = None) -> None:
        """One line to the terminal and log.txt."""
        if self.is_main_rank:
            self._guard("terminal", self._terminal.log, message, style)

    def resume_at(self, step: int) -> None:
        """Forget what the sinks hold of ``step``, the next to be recorded, and later. Call before the first record."""
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
        """End step ``step``: write its metrics with those that follow from ``groups``, clocks and earlier steps.

        A metric in ``metrics`` wins over the monitor's own of the same name. Returns the alarms that went off, the
        same on every rank. ``batch``: of these groups, ``epoch``: of the prompts, for TensorBoard, which also gets
        verl's names (`verl_names`). ``ratios``: `rho_summary` of the samples (`samples_wanted`) by their places. No
        sink's failure reaches the caller: each warns once.
        """
        events: list[AlarmEvent] = []
        if self.is_main_rank:
            everything = {
                **(rollout_metrics(groups, self.config.repetition_ngram) if groups else {}),
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
                self.log(event.message, style="bold red")
            self._show_sample(step, groups)
            self._keep_samples(step, groups or (), ratios)
        return self._share(events)

    def _also_in_tensorboard(self, step: int, batch: Batch | None, epoch: int | None) -> dict[str, float]:
        found = verl_names(step, self.latest, batch)
        return found if epoch is None else found | {"training/epoch": float(epoch)}

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

    def _show_sample(self, step: int, groups: Sequence[Group] | None) -> None:
        every = self.config.show_sample_every
        if not every or step % every or not groups or not groups[0].rollouts:
            return
        prompt, rollout = groups[0].prompt, groups[0].rollouts[0]
        text = rollout.text if len(rollout.text) <= SAMPLE_CHARACTERS else rollout.text[:SAMPLE_CHARACTERS] + " …"
        self.log(f"sample {prompt.id} reward {rollout.reward:g}: {prompt.text!r} -> {text!r}", style="dim")

    def samples_wanted(self, step: int, groups: Sequence[Group]) -> list[int]:
        """Places (in the order of groups and their rollouts) whose text `record` shows: the same on every rank."""
        config, every = self.config.samples, self.config.show_sample_every
        keeps = config.every and step % config.every == 0
        places = [place for _, place in choose(groups, config.number)] if keeps else []
        shows = every and step % every == 0 and groups and groups[0].rollouts
        return sorted({*places, *([0] if shows else [])})

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
        """A full disk does not end training: a sink that fails is reported once and tried again at the next step."""
        try:
            action(*arguments)
        except Exception as error:  # noqa: BLE001 - whatever a sink raises, the run is worth more than its record
            if name not in self._broken:
                self._broken.add(name)
                self._say_broken(name, f"monitor: {name} failed ({error}); training goes on without it")

    def _say_broken(self, name: str, message: str) -> None:
        """In the terminal and in log.txt; as a warning where the terminal is off or is what broke.

        Another thread inside `warnings.catch_warnings` swallows a warning, so the terminal comes first.
        """
        if name != "terminal":
            self.log(message, style="bold red")
        if name == "terminal" or self.config.terminal == "off":
            warnings.warn(message, OwnWarning, stacklevel=3)

    def state_dict(self) -> dict[str, Any]:
        """What the monitor remembers of earlier steps, as plain JSON values; the main rank's is the one to keep."""
        return {
            "alarms": self.alarms.state_dict(),
            "noise": self._noise.state_dict(),
            "growth": self._growth.state_dict(),
            "hacking": self._hacking.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict`: metrics and alarms go on as if the run had never stopped."""
        self.alarms.load_state_dict(state["alarms"])
        self._noise.load_state_dict(state["noise"])
        self._growth.load_state_dict(state["growth"])
        self._hacking.load_state_dict(state["hacking"])

    def close(self) -> None:
        """End of the run: close the sinks and, where the recipe says so, draw the curves."""
        for name, sink in self._sinks.items():
            self._guard(name, sink.close)
        if self.is_main_rank and self.config.plots and self.run_dir.metrics.is_file():
            from megatron_rl.monitor.plots import plot_run  # matplotlib is slow to import

            self._guard("plots", plot_run, self.run_dir)
            self.log(f"curves: {self.run_dir.plots / 'curves.png'}")

    def __enter__(self) -> Monitor:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
