"""Everything about a recipe that can be known to be wrong before an engine starts."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from megatron_rl.checkpoint.architecture import Architecture, read_architecture
from megatron_rl.checkpoint.known_models import shape_of
from megatron_rl.config import Recipe
from megatron_rl.config.precision_contract import contract
from megatron_rl.config.rules import model_problems
from megatron_rl.data import check_source
from megatron_rl.errors import InputError
from megatron_rl.process.compiler import compiler_problem
from megatron_rl.rewards import check_reward


@dataclass(frozen=True)
class CheckedRecipe:
    architecture: Architecture
    world_size: int | None
    report: list[tuple[str, str]]  # what, value: for a person to read


def check_recipe(recipe: Recipe, world_size: int | None = None, *, offline: bool = False) -> CheckedRecipe:
    """Model, layout, batch arithmetic, lengths, precision and data files of ``recipe``; no GPU, no engine, seconds.

    Args:
        world_size: ranks of the job; None: not known (then only what holds for every number of ranks is checked).
        offline: go by the shape of a known model (`checkpoint.known_models`) where its folder is not
            at hand, and leave out data files that are not.

    Raises:
        InputError: with every problem found, one a line.
    """
    architecture, assumed = shape_of(recipe.model.path) if offline else (read_architecture(recipe.model.path), False)
    absent = [f"model {recipe.model.path} (its shape is known)"] if assumed else []
    device = "cpu" if recipe.runtime.device == "cpu" else None
    problems = model_problems(recipe, architecture, world_size, device) + _compiler_problems(recipe)
    try:
        check_reward(recipe.reward, recipe.rollout.max_response_length)
    except InputError as error:
        problems.append(str(error))
    for kind in ("train", "validation"):
        for source in getattr(recipe.data, kind):
            if offline and not Path(source.path).exists():
                absent.append(f"data.{kind} {source.path}")
                continue
            try:
                check_source(source)
            except InputError as error:
                problems.append(f"data.{kind}: {error}")
    if problems:
        raise InputError(f"recipe {recipe.name}:\n" + "\n".join(f"  {problem}" for problem in problems))
    report = _report(recipe, architecture, world_size)
    if absent:
        report.append(("not here", ", ".join(absent)))
    return CheckedRecipe(architecture, world_size, report)


def _compiler_problems(recipe: Recipe) -> list[str]:
    """What asks for compilation on a machine that has no compiler."""
    found = []
    if recipe.learner.compile:
        found.append(compiler_problem("learner.compile: true"))
    if recipe.runtime.device == "cpu" and recipe.rollout.enforce_eager is False:
        found.append(compiler_problem("rollout.enforce_eager: false"))
    return [problem for problem in found if problem]


def _report(recipe: Recipe, a: Architecture, world_size: int | None) -> list[tuple[str, str]]:
    parallel, rollout = recipe.learner.parallel, recipe.rollout
    experts = f", {a.num_experts} experts top-{a.experts_per_token}" if a.is_moe else ", dense"
    model_ranks = parallel.tensor * parallel.pipeline
    ranks = world_size if world_size is not None else int(os.environ.get("WORLD_SIZE", model_ranks))
    return [
        ("model", f"{a.model_type}: {a.num_layers} layers, width {a.hidden_size}{experts}"),
        (
            "layout",
            f"{ranks} ranks: tensor {parallel.tensor}, pipeline {parallel.pipeline}, expert {parallel.expert}, "
            f"data {ranks // model_ranks}",
        ),
        (
            "step",
            f"{recipe.batch.prompts} prompts × {rollout.num_samples} samples = {recipe.num_sequences} sequences, "
            f"{recipe.batch.minibatches} update(s) of {recipe.num_sequences // recipe.batch.minibatches}",
        ),
        ("run", f"{recipe.num_steps} steps, {recipe.num_updates} updates, into {recipe.run_dir}"),
        *((row.aspect, str(row)) for row in contract(recipe, a)),
        *([("routing", recipe.routing.describe())] if recipe.routing.is_on else []),
        (
            "objective",
            f"{recipe.objective.advantage}, {recipe.objective.policy_term.name}, "
            f"{'+'.join(c.mode for c in recipe.objective.correction) or 'no correction'}, "
            f"{recipe.objective.aggregation}",
        ),
    ]
