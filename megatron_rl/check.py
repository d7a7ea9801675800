"""Everything about a recipe that can be known to be wrong before an engine starts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from megatron_rl.checkpoint.architecture import Architecture, read_architecture
from megatron_rl.checkpoint.known_models import KNOWN_MODELS, how_to_get, shape_of
from megatron_rl.config import Recipe
from megatron_rl.config.hub import how_to_download
from megatron_rl.config.model_rules import model_problems, smallest_world
from megatron_rl.config.precision_contract import contract
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
    architecture, assumed = shape_of(recipe.model.path) if offline else (_architecture(recipe.model.path), False)
    absent = [f"model {recipe.model.path} (its shape is known)"] if assumed else []
    device = None if recipe.runtime.device == "auto" else recipe.runtime.device
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


def _architecture(path: Path) -> Architecture:
    """`read_architecture`; where there is no such folder, the error says how to get one and how to check without."""
    if path.exists():
        return read_architecture(path)
    command = how_to_get(path)
    download = f"download it with `{command}`" if command else "download a checkpoint in Hugging Face layout there"
    if not command and (cache := how_to_download(str(path), "model")):
        download += f", or, if it is a name of the Hugging Face hub, into its cache with `{cache}`"
    raise InputError(
        f"model.path: {path}: no such folder; {download}. `megatron-rl check RECIPE --offline` checks the rest of the "
        f"recipe without it, for models whose shape is known: {', '.join(KNOWN_MODELS)}"
    )


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
    smallest = smallest_world(parallel, rollout)
    data = (world_size or smallest) // (parallel.tensor * parallel.pipeline * parallel.context)
    context = f"context {parallel.context}, " if parallel.context > 1 else ""
    return [
        ("model", f"{a.model_type}: {a.num_layers} layers, width {a.hidden_size}{experts}"),
        (
            "layout",
            (f"{world_size} ranks" if world_size else f"{smallest} ranks or a multiple, which --ranks checks")
            + f": tensor {parallel.tensor}, pipeline {parallel.pipeline}, {context}"
            f"expert {parallel.expert}, data {data}",
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
        ("records", "; ".join(_records(recipe))),
    ]


def _records(recipe: Recipe) -> list[str]:
    """What the run will write of itself, and what it will not be able to bring back."""
    checkpoint, recorder, validation = recipe.checkpoint, recipe.recorder, recipe.validation
    kept = f", the newest {checkpoint.keep_last} kept" if checkpoint.keep_last else ""
    best = f", and the best {checkpoint.keep_best.n} by {checkpoint.keep_best.metric}" if checkpoint.keep_best else ""
    found = [
        (
            f"checkpoints every {checkpoint.every} steps and at the end"
            if checkpoint.every
            else "a checkpoint at the end"
        )
        + kept
        + best,
        f"validation every {validation.every} steps" if validation.every else "no validation",
    ]
    alarms = [rule.name for rule in recipe.monitor.alarms if "record_batch" in rule.then]
    by_alarm = f"batches of alarms ({', '.join(alarms)})" if alarms else ""
    if recorder.record_batches == "all":
        found.append("every batch")
    elif recorder.record_batches == "last_n":
        found.append(f"the newest {recorder.keep} batches" + (f" and {by_alarm}" if by_alarm else ""))
        if not checkpoint.every or recorder.keep < checkpoint.every:
            found.append(
                "the exact weights of a recorded step are lost: that takes a checkpoint and every batch since, but "
                f"recorder.keep is {recorder.keep} and checkpoint.every {checkpoint.every}"
            )
    else:
        found.append(by_alarm if by_alarm else "no batches")
    samples = recipe.monitor.samples
    if samples.every:
        found.append(f"{samples.number} sampled texts every {samples.every} steps")
    return found
