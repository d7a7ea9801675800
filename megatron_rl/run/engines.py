"""The rollout engine that a recipe names, beside the learner of the same job."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from megatron_rl.checkpoint.hf_folder import resolve_stop_token_ids
from megatron_rl.config import Recipe
from megatron_rl.exact.doses import make_dose
from megatron_rl.exact.generator import ExactGenerator
from megatron_rl.learner import bit_check
from megatron_rl.learner.learner import Learner
from megatron_rl.learner.offload import OffloadError
from megatron_rl.learner.passes import PhaseFn
from megatron_rl.monitor import RunDirectory
from megatron_rl.process.ranks import together
from megatron_rl.rollout import Generator
from megatron_rl.run.prepare import talk_of

if TYPE_CHECKING:
    from megatron_rl.data.table import PromptSet
    from megatron_rl.rollout.scoring import Teachers

T = TypeVar("T")


def make_learner(recipe: Recipe, **options: Any) -> Learner:
    """The learner of a run, with the check of every token where the engine is `exact`. ``options``: see `Learner`."""
    return Learner(recipe, bit_check=bit_check.check if recipe.rollout.engine == "exact" else None, **options)


def start_generator(
    recipe: Recipe,
    tokenizer: Any,
    learner: Learner,
    say: Callable[[str], None] = print,
    stop: Callable[[], bool] = lambda: False,
    sleeps: bool = True,
) -> Generator:
    """The engine that the recipe names, beside the learner of the same job, which steps aside for it first: an engine
    measures what memory is free.

    ``say``: what servers there are. ``stop``: whether this rank was asked to stop. ``sleeps``: see `VllmGenerator`.
    """
    together("learner.offload", learner.step_aside, fault=OffloadError, describe=str)
    decode = partial(tokenizer.decode, skip_special_tokens=True)
    talk = talk_of(recipe, tokenizer) if recipe.rollout.function is not None else None
    if recipe.rollout.engine == "exact":
        return ExactGenerator(
            recipe.rollout,
            make_dose(recipe.exact, recipe.rollout.seed),
            learner.decoder(),
            stop_token_ids=resolve_stop_token_ids(recipe.rollout.stop_token_ids, recipe.model.path),
            decode=decode,
            describe=learner.describe_precision,
        )
    if recipe.rollout.engine == "vllm_server":
        from megatron_rl.rollout.servers.generator import ServerGenerator

        return ServerGenerator(
            recipe.rollout,
            recipe.model.path,
            max_prompt_length=recipe.data.prompt.max_length,
            run_dir=recipe.run_dir,
            recipe_file=RunDirectory(recipe.run_dir).recipe,
            record_routes=recipe.routing.needs_engine_routes,
            decode=decode,
            precision=recipe.precision,
            say=say,
            stop=stop,
            talk=talk,
        )
    from megatron_rl.rollout.vllm_engine import VllmGenerator

    return VllmGenerator(
        recipe.rollout,
        recipe.model.path,
        max_prompt_length=recipe.data.prompt.max_length,
        record_routes=recipe.routing.needs_engine_routes,
        device=learner.device.type,
        decode=decode,
        precision=recipe.precision,
        talk=talk,
        sleeps=sleeps,
    )


def start_teachers(recipe: Recipe, train: PromptSet, device: str) -> Teachers | None:
    """The teachers of the prompts ``train`` that have engines of their own; None without any. Collective."""
    if recipe.teacher is None or recipe.teacher.engine == "learner":
        return None
    from megatron_rl.rollout.scoring import Teachers

    return Teachers(recipe, train.data_sources, device)


class LearnerWeights:
    """The learner's weights as `Learner.export_weights` yields them, as often as they are asked for."""

    def __init__(self, learner: Learner) -> None:
        self._learner = learner

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self._learner.export_weights()


def hand_over(learner: Learner, generator: Generator, phase: PhaseFn = lambda name: nullcontext()) -> None:
    """Wake the engine with the learner's weights. Collective.

    What leaves the learner (`learner.offload`) leaves first, except the weights: they are sent, and leave then, before
    the engine takes room for its cache.
    """
    offload = phase if learner.config.offload.is_on else lambda name: nullcontext()
    with offload("offload"):
        learner.step_aside(weights=False)
    generator.wake()
    with phase("refit"):
        generator.refit(LearnerWeights(learner), learner.num_updates)
    with offload("offload"):
        learner.step_aside()


def load_beside(learner: Learner, generator: Generator, load: Callable[[], T]) -> T:
    """Fill the learner by ``load`` while the engine sleeps, then `hand_over`. Returns what ``load`` returned."""
    generator.sleep()
    learner.offload.come_back()
    loaded = load()
    hand_over(learner, generator)
    return loaded
