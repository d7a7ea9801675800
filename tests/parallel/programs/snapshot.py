"""What the ranks of test_acceptance_snapshot.py run."""

from __future__ import annotations

from typing import Any

import torch

from megatron_rl.checkpoint.shards import distributed_optimizers
from megatron_rl.learner.learner import Learner
from megatron_rl.run.acceptance import Snapshot
from tests.support.tiny import stored_rollouts, tiny_recipe


def updates(steps: tuple[int, ...], undone: tuple[int, ...], **learner: Any) -> dict[str, Any]:
    """Metrics of the updates that stay, and at the end everything that Adam and the engine would see."""
    made = Learner(tiny_recipe(learner=learner, schedule={"style": "linear", "decay_steps": 9}))
    metrics = []
    for step in steps:
        before = Snapshot(made) if step in undone else None
        measured = made.update(stored_rollouts(step))
        if before is None:
            metrics.append(measured)
        else:
            before.restore()
    made.offload.come_back()
    adams = [chained.optimizer for chained in distributed_optimizers(made.optimizer)]
    states = [value for adam in adams for state in adam.state.values() for value in state.values()]
    return {
        "metrics": metrics,
        "weights": {name: tensor.clone() for name, tensor in made.export_weights()},
        "states": [value.clone() if torch.is_tensor(value) else value for value in states],
        "updates": made.num_updates,
    }
