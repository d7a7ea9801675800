"""A second model, which gives the log-prob of each token that the policy sampled: the section `reference`."""

from __future__ import annotations

from typing import Annotated

from megatron_rl.config.base import AnyPath, LookedUp, Section


class SecondModelConfig(Section):
    path: Annotated[AnyPath | None, LookedUp(hub="model")] = None
    """Its folder, as `model.path`, with the same vocabulary. null: the checkpoint that the policy starts from."""


class ReferenceConfig(SecondModelConfig):
    """A policy that is not trained, on the learner's ranks: `reference/*` measures how far the trained one is from it,
    and `objective.kl_loss` and `objective.kl_in_reward` hold it back. With learner.lora and no path it is the policy
    without its adapters, else a second copy of weights, which lies in host memory between its passes."""
