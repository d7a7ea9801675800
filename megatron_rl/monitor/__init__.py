"""Metrics, alarms, samples and plots of a run: what it records and shows."""

from megatron_rl.monitor.alarms import AlarmEvent, Alarms, wanted
from megatron_rl.monitor.environment import write_environment
from megatron_rl.monitor.jsonl import read_metrics
from megatron_rl.monitor.mismatch import mismatch_metrics
from megatron_rl.monitor.monitor import Monitor
from megatron_rl.monitor.run_directory import RunDirectory
from megatron_rl.monitor.timing import ENGINE_PHASES, PhaseTimer

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
