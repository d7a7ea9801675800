"""Updates that are proposed: scored on the rollout engine, and kept or undone [MIPU, arXiv 2606.29526]."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from megatron_rl.batch import build_batch
from megatron_rl.config.sections import AcceptanceConfig
from megatron_rl.learner.snapshot import Snapshot
from megatron_rl.rollout.requests import everywhere
from megatron_rl.run.engines import hand_over
from megatron_rl.types import Sequence

if TYPE_CHECKING:
    from megatron_rl.run.start import Run


def tolerance_at(config: AcceptanceConfig, step: int) -> float:
    """c of a step: from `start_tolerance` to `tolerance` in a straight line over `anneal_steps`."""
    if config.start_tolerance is None:
        return config.tolerance
    left = max(0.0, 1 - step / config.anneal_steps)
    return config.tolerance + (config.start_tolerance - config.tolerance) * left


def post_update_gap(sequences: list[Sequence], logprobs: list[np.ndarray]) -> float:
    """T_post = -mean_i ρ_i A_i, ρ_i = exp(mean_t (log pi - log mu)) over responses that would be trained on [Eqs 8-9].

    ``logprobs``: log pi [R] of each. Negative: the learner's policy favours good responses more than the engine's does.
    NaN without responses.
    """
    terms = [
        math.exp(float((pi.astype(np.float64) - s.inference_logprobs)[s.loss_mask].mean())) * s.advantage
        for s, pi in zip(sequences, logprobs, strict=True)
        if s.num_trained
    ]
    return -math.fsum(terms) / len(terms) if terms else math.nan


def judge(run: Run, step: int, before: Snapshot) -> dict[str, float]:
    """Score the update just made and sent, undo it where the score is too low, and return `acceptance/*`.

    An undone update leaves learner and engine bit for bit as they were. A gap that is not known, or no number, is no
    reason to keep an update.
    """
    config, learner, generator = run.recipe.acceptance, run.learner, run.generator
    with run.monitor.phase("acceptance"):
        prompts = list(run.validation)[: config.prompts]
        groups = generator.rollout(prompts, config.num_samples, policy_version=learner.num_updates, step=step)
    run.score(groups, step)
    with run.monitor.phase("acceptance"):
        generator.sleep()
        batch = build_batch(step, everywhere(groups), run.recipe)
        gap = post_update_gap(batch.sequences, learner.compute_logprobs(batch))
    tolerance = tolerance_at(config, step)
    is_kept = gap >= -tolerance
    if not is_kept:
        before.restore()
        run.monitor.log(f"step {step}: update undone, gap {gap:.3g} is below {-tolerance:.3g}")
    hand_over(learner, generator, run.monitor.phase)
    return {
        "acceptance/gap": gap,
        "acceptance/tolerance": tolerance,
        "acceptance/kept": float(is_kept),
    }
