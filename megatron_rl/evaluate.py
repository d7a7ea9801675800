"""`eval`: scores a checkpoint on the recipe's held-out prompts, outside of a run."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from megatron_rl.checkpoint.manifest import TRAINER_FILE
from megatron_rl.checkpoint.save import WEIGHTS_FILE, load_weights
from megatron_rl.config import Recipe
from megatron_rl.config.rollout import InFlightConfig
from megatron_rl.data import load_tokenizer, load_validation
from megatron_rl.errors import InputError
from megatron_rl.learner.learner import Learner
from megatron_rl.learner.process_groups import shutdown
from megatron_rl.monitor.samples import (
    SampleFile,
    check_names,
    describe,
    file_rows,
    share_samples,
    summarise,
    table,
)
from megatron_rl.process.host import format_table
from megatron_rl.process.ranks import world_rank
from megatron_rl.rewards import Rewarder
from megatron_rl.rewards.rewarder import refuse_too_many, score_shared
from megatron_rl.rollout import Generator, Sampling
from megatron_rl.run.engines import load_beside, start_generator
from megatron_rl.run.prepare import check_recipe
from megatron_rl.types import Group, Prompt


@dataclass
class Scorer:
    """A started engine with a checkpoint's weights, the recipe's held-out prompts, and its reward."""

    recipe: Recipe
    prompts: list[Prompt]
    generator: Generator
    rewarder: Rewarder
    version: int  # version of the weights
    step: int  # step of the checkpoint; 0 for one in Hugging Face layout

    def sample(self, sampling: Sampling) -> list[Group]:
        """Return `validation.num_samples` unscored responses to each prompt. Collective."""
        return self.generator.rollout(
            self.prompts, self.recipe.validation.num_samples, policy_version=self.version, step=0, sampling=sampling
        )

    def score(self, groups: list[Group]) -> dict[str, float]:
        """Score ``groups`` and return `val/*`. Raises `Fault` if too many rewards fail. Collective."""
        scores = score_shared(self.rewarder, groups)
        if world_rank() == 0:
            for failure in scores.failures:
                print(f"{failure.count} × {failure.text}", file=sys.stderr)
        limit = self.recipe.reward.max_error_frac.first
        refuse_too_many(scores.num_failed, scores.num_scored, limit, scores.failures)
        return summarise(groups)


@contextlib.contextmanager
def open_scorer(recipe: Recipe, checkpoint: Path) -> Iterator[Scorer]:
    """Yield a scorer with the weights of ``checkpoint``; its engine ends on leaving. Every rank must call this.

    ``checkpoint``: a folder in Hugging Face layout, or one of a run or of `megatron-rl convert` (the recipe then names
    the model that it started from). Raises `InputError` before an engine starts if recipe and checkpoint do not match.
    """
    if not recipe.data.validation:
        raise InputError("data.validation: names no file; eval has nothing to score")
    check_names(recipe.data.validation)
    is_ours, is_weights = (checkpoint / TRAINER_FILE).is_file(), (checkpoint / WEIGHTS_FILE).is_file()
    if not is_ours and not is_weights:
        if not (checkpoint / "config.json").is_file():
            raise InputError(
                f"--checkpoint {checkpoint}: neither a Hugging Face folder (config.json), nor a run's checkpoint "
                f"({TRAINER_FILE}), nor a run directory; is the path right?"
            )
        recipe = recipe.model_copy(update={"model": recipe.model.model_copy(update={"path": checkpoint})})
    if (
        recipe.rollout.engine == "vllm_server"
    ):  # a run's servers cannot be used here; a local engine samples the same responses
        in_ranks = {"engine": "vllm", "max_staleness": 0, "in_flight": InFlightConfig()}
        rollout = recipe.rollout.model_copy(update=in_ranks)
        recipe = recipe.model_copy(update={"rollout": rollout})
    check_recipe(recipe)
    tokenizer = load_tokenizer(str(recipe.model.path))
    prompts = list(load_validation(recipe.data, recipe.validation, tokenizer))[: recipe.validation.limit]
    with contextlib.ExitStack() as stack:
        sources = {prompt.data_source for prompt in prompts}
        rewarder = stack.enter_context(Rewarder(recipe.reward, recipe.rollout.max_response_length, sources))
        learner = Learner(recipe)  # also joins the job's ranks, among which the engines share prompts
        stack.callback(shutdown)
        generator = start_generator(recipe, tokenizer, learner)
        stack.callback(generator.close)
        if is_ours:
            load_beside(learner, generator, partial(learner.load, checkpoint))
        elif is_weights:
            load_beside(learner, generator, partial(load_weights, checkpoint, learner.module, learner.optimizer))
        yield Scorer(recipe, prompts, generator, rewarder, learner.num_updates, learner.step)


def evaluate(recipe: Recipe, checkpoint: Path, output: Path | None = None) -> dict[str, float]:
    """Return `val/*` of ``checkpoint`` with the recipe's validation settings, and print a table of the files.

    ``output``: JSON file for all figures and the table. The responses (….samples.jsonl) are written beside
    it. ``checkpoint`` and errors: see `open_scorer`.
    """
    with open_scorer(recipe, checkpoint) as scorer:
        groups = scorer.sample(Sampling.of_validation(scorer.recipe.rollout, scorer.recipe.validation))
        figures = scorer.score(groups)
        if world_rank() == 0:
            rows = file_rows(groups, recipe.data.validation)
            for name, value in figures.items():
                print(f"{name:<44} {value:.4f}")
            print(format_table(*table(rows)))
            if output is not None:
                files = {"files": [row.to_json() for row in rows]}
                about = {"checkpoint": str(checkpoint), "recipe": recipe.name, **figures, **files}
                output.write_text(json.dumps(about, indent=2) + "\n")
        if output is not None:
            _write_samples(output.with_suffix(".samples.jsonl"), groups, scorer.step)
    return figures


def _write_samples(path: Path, groups: Sequence[Group], step: int) -> None:
    """Write the responses of all ranks on rank 0, one group at a time. Collective."""
    is_main = world_rank() == 0
    if is_main:
        path.unlink(missing_ok=True)
    file = SampleFile(path)
    for group in groups:
        share_samples([group], range(len(group.rollouts)))
        if is_main:
            file.write([{"step": step, **describe(group.prompt, r)} for r in group.rollouts])
