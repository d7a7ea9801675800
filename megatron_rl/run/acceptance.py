"""Updates that are proposed: scored on the rollout engine, and kept or undone [MIPU, arXiv 2606.29526].

`Snapshot` is a learner as it was before an update, in host memory. It takes the learner back bit for bit.
"""

from __future__ import annotations

import copy
import math
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from megatron_rl.batch import build_batch
from megatron_rl.checkpoint.shards import distributed_optimizers
from megatron_rl.checkpoint.state import model_tensors
from megatron_rl.config.sections import AcceptanceConfig
from megatron_rl.rollout.requests import everywhere
from megatron_rl.run.engines import hand_over
from megatron_rl.types import Rollout

if TYPE_CHECKING:
    from megatron_rl.learner.learner import Learner
    from megatron_rl.run.start import Run


class Snapshot:
    """What an update changes: the model's tensors, Adam's states and fp32 masters, its groups' numbers, the schedule,
    the loss scale and the counters. Costs as much host memory as these take, on every rank. Collective, as is
    `restore`."""

    def __init__(self, learner: Learner) -> None:
        learner.offload.come_back()
        self._learner = learner
        self._tensors = [(tensor, tensor.detach().to("cpu", copy=True)) for tensor in _tensors(learner)]
        self._adams = [
            (
                adam,
                {parameter: _values(state) for parameter, state in adam.state.items()},
                copy.deepcopy([{k: v for k, v in group.items() if k != "params"} for group in adam.param_groups]),
            )
            for adam in _adams(learner)
        ]
        overflow = learner.overflow
        self._numbers = copy.deepcopy((learner.num_updates, overflow.state_dict(), overflow.scaler.state_dict()))
        self._schedule = copy.deepcopy(_of_schedule(learner))

    @property
    def num_updates(self) -> int:
        """The policy version that `restore` goes back to."""
        return self._numbers[0]

    @torch.no_grad()
    def restore(self) -> None:
        """Take the learner back: nothing of what it did since is left."""
        learner = self._learner
        learner.offload.come_back()
        for tensor, values in self._tensors:
            tensor.copy_(values)
        for adam, states, groups in self._adams:
            for parameter in list(adam.state):
                if parameter not in states:
                    del adam.state[parameter]  # before its first step Adam has none
            for parameter, values in states.items():
                for key, value in values.items():
                    _put(adam.state[parameter], key, value)
            for group, values in zip(adam.param_groups, groups, strict=True):
                group.update(copy.deepcopy(values))
        learner.num_updates, overflow, scaler = copy.deepcopy(self._numbers)
        learner.overflow.load_state_dict(overflow)
        learner.overflow.scaler.load_state_dict(scaler)
        vars(learner.scheduler).update(copy.deepcopy(self._schedule))


def _adams(learner: Learner) -> list[torch.optim.Optimizer]:
    return [sharded.optimizer for sharded in distributed_optimizers(learner.optimizer)]


def _tensors(learner: Learner) -> list[torch.Tensor]:
    """The model's, and the masters of those that have any."""
    masters = [p for adam in _adams(learner) for group in adam.param_groups for p in group["params"]]
    return [*model_tensors(learner.module).values(), *masters]


def _values(state: dict[str, Any]) -> dict[str, Any]:
    return {key: v.detach().to("cpu", copy=True) if torch.is_tensor(v) else v for key, v in state.items()}


def _put(state: dict[str, Any], key: str, value: Any) -> None:
    if torch.is_tensor(value):
        state[key].copy_(value)
    else:
        state[key] = value


def _of_schedule(learner: Learner) -> dict[str, Any]:
    return {name: value for name, value in vars(learner.scheduler).items() if name != "optimizer"}


def tolerance_at(config: AcceptanceConfig, step: int) -> float:
    """c of a step: from `start_tolerance` to `tolerance` in a straight line over `anneal_steps`."""
    if config.start_tolerance is None:
        return config.tolerance
    left = max(0.0, 1 - step / config.anneal_steps)
    return config.tolerance + (config.start_tolerance - config.tolerance) * left


def post_update_gap(sequences: list[Rollout], logprobs: list[np.ndarray]) -> float:
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
    reason to keep an update. One that was skipped is not judged: to undo it would undo the count of what overflowed.
    """
    config, learner, generator = run.recipe.acceptance, run.learner, run.generator
    if learner.num_updates == before.num_updates:
        return {}
    with run.monitor.phase("acceptance"):
        prompts = list(run.validation)[: config.prompts]
        groups = generator.rollout(prompts, config.num_samples, policy_version=learner.num_updates, step=step)
    run.score(groups, step)
    with run.monitor.phase("acceptance"):
        generator.sleep()
        batch = build_batch(step, everywhere(groups), run.recipe.batch, run.recipe.objective)
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
