"""A learner as it was before an update, in host memory, to which it can be taken back bit for bit."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch

from megatron_rl.checkpoint.shards import distributed_optimizers

if TYPE_CHECKING:
    from megatron_rl.learner.learner import Learner


class Snapshot:
    """What an update changes: weights, Adam's states and fp32 masters, its groups' numbers, the schedule, the loss
    scale and the counters. Costs as much host memory as these take, on every rank. Collective, as is `restore`."""

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
    """Weights, and the masters of those that have any."""
    masters = [p for adam in _adams(learner) for group in adam.param_groups for p in group["params"]]
    return [*learner.module.parameters(), *masters]


def _values(state: dict[str, Any]) -> dict[str, Any]:
    return {key: v.detach().to("cpu", copy=True) if torch.is_tensor(v) else v for key, v in state.items()}


def _put(state: dict[str, Any], key: str, value: Any) -> None:
    if torch.is_tensor(value):
        state[key].copy_(value)
    else:
        state[key] = value


def _of_schedule(learner: Learner) -> dict[str, Any]:
    return {name: value for name, value in vars(learner.scheduler).items() if name != "optimizer"}
