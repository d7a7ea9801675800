"""Checks of a recipe that need no engine."""

from __future__ import annotations

import os
import shutil
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from megatron_rl.checkpoint.hf_folder import HFFolder, check_weights, resolve_stop_token_ids
from megatron_rl.config import ObjectiveConfig, Recipe
from megatron_rl.config.base import how_to_download
from megatron_rl.config.model_rules import contract, cpu_problems, cuda_problems, model_problems, smallest_world
from megatron_rl.config.monitor import MonitorConfig
from megatron_rl.config.objective import label_of, parts_without_effect, user_functions
from megatron_rl.config.recipe import has_mismatch
from megatron_rl.config.rollout import RolloutConfig
from megatron_rl.config.sections import CheckpointConfig, RecorderConfig, ValidationConfig
from megatron_rl.data import check_source
from megatron_rl.errors import InputError, shown
from megatron_rl.model.architecture import (
    KNOWN_MODELS,
    Architecture,
    how_to_get,
    read_architecture,
    shape_of,
    unknown_config_keys,
)
from megatron_rl.process.devices import default_device
from megatron_rl.rewards import check_function, check_reward


@dataclass(frozen=True)
class CheckedRecipe:
    architecture: Architecture
    world_size: int | None
    report: list[tuple[str, str]]  # (name, value) for a person to read


def check_recipe(recipe: Recipe, world_size: int | None = None, *, offline: bool = False) -> CheckedRecipe:
    """Check model, layout, batch arithmetic, lengths, precision and data files of ``recipe`` in seconds, without a GPU.

    Args:
        world_size: ranks of the job; None if unknown: only check what is independent of the number of ranks.
        offline: use the shape of a known model (`KNOWN_MODELS`) if its folder is absent, and skip absent
            data files.

    Raises:
        InputError: lists every problem, one per line.
    """
    architecture, assumed = shape_of(recipe.model.path) if offline else (_architecture(recipe.model.path), False)
    absent = [f"model {recipe.model.path} (its shape is known)"] if assumed else []
    device = recipe.runtime.device
    if device == "auto":  # a machine without a GPU may be where the job is submitted
        here = default_device()
        device = None if here == "cpu" else here
    problems = model_problems(recipe, architecture, world_size, device) + _compiler_problems(recipe.rollout, device)
    folder_notes: list[str] = []
    if not assumed:
        try:
            folder_notes = check_folder(recipe.model.path, architecture, recipe.rollout.stop_token_ids)
        except InputError as error:
            problems.append(str(error))
    try:
        check_reward(recipe.reward, recipe.rollout.max_response_length)
    except InputError as error:
        problems.append(str(error))
    if recipe.rollout.function is not None:
        try:
            check_function(recipe.rollout.function, "rollout.function")
        except InputError as error:
            problems.append(str(error))
    if user_functions(recipe.objective):
        from megatron_rl.objective.trial import check_user_functions  # needs torch, which `check` can do without

        try:
            check_user_functions(recipe.objective)
        except InputError as error:
            problems.append(str(error))
    not_read: list[str] = []
    for kind in ("train", "validation"):
        for source in getattr(recipe.data, kind):
            if offline and not Path(source.path).exists():
                absent.append(f"data.{kind} {source.path}")
                continue
            try:
                if unused := check_source(source).unused:
                    names = ", ".join(shown(name, 60)[1:-1] for name in unused)
                    not_read.append(f"data.{kind} {source.path}: {names}")
            except InputError as error:
                problems.append(f"data.{kind}: {error}")
    if problems:
        raise InputError(f"recipe {recipe.name}:\n" + "\n".join(f"  {problem}" for problem in problems))
    report = _report(recipe, architecture, world_size)
    if folder_notes:
        report.append(("folder", "; ".join(folder_notes)))
    for where, problems_of in (("on a CPU", cpu_problems), ("on CUDA", cuda_problems)) if device is None else ():
        if lacks := problems_of(recipe.rollout, architecture):
            report.append((where, f"this recipe cannot run: {'; '.join(lacks)}"))
    if not_read:
        report.append(("not read", "; ".join(not_read)))
    if absent:
        report.append(("not here", ", ".join(absent)))
    return CheckedRecipe(architecture, world_size, report)


def _architecture(path: Path) -> Architecture:
    """Return `read_architecture`. The error for a missing folder explains how to download it or check without it."""
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


