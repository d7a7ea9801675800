"""What the ranks of test_rounding.py run: a learner that rounds as an engine does, beside one whose checkpoint numpy
has rounded."""

import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from megatron_rl.checkpoint.hf_folder import HFFolder
from megatron_rl.config.rollout import OWN_BLOCK
from megatron_rl.learner.learner import Learner
from tests.support.plain_rounding import rounded_checkpoint
from tests.support.tiny import MODEL, stored_rollouts, tiny_recipe


def passes(kind: str, is_plain: bool, **learner: Any) -> dict[str, Any]:
    """Log-probs and gradients of the first batch, and the weights before them, after them and after an update.

    ``is_plain``: the checkpoint is rounded, and the learner rounds nothing."""
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        shutil.copytree(MODEL, model)
        if is_plain:
            weights = rounded_checkpoint(dict(HFFolder(MODEL).items()), kind, OWN_BLOCK[kind])
            tensors = {name: tensor.contiguous() for name, tensor in weights.items()}
            save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
        else:
            learner["quantization"] = "as_rollout"
        rollout = {"quantization": kind}
        trained = Learner(tiny_recipe(model={"path": str(model)}, learner=learner, rollout=rollout))
    before, batch = _weights(trained), stored_rollouts(0)
    logprobs = torch.cat([torch.from_numpy(row) for row in trained.compute_logprobs(batch)])
    everything = list(range(len(batch.sequences)))
    trained.accumulate(batch, everything, everything)
    gradients = {name: p.main_grad.clone() for name, p in trained.module.named_parameters()}
    between = _weights(trained)
    trained.update(batch)
    return {
        "logprobs": logprobs,
        "gradients": gradients,
        "weights": (before, between, _weights(trained)),
        "precision": trained.describe_precision().get("weights"),
    }


def _weights(learner: Learner) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in learner.export_weights()}
