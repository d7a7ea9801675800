"""Metrics, alarms, samples and plots of a run: what it records and shows."""

from typing import Any

from megatron_rl.monitor.alarms import AlarmEvent, Alarms, wanted
from megatron_rl.monitor.monitor import ENGINE_PHASES, Monitor, PhaseTimer
from megatron_rl.monitor.run_directory import RunDirectory, read_metrics, write_environment

__all__ = [
    "ENGINE_PHASES",
    "AlarmEvent",
    "Alarms",
    "Monitor",
    "PhaseTimer",
    "RunDirectory",
    "mismatch_metrics",
    "read_metrics",
    "wanted",
    "write_environment",
]


def __getattr__(name: str) -> Any:
    """Import `mismatch_metrics` when it is asked for: it needs torch, and commands that read a run do not."""
    if name == "mismatch_metrics":
        from megatron_rl.objective.metrics import mismatch_metrics

        return mismatch_metrics
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
