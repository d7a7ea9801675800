"""`eval`: score a checkpoint on the recipe's held-out prompts, outside of a run."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_rl.check import check_recipe
from megatron_rl.checkpoint.manifest import TRAINER_FILE
from megatron_rl.checkpoint.save import WEIGHTS_FILE, load_weights
from megatron_rl.config import Recipe
from megatron_rl.data import load_tokenizer, load_validation
from megatron_rl.errors import InputError
from megatron_rl.learner.learner import Learner
from megatron_rl.learner.process_groups import shutdown
from megatron_rl.monitor.samples import SampleFile, describe
from megatron_rl.monitor.validation import summarise
from megatron_rl.process.ranks import world_rank
from megatron_rl.rewards import Rewarder
from megatron_rl.rewards.failures import refuse_too_many
from megatron_rl.rewards.shared import score_shared
from megatron_rl.rollout import Sampling
from megatron_rl.run.engines import start_generator
from megatron_rl.types import Group


def evaluate(recipe: Recipe, checkpoint: Path, output: Path | None = None) -> dict[str, float]:
    """`val/*` figures of ``checkpoint`` with the recipe's validation settings; printed, and written to ``output``.

    The responses go to a file beside it (….samples.jsonl), within `max_chars` and `max_mib` of `monitor.samples`.

    ``checkpoint``: a folder in Hugging Face layout, or one that a run or `megatron-rl convert` wrote (the recipe
    names the model it started from). Every rank calls it. Raises `InputError` before an engine starts where something
    does not fit.
    """
    if not recipe.data.validation:
        raise InputError("data.validation: names no file; eval has nothing to score")
    is_ours, is_weights = (checkpoint / TRAINER_FILE).is_file(), (checkpoint / WEIGHTS_FILE).is_file()
    if not is_ours and not is_weights:
        if not (checkpoint / "config.json").is_file():
            raise InputError(
                f"--checkpoint {checkpoint}: neither a Hugging Face folder (config.json), nor a run's checkpoint "
                f"({TRAINER_FILE}), nor a run directory; is the path right?"
            )
        recipe = recipe.model_copy(update={"model": recipe.model.model_copy(update={"path": checkpoint})})
    if recipe.rollout.engine == "vllm_server":  # a run's servers are its own; an engine in the ranks samples the same
        rollout = recipe.rollout.model_copy(update={"engine": "vllm", "max_staleness": 0})
        recipe = recipe.model_copy(update={"rollout": rollout})
    check_recipe(recipe)
    tokenizer = load_tokenizer(str(recipe.model.path))
    prompts = list(load_validation(recipe.data, recipe.validation, tokenizer))[: recipe.validation.limit]
    with contextlib.ExitStack() as stack:
        sources = {prompt.data_source for prompt in prompts}
        rewarder = stack.enter_context(Rewarder(recipe.reward, recipe.rollout.max_response_length, sources))
        learner = Learner(recipe)  # also joins the job's ranks, which the engines share prompts over
        stack.callback(shutdown)
        generator = start_generator(recipe, tokenizer, learner)
        stack.callback(generator.close)
        if is_ours:
            learner.load(checkpoint)
        elif is_weights:
            load_weights(checkpoint, learner.module, learner.optimizer)
        if is_ours or is_weights:
            generator.refit(learner.export_weights(), learner.num_updates)
        groups = generator.rollout(
            prompts,
            recipe.validation.num_samples,
            policy_version=learner.num_updates,
            step=0,
            sampling=Sampling.of_validation(recipe.rollout, recipe.validation),
        )
        scores = score_shared(rewarder, groups)
        if world_rank() == 0:
            for failure in scores.failures:
                print(f"{failure.count} × {failure.text}", file=sys.stderr)
        limit = recipe.reward.max_error_frac.first
        refuse_too_many(scores.num_failed, scores.num_scored, limit, scores.failures)
        figures = summarise(groups)
        if world_rank() == 0:
            for name, value in figures.items():
                print(f"{name:<44} {value:.4f}")
            if output is not None:
                about = {"checkpoint": str(checkpoint), "recipe": recipe.name, **figures}
                output.write_text(json.dumps(about, indent=2) + "\n")
                _write_samples(output.with_suffix(".samples.jsonl"), groups, learner.step, recipe)
    return figures


def _write_samples(path: Path, groups: Sequence[Group], step: int, recipe: Recipe) -> None:
    config = recipe.monitor.samples
    path.unlink(missing_ok=True)
    file = SampleFile(path, config.max_mib)
    for group in groups:
        file.write([{"step": step, **describe(group.prompt, r, config.max_chars)} for r in group.rollouts])
