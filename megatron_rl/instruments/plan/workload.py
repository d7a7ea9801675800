"""The input of a plan: a recipe, its model's shape, a GPU and a number of ranks, with derived sizes."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from functools import cached_property

from megatron_rl.config import Recipe
from megatron_rl.config.learner import ParallelConfig
from megatron_rl.config.model_rules import layout_problems, rollout_problems
from megatron_rl.errors import InputError
from megatron_rl.instruments.plan.hardware import PROMPT_SHARE, REFILL_ROUNDS, RESPONSE_SHARE, Gpu
from megatron_rl.model.architecture import Architecture

_SIZE = re.compile(r"(?:^|-)(\d+)n(\d+)g(?:-|$)")


@dataclass(frozen=True)
class Workload:
    """The input that determines memory and time."""

    recipe: Recipe
    architecture: Architecture
    gpu: Gpu
    nodes: int
    gpus_per_node: int
    mean_response: float  # tokens
    mean_prompt: float  # tokens
    host_gib: float  # memory of one node's host

    @property
    def ranks(self) -> int:
        return self.nodes * self.gpus_per_node

    @property
    def nvlink_gpus(self) -> int:
        """Number of GPUs that exchange over NVLink."""
        return max(self.gpus_per_node, self.gpu.nvlink_gpus)

    @property
    def parallel(self) -> ParallelConfig:
        return self.recipe.learner.parallel

    def with_learner(self, **changes: object) -> Workload:
        """Return the workload with other keys of the recipe's `learner` section."""
        learner = self.recipe.learner.model_copy(update=changes)
        return replace(self, recipe=self.recipe.model_copy(update={"learner": learner}))

    def with_rollout(self, **changes: object) -> Workload:
        """Return the workload with other keys of the recipe's `rollout` section."""
        rollout = self.recipe.rollout.model_copy(update=changes)
        return replace(self, recipe=self.recipe.model_copy(update={"rollout": rollout}))

    @property
    def data_parallel(self) -> int:
        return max(1, self.ranks // (self.parallel.tensor * self.parallel.pipeline * self.parallel.context))

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt plus the longest response."""
        return self.recipe.data.prompt.max_length + self.recipe.rollout.max_response_length

    @property
    def mean_sequence(self) -> float:
        return self.mean_prompt + self.mean_response

    @property
    def trained_tokens(self) -> float:
        """Tokens of prompts and responses of a step."""
        return self.recipe.num_sequences * self.mean_sequence

    @property
    def sampling_rounds(self) -> float:
        """Rounds of sampling in a step; a fraction if the last round only samples what is missing."""
        batch = self.recipe.batch
        if batch.generation_prompts is None:
            return min(REFILL_ROUNDS, batch.max_generations)
        needed = math.ceil(REFILL_ROUNDS * batch.prompts / batch.generation_prompts)
        return float(min(needed, batch.max_generations))

    @property
    def sampled_sequences(self) -> float:
        """Sequences sampled for a step, including those of groups that are left out."""
        batch = self.recipe.batch
        if batch.oversample is not None and batch.oversample.rest == "carry_over":  # each group is sampled once
            needed = REFILL_ROUNDS if batch.filter_groups else 1.0
            groups = min(needed * batch.prompts, batch.max_generations * batch.prompts_of_a_round)
            return groups * self.recipe.rollout.num_samples
        return self.sampling_rounds * self.recipe.batch.prompts_of_a_round * self.recipe.rollout.num_samples

    @property
    def samples_other_weights(self) -> bool:
        """Whether the learner generates with other weights, which are kept on its GPU too."""
        return self._dose in ("weights", "stale")

    @property
    def earlier_weights(self) -> int:
        """Number of old policies whose weights a rank keeps in host memory, for a dose that samples from them."""
        if self._dose != "stale":
            return 0
        return math.ceil(self.recipe.exact.dose.updates / self.recipe.batch.minibatches) + 1

    @property
    def _dose(self) -> str | None:
        dose = self.recipe.exact.dose if self.recipe.rollout.engine == "exact" else None
        return dose and dose.kind

    @property
    def microbatch_tokens(self) -> int:
        """Largest number of tokens of a forward pass over all context-parallel ranks.

        A sequence longer than `max_tokens_per_microbatch` has its own pass.
        """
        return max(self.recipe.learner.max_tokens_per_microbatch, self.longest)

    @cached_property
    def microbatches(self) -> int:
        """Microbatches of one update on each data-parallel rank."""
        per_rank = self.trained_tokens / self.recipe.batch.minibatches / self.data_parallel
        return max(1, math.ceil(per_rank / self.recipe.learner.max_tokens_per_microbatch))


def make_workload(
    recipe: Recipe,
    architecture: Architecture,
    gpu: Gpu,
    nodes: int | None = None,
    gpus_per_node: int | None = None,
    mean_response: float | None = None,
    mean_prompt: float | None = None,
    host_gib: float | None = None,
) -> Workload:
    """Return the workload of a recipe for the size in its name (``…-4n8g-…``) or for the given size.

    Raises `InputError` if neither gives a size, or the layout does not divide it.
    """
    stated = _SIZE.search(recipe.name)
    if nodes is None and gpus_per_node is None and stated is None:
        raise InputError(
            f"plan: number of GPUs unknown: the recipe's name ({recipe.name}) has no <nodes>n<GPUs>g; give --nodes and "
            "--gpus-per-node"
        )
    nodes = nodes or (int(stated[1]) if stated else 1)
    gpus_per_node = gpus_per_node or (int(stated[2]) if stated else 8)
    rollout, prompt = recipe.rollout, recipe.data.prompt
    work = Workload(
        recipe,
        architecture,
        gpu,
        nodes,
        gpus_per_node,
        mean_response or RESPONSE_SHARE * rollout.max_response_length,
        mean_prompt or PROMPT_SHARE * prompt.max_length,
        host_gib or gpu.host_gib,
    )
    problems = layout_problems(recipe.learner.parallel, architecture, work.ranks)
    problems += rollout_problems(rollout, architecture, prompt.max_length, work.ranks, "cuda")
    if problems:
        raise InputError(f"recipe {recipe.name} on {work.ranks} ranks:\n" + "\n".join(f"  {p}" for p in problems))
    return work
