"""`lab plan`: the cost of a study on a cluster, by the arithmetic of `megatron-rl plan`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megatron_rl.config import load_recipe
from megatron_rl.instruments.lab.jobs import LoadedStudy
from megatron_rl.instruments.plan import find_gpu, make_plan, make_workload
from megatron_rl.model.known_models import shape_of


@dataclass(frozen=True)
class ArmCost:
    """The cost of the runs of one arm."""

    arm: str
    gpus: int
    num_steps: int
    step_seconds: float
    num_seeds: int
    problems: list[str]

    @property
    def run_hours(self) -> float:
        """Hours of one run, without validation and start-up."""
        return self.num_steps * self.step_seconds / 3600

    @property
    def gpu_hours(self) -> float:
        """GPU-hours of all seeds."""
        return self.run_hours * self.gpus * self.num_seeds


def cost(
    loaded: LoadedStudy, gpu: str, nodes: int | None, gpus_per_node: int | None, mean_response: float | None
) -> list[ArmCost]:
    """Return the cost of every arm on ``gpu``, a name or a file.

    The default size is that in the base recipe's name (…-4n8g-…).

    Raises `InputError` if there is no size, or the model is unknown.
    """
    base, study = load_recipe(loaded.base), loaded.study
    architecture, _ = shape_of(base.model.path)
    lines = []
    for job in loaded.jobs(base.run_root, study.seeds[:1]):
        recipe = loaded.recipe(job).model_copy(update={"name": base.name})
        work = make_workload(recipe, architecture, find_gpu(gpu), nodes, gpus_per_node, mean_response)
        plan = make_plan(work)
        lines.append(
            ArmCost(job.arm, work.ranks, recipe.num_steps, plan.time.total, len(study.seeds), list(plan.problems))
        )
    return lines


def render(loaded: LoadedStudy, gpu: str, costs: list[ArmCost]) -> Iterator[str]:
    """Yield the lines of a table, the sum, and the arms that do not fit."""
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
