"""`lab plan`: what a study costs on a cluster, by the arithmetic of `megatron-rl plan`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megatron_rl.checkpoint.known_models import shape_of
from megatron_rl.config import load_recipe
from megatron_rl.lab.jobs import LoadedStudy
from megatron_rl.plan import GPUS, make_plan, make_workload


@dataclass(frozen=True)
class ArmCost:
    """What the runs of one arm need."""

    arm: str
    gpus: int
    num_steps: int
    step_seconds: float
    num_seeds: int
    problems: list[str]

    @property
    def run_hours(self) -> float:
        """Of one run, validation and start-up apart."""
        return self.num_steps * self.step_seconds / 3600

    @property
    def gpu_hours(self) -> float:
        """Of all seeds."""
        return self.run_hours * self.gpus * self.num_seeds


def cost(
    loaded: LoadedStudy, gpu: str, nodes: int | None, gpus_per_node: int | None, mean_response: float | None
) -> list[ArmCost]:
    """Cost of every arm on ``gpu``. The size is that of the base recipe's name (…-4n8g-…) where none is given.

    Raises `InputError` where neither says the size or the model is not known.
    """
    base, study = load_recipe(loaded.base), loaded.study
    architecture, _ = shape_of(base.model.path)
    found = []
    for job in loaded.jobs(base.run_root, study.seeds[:1]):
        recipe = loaded.recipe(job).model_copy(update={"name": base.name})
        work = make_workload(recipe, architecture, GPUS[gpu], nodes, gpus_per_node, mean_response)
        plan = make_plan(work)
        found.append(
            ArmCost(job.arm, work.ranks, recipe.num_steps, plan.time.total, len(study.seeds), list(plan.problems))
        )
    return found


def render(loaded: LoadedStudy, gpu: str, costs: list[ArmCost]) -> Iterator[str]:
    """A table for a terminal, the sum, and what does not fit."""
    yield f"{'arm':20}  GPUs  steps  s/step  hours a run  seeds  GPU-hours"
    for row in costs:
        yield (
            f"{row.arm:20}  {row.gpus:4d}  {row.num_steps:5d}  {row.step_seconds:6.0f}  {row.run_hours:11.1f}  "
            f"{row.num_seeds:5d}  {row.gpu_hours:9,.0f}"
        )
    total = sum(row.gpu_hours for row in costs)
    runs = sum(row.num_seeds for row in costs)
    yield f"{loaded.study.name}: {runs} runs, {total:,.0f} GPU-hours of {gpu}, validation apart"
    for row in costs:
        yield from (f"{row.arm}: {problem}" for problem in row.problems)
