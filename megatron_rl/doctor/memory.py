"""Memory of a GPU at each phase of a step of the tiny model, against what `plan` expects."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_rl.doctor.checks import Outcome, Setting, failed, passed, tiny
from megatron_rl.doctor.engine import generate, start_engine
from megatron_rl.doctor.learner import made_up_batch, overrides

if TYPE_CHECKING:
    from megatron_rl.config import Recipe
    from megatron_rl.instruments.plan.memory import MemoryPlan

GIB = 1 << 30
UTILIZATION = 0.5
# Phase measured → phase of the plan, and the items of the plan that are not there.
PHASES = {
    "engine awake": ("generating", ()),
    "engine asleep": ("learning", ("activations and temporaries", "fragmentation")),
    "forward and backward, optimizer": ("learning", ()),
    "refit": ("handing over the weights", ()),
    "save": ("generating", ()),  # it has the room that the cache takes with the next request
}


class GpuMeter:
    """Bytes in use on this rank's GPU: of all that the process and its engine hold, and the peak of a phase."""

    def __init__(self) -> None:
        import torch

        self._cuda = torch.cuda
        self.capacity = torch.cuda.mem_get_info()[1]

    def now(self) -> float:
        free, total = self._cuda.mem_get_info()
        return total - free

    def begin(self) -> None:
        self._cuda.reset_peak_memory_stats()
        self._reserved = self._cuda.memory_reserved()
        self._used = self.now()

    def peak(self) -> float:
        """Since `begin`: what PyTorch took at most on top of what was in use. An engine's memory is in what is used."""
        return max(self.now(), self._used + self._cuda.max_memory_reserved() - self._reserved)


def memory(setting: Setting) -> Outcome:
    """One step as `train` makes it, and a save beside the engine that has its weights and no cache yet."""
    from megatron_rl.learner.process_groups import resolve_device

    resolve_device(setting.device)
    recipe = tiny(
        setting, *overrides({}, "bf16"), "rollout.dtype=bf16", f"rollout.gpu_memory_utilization={UTILIZATION}"
    )
    meter = GpuMeter()
    return judge_memory(measure(recipe, meter, Path(setting.scratch)), predict(recipe, meter.capacity))


def measure(recipe: Recipe, meter: Any, folder: Path) -> dict[str, float]:
    """Bytes in use by phase: peaks, but for the two states of the engine."""
    from megatron_rl.learner.learner import Learner
    from megatron_rl.run.engines import hand_over

    bytes_used = {}
    learner = Learner(recipe)
    with closing(start_engine(recipe, learner)) as generator:
        generate(recipe, learner, generator)
        bytes_used["engine awake"] = meter.now()
        generator.sleep()
        bytes_used["engine asleep"] = meter.now()
        meter.begin()
        learner.update(made_up_batch(0))
        bytes_used["forward and backward, optimizer"] = meter.peak()
        meter.begin()
        hand_over(learner, generator)
        bytes_used["refit"] = meter.peak()
        meter.begin()
        learner.save(folder, {})
        bytes_used["save"] = meter.peak()
    return bytes_used


def predict(recipe: Recipe, capacity: float) -> dict[str, float]:
    """Bytes by phase that `plan` expects on one GPU of this size."""
    from megatron_rl.instruments.plan import GPUS, make_workload
    from megatron_rl.instruments.plan.memory import memory_plan
    from megatron_rl.model.architecture import read_architecture

    gpu = replace(GPUS["h100-80"], memory_gib=capacity / GIB)  # of its figures, memory alone is used here
    plan = memory_plan(make_workload(recipe, read_architecture(recipe.model.path), gpu, 1, 1))
    return {name: _planned(plan, phase, absent) for name, (phase, absent) in PHASES.items()}


def _planned(plan: MemoryPlan, phase: str, absent: tuple[str, ...]) -> float:
    (items,) = [one.items for one in plan.phases if one.name == phase]
    return sum(size for what, size in items if what not in absent)


def judge_memory(measured: dict[str, float], planned: dict[str, float]) -> Outcome:
    """No phase takes more than the plan says: a run that fits by the plan then fits."""
    table = {
        name: {"measured GiB": round(size / GIB, 2), "plan GiB": round(planned[name] / GIB, 2)}
        for name, size in measured.items()
    }
    if over := [name for name in measured if measured[name] > planned[name]]:
        told = "; ".join(f"{name} {measured[name] / GIB:.2f} of {planned[name] / GIB:.2f} GiB" for name in over)
        return failed(
            f"more than `plan` expects: {told}",
            "See whether gpu-memory passed: others' memory counts, too. If it did, leave so much more free than the "
            "plan says (rollout.gpu_memory_utilization), and report it: a constant of instruments/plan/hardware.py is "
            "too small.",
            memory=table,
        )
    worst = max(measured, key=lambda name: measured[name] / planned[name])
    return passed(
        f"every phase takes at most what `plan` expects; nearest: {worst}, {measured[worst] / planned[worst]:.0%}",
        memory=table,
    )
