"""The `exact` section: generation by the learner's own forward pass (`rollout.engine: exact`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import NonNegativeFloat

from megatron_rl.config.base import Section

if TYPE_CHECKING:
    from megatron_rl.config.recipe import Recipe

MAX_EXACT_TENSOR_PARALLEL = 2
"""a + b = b + a, but a sum over three ranks depends on where it starts, and gloo and NCCL start it by position."""


class ExactConfig(Section):
    noise_std: NonNegativeFloat = 0.0
    """Dose of mismatch: standard deviation of the Gaussian noise added to the sampling logits, drawn from
    (rollout.seed, step, prompt id, sample number, position). mu is the probability after the noise, so that mu and po
    differ by it and by nothing else; the gate then compares what was computed before the noise. Our instrument, not a
    paper's."""
    kv_cache: bool = True
    """Keep keys and values of earlier tokens; the probabilities are the same either way. On CUDA always false:
    attention kernels that are invariant with a cache are not at hand there."""

    def problems(self, recipe: Recipe) -> list[str]:
        """Why ``recipe`` cannot run with the engine `exact`, or why this section has no effect; empty where neither."""
        rollout, parallel, found = recipe.rollout, recipe.learner.parallel, []
        if rollout.engine != "exact":
            if self.noise_std:
                found.append(
                    f"exact.noise_std: {self.noise_std:g} needs rollout.engine exact, found {rollout.engine}; other "
                    "engines bring their own mismatch"
                )
            return found
        if rollout.dtype != recipe.learner.dtype:
            found.append(
                f"rollout.dtype: {rollout.dtype}, but rollout.engine exact generates with the learner's own weights "
                f"(learner.dtype {recipe.learner.dtype}); set both alike"
            )
        if rollout.top_p < 1 or rollout.top_k:
            found.append(
                f"rollout.top_p {rollout.top_p:g}, top_k {rollout.top_k}: rollout.engine exact samples from the "
                "policy itself; use top_p 1 and top_k 0"
            )
        if rollout.tensor_parallel > 1:
            found.append(
                f"rollout.tensor_parallel: {rollout.tensor_parallel}, but rollout.engine exact has the learner's "
                "layout (learner.parallel); leave it at 1"
            )
        if parallel.tensor > MAX_EXACT_TENSOR_PARALLEL:
            found.append(
                f"learner.parallel.tensor: {parallel.tensor}; a sum over more than {MAX_EXACT_TENSOR_PARALLEL} ranks "
                "depends on the batch, so that rollout.engine exact could not be exact; use 1 or 2, with expert and "
                "data parallelism for the rest"
            )
        if parallel.pipeline > 1:
            found.append(
                f"learner.parallel.pipeline: {parallel.pipeline}; rollout.engine exact generates on one stage; use 1"
            )
        if recipe.routing.needs_engine_routes:
            key = "replay: r3" if recipe.routing.replay == "r3" else "telemetry: true"
            found.append(
                f"routing.{key} needs another engine's routes; under rollout.engine exact there is none, and routes "
                "agree by themselves; use replay off or r2 without telemetry"
            )
        return found
