"""What the ranks of test_learner_lora.py run."""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_rl.learner.learner import Learner
from tests.support.tiny import stored_rollouts, tiny_recipe

LORA = {"rank": 4, "alpha": 8.0}
# With Adam's usual eps a gradient that is all rounding moves a weight by up to lr: see test_learner_layouts.py.
OPTIMIZER = {"lr": 1e-2, "eps": 1e-3}


def start(model: str, **learner: Any) -> Learner:
    section = {"lora": LORA, "optimizer": OPTIMIZER, **learner}
    return Learner(tiny_recipe(model={"path": model}, learner=section))


def exported(learner: Learner) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in learner.export_weights()}


def train(model: str, num_steps: int, folder: str = "", **learner: Any) -> dict[str, Any]:
    """Log-probs and exported weights before and after; metrics; frozen weights; a checkpoint before the last step."""
    trained = start(model, **learner)
    results: dict[str, Any] = {"before": logprobs(trained), "exported before": exported(trained), "metrics": []}
    for step in range(num_steps):
        if folder and step == num_steps - 1:
            trained.step = step
            results["path"] = str(trained.save(Path(folder), {}))
        results["metrics"].append(trained.update(stored_rollouts(step)))
    frozen = {name: p.detach().clone() for name, p in trained.weights.parameters.items()}
    adapters = {name: p.detach().clone() for name, p in trained.module.named_parameters() if "lora_" in name}
    results |= {"after": logprobs(trained), "exported": exported(trained), "frozen": frozen, "adapters": adapters}
    if folder:
        trained.export_hf(Path(folder, "hf"))
    return results


def resume(model: str, path: str, **learner: Any) -> dict[str, Any]:
    trained = start(model, **learner)
    trained.load(Path(path))
    metrics = trained.update(stored_rollouts(trained.step))
    return {"metrics": metrics, "exported": exported(trained)}


def logprobs(learner: Learner) -> np.ndarray:
    return np.concatenate(learner.compute_logprobs(stored_rollouts(100)))


def first_gradient(model: str, lora: bool) -> dict[str, torch.Tensor]:
    """Reduced gradients of the first update, by Megatron's name; with adapters also A as it starts."""
    learner = start(model, **({} if lora else {"lora": None}), optimizer={"lr": 1e-12, "clip_grad": 0.0})
    start_values = {f"start {n}": p.detach().clone() for n, p in learner.module.named_parameters() if "lora_A" in n}
    learner.update(stored_rollouts(0))
    gradients = {n: p.main_grad.clone() for n, p in learner.module.named_parameters() if p.requires_grad}
    return gradients | start_values
