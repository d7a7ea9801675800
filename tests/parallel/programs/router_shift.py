"""What the ranks of test_router_shift.py run."""

from typing import Any

import numpy as np
import torch
from megatron.core.transformer.moe.router import TopKRouter

from megatron_rl.learner.learner import Learner
from megatron_rl.learner.passes import router_shift
from tests.support.tiny import stored_rollouts, tiny_recipe


def shifts(replay: str = "off", **learner: Any) -> dict[str, Any]:
    """Of every sequence in its update: the shift as the learner has it, [R], and the routers' logits [R, L, E] there
    and at the weights before the batch; and metrics. Two updates."""
    objective = {"router_shift": 0.9, "max_response_length": 24}
    made = Learner(
        tiny_recipe(objective=objective, batch={"minibatches": 2}, routing={"replay": replay}, learner=learner)
    )
    routers = [module for module in made.module.modules() if isinstance(module, TopKRouter)]
    latest: dict[int, torch.Tensor] = {}
    for number, router in enumerate(routers):
        router.gating = _noting(latest, number, router.gating)
    batch, shifts, loss = stored_rollouts(0, minibatches=2), {}, made._loss
    before = []
    for i in range(len(batch.sequences)):
        with torch.no_grad():
            made.passes.forward(made.passes.alone(batch, i))
        before.append(_of_response(latest, made.passes.alone(batch, i), 0))

    def noted(logits, microbatch, **options):
        shift = router_shift(microbatch)
        pieces = [] if shift is None else shift.split(microbatch.response_lengths)
        for number, (i, piece) in enumerate(zip(microbatch.indices, pieces)):
            shifts[i] = piece.numpy().copy(), _of_response(latest, microbatch, number)
        return loss(logits, microbatch, **options)

    made._loss = noted
    metrics = made.update(batch)
    return {"before": before, "found": shifts, "metrics": metrics, "first": batch.minibatches[0]}


def _noting(latest: dict[int, torch.Tensor], number: int, gating):
    def noted(x):
        latest[number] = gating(x)
        return latest[number]

    return noted


def _of_response(latest: dict[int, torch.Tensor], microbatch, number: int) -> np.ndarray:
    """[R, L, E] logits where the tokens of the ``number``-th response are predicted."""
    rows = microbatch.positions.split(microbatch.response_lengths)[number]
    layers = [latest[layer].detach().flatten(0, -2)[rows] for layer in sorted(latest)]
    return torch.stack(layers, dim=1).double().numpy()
