"""Gradient norms of small batches, and what clipping makes of one."""

from typing import Any

import torch

from megatron_rl.learner.learner import Learner
from tests.parallel.programs.replay import PLAIN_DESCENT, STEP
from tests.support.tiny import stored_rollouts, tiny_recipe

LR = 1e-30  # far below the resolution of any weight: every batch meets the same ones


def norms_and_clipped_update(num_batches: int, num_sequences: int, **parallel: Any) -> dict[str, Any]:
    """Norm of each batch's gradient by the same weights; and the first one's gradient, in Hugging Face names, as
    clipping to a norm of 1 leaves it."""
    learner = Learner(tiny_recipe(learner={"optimizer": {"lr": LR}, "parallel": parallel}))
    batches = [stored_rollouts(number, num_sequences) for number in range(num_batches)]
    norms = [learner.update(batch)["actor/grad_norm"] for batch in batches]
    descent = {"optimizer": PLAIN_DESCENT | {"clip_grad": 1.0}, "parallel": parallel}
    learner = Learner(tiny_recipe(learner=descent))
    before = {name: tensor.double().clone() for name, tensor in learner.export_weights()}
    learner.update(batches[0])
    clipped = {name: (tensor.double() - before[name]) / STEP for name, tensor in learner.export_weights()}
    norm = float(torch.stack([gradient.square().sum() for gradient in clipped.values()]).sum().sqrt())
    return {"norms": norms, "clipped": clipped, "clipped norm": norm}
