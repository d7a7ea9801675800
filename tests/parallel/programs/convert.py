"""What the ranks of test_convert.py run."""

from pathlib import Path
from typing import Any

import torch

from megatron_rl.checkpoint.save import load_weights
from megatron_rl.learner.learner import Learner
from megatron_rl.learner.optimizer import master_reader
from tests.support.tiny import stored_rollouts, tiny_recipe


def load_and_save(model: str, weights: str, folder: str, **sections: Any) -> str:
    """A learner of ``model`` takes converted ``weights`` and writes a checkpoint of a run under its own layout."""
    learner = Learner(tiny_recipe(model={"path": model}, **sections))
    load_weights(Path(weights), learner.module, learner.optimizer)
    return str(learner.save(Path(folder), {}))


def train_and_save(folder: str, **sections: Any) -> tuple[str, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Path of a checkpoint after an update, the weights as the model has them, and the fp32 masters."""
    learner = Learner(tiny_recipe(**sections))
    learner.update(stored_rollouts(0))
    path = learner.save(Path(folder), {})
    own = {name: tensor.clone() for name, tensor in learner.weights.export()}
    masters = learner.weights.export(master_reader(learner.optimizer, learner.offload.device_values), torch.float32)
    return str(path), own, {name: tensor.clone() for name, tensor in masters}
