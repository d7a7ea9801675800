"""What the ranks of test_second_model_scoring.py run."""

from pathlib import Path
from typing import Any

import numpy as np

from megatron_rl.learner.learner import Learner
from tests.support.routes import random_routes, with_routes
from tests.support.tiny import stored_rollouts, tiny_recipe


def scored(
    num_steps: int = 2, minibatches: int = 1, folder: str = "", has_routes: bool = False, **sections: Any
) -> dict[str, Any]:
    """Metrics of updates, the last one's log-probs, the weights after it, and the bytes that its scoring model keeps.

    ``folder``: where the model of before the last update goes.
    """
    learner = Learner(
        tiny_recipe(batch={"minibatches": minibatches}, **sections), keep_current_logprobs=minibatches == 1
    )
    metrics: list[dict[str, float]] = []
    for step in range(num_steps):
        if folder and step == num_steps - 1:
            learner.export_hf(Path(folder))
        batch = stored_rollouts(step, minibatches=minibatches)
        if has_routes:
            with_routes(batch, random_routes(batch))
        metrics.append(learner.update(batch))
    results: dict[str, Any] = {"metrics": metrics, "mask": np.concatenate([s.loss_mask for s in batch.sequences])}
    results["mu"] = np.concatenate([s.inference_logprobs for s in stored_rollouts(num_steps - 1).sequences])
    for name in ("scoring_logprobs", "current_logprobs"):
        held = {i: array for i, s in enumerate(batch.sequences) if (array := getattr(s, name)) is not None}
        shared = learner.passes.share(held)
        results[name] = np.concatenate([shared[i] for i in sorted(shared)] or [np.zeros(0)])
    results["weights"] = {name: tensor.float().clone() for name, tensor in learner.export_weights()}
    model = learner.second_models.get("scoring_logprobs")
    parameters = [] if model is None else model.passes.module.parameters()
    results["held"] = sum(parameter.untyped_storage().nbytes() for parameter in parameters)
    return results