def check_folder(path: Path, architecture: Architecture, stop_token_ids: list[int] | None) -> list[str]:
    """Compare the model's folder with the learner's model: headers of tensors, end-of-sequence ids.

    ``stop_token_ids``: those of `rollout`; None where the model's own count. Returns notes, such as unread keys. Raises
    `InputError` for files that the engines would read as another model.
    """
    extras = check_weights(HFFolder(path), architecture)
    stops = resolve_stop_token_ids(stop_token_ids, path)
    notes = [f"names, shapes and types of its tensors are the learner's, responses end with tokens {stops}", *extras]
    if unknown := unknown_config_keys(path):
        notes.append(f"config.json has keys that no engine here is known to read: {', '.join(unknown)}")
    return notes


def _compiler_problems(rollout: RolloutConfig, device: str | None) -> list[str]:
    """Return what torch.compile lacks on this machine, if the recipe's vLLM compiles its model on a CPU."""
    if device != "cpu" or rollout.enforce_eager is not False:
        return []
    compiler = os.environ.get("CXX", "g++")  # torch's own choice
    missing = [] if shutil.which(compiler) else [f"a C++ compiler ({compiler!r} was not found)"]
    if not (header := Path(sysconfig.get_paths()["include"]) / "Python.h").exists():
        missing.append(f"Python's headers ({header} is not there)")
    if not missing:
        return []
    return [
        f"rollout.enforce_eager: false compiles, which on a CPU needs {' and '.join(missing)}; install them (Debian: "
        "g++, python3-dev; CXX names another compiler), or leave the key out"
    ]


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
        ("run", f"{recipe.length}, into {recipe.run_dir}"),
        *((row.aspect, str(row)) for row in contract(recipe, a)),
        *([("routing", recipe.routing.describe())] if recipe.routing.is_on else []),
        (
            "objective",
            f"{recipe.objective.advantage}, {label_of(recipe.objective.policy_term, 'name')}, "
            f"{'+'.join(label_of(c, 'mode') for c in recipe.objective.correction) or 'no correction'}, "
            f"{recipe.objective.aggregation}",
        ),
        *_without_effect(recipe.objective, recipe.batch.minibatches, has_mismatch(recipe)),
        ("records", "; ".join(_records(recipe.checkpoint, recipe.recorder, recipe.validation, recipe.monitor))),
    ]


def _without_effect(objective: ObjectiveConfig, minibatches: int, may_differ: bool) -> list[tuple[str, str]]:
    parts = parts_without_effect(objective, minibatches, may_differ)
    return [("no effect", "; ".join(parts))] if parts else []


def _validations(validation: ValidationConfig) -> str:
    start = {True: ", and before the first", False: ", not before the first", None: ""}[validation.at_start]
    if not validation.every:
        return "validation before the first step" if validation.at_start else "no validation"
    return f"validation every {validation.every} steps{start}"


def _records(
    checkpoint: CheckpointConfig, recorder: RecorderConfig, validation: ValidationConfig, monitor: MonitorConfig
) -> list[str]:
    """Return what the run will write, and which states it cannot restore."""
    retention = f", the newest {checkpoint.keep_last} kept" if checkpoint.keep_last else ""
    best = f", and the best {checkpoint.keep_best.n} by {checkpoint.keep_best.metric}" if checkpoint.keep_best else ""
    items = [
        (
            f"checkpoints every {checkpoint.every} steps and at the end"
            if checkpoint.every
            else "a checkpoint at the end"
        )
        + retention
        + best,
        _validations(validation),
    ]
    alarms = [rule.name for rule in monitor.alarms if "record_batch" in rule.then]
    by_alarm = f"batches of alarms ({', '.join(alarms)})" if alarms else ""
    if recorder.record_batches == "all":
        items.append("every batch")
    elif recorder.record_batches == "last_n":
        items.append(f"the newest {recorder.keep} batches" + (f" and {by_alarm}" if by_alarm else ""))
        if not checkpoint.every or recorder.keep < checkpoint.every:
            items.append(
                "the exact weights of a recorded step are lost: that takes a checkpoint and every batch since, but "
                f"recorder.keep is {recorder.keep} and checkpoint.every {checkpoint.every}"
            )
    elif recorder.is_every_step:
        items.append(f"the newest {recorder.evidence.batches} batches, which stay at the first alarm")
        items += [by_alarm] if by_alarm else []
    else:
        items.append(by_alarm if by_alarm else "no batches")
    if recorder.evidence is not None and checkpoint.every and checkpoint.keep_last:
        items.append("at the first alarm a checkpoint from before it stays")
    samples = monitor.samples
    if samples.every:
        items.append(f"{samples.number} sampled texts every {samples.every} steps")
    return items
