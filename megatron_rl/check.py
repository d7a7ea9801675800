"""Everything about a recipe that can be known to be wrong before an engine starts."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from megatron_rl.config import Recipe
from megatron_rl.config.compiler import compiler_problem
from megatron_rl.config.known_models import shape_of
from megatron_rl.config.model import Architecture, read_architecture
from megatron_rl.data import check_source
from megatron_rl.errors import InputError
from megatron_rl.precision import contract, contract_problems
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
        offline: go by the shape of a known model (`config.known_models`) where its folder is not at hand, and leave out
            data files that are not.

    Raises:
        InputError: with every problem found, one a line.
    """
    architecture, assumed = shape_of(recipe.model.path) if offline else (read_architecture(recipe.model.path), False)
    absent = [f"model {recipe.model.path} (its shape is known)"] if assumed else []
    problems = architecture.problems() + recipe.learner.parallel.problems(architecture, world_size)
    problems += recipe.rollout.problems(
        architecture,
        recipe.data.prompt.max_length,
        world_size,
        device="cpu" if recipe.runtime.device == "cpu" else None,
    )
    problems += recipe.routing.problems(architecture)
    problems += contract_problems(recipe, architecture)
    if recipe.learner.fused_head and recipe.rollout.engine == "exact":
        problems.append(
            "learner.fused_head: true with rollout.engine exact, which needs logits that do not depend on how tokens "
            "are batched; use fused_head: false"
        )
    problems += _compile_problems(recipe)
    if recipe.learner.lora is not None:
        problems += recipe.learner.lora.problems(architecture, recipe.learner.parallel)
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


def _compile_problems(recipe: Recipe) -> list[str]:
    """What asks for compilation and cannot have it."""
    found, on_cpu = [], recipe.runtime.device == "cpu"
    if recipe.learner.compile and recipe.rollout.engine == "exact":
        found.append(
            "learner.compile: true with rollout.engine exact, whose passes must agree bit for bit however tokens are "
            "batched; use compile: false"
        )
    elif recipe.learner.compile and recipe.runtime.device == "cuda":
        found.append(
            "learner.compile: true with runtime.device cuda, where TransformerEngine's layers bring their own kernels; "
            "use compile: false"
        )
    elif recipe.learner.compile:
        found.append(compiler_problem("learner.compile: true"))
    if on_cpu and recipe.rollout.enforce_eager is False:
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
