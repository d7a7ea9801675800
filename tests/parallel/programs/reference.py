"""What the ranks of test_second_model.py run."""

from pathlib import Path
from typing import Any

import numpy as np

from megatron_rl.learner.learner import Learner
from tests.support.tiny import stored_rollouts, tiny_recipe


def train(num_steps: int, minibatches: int = 1, folder: str = "", resumed: str = "", **sections: Any) -> dict[str, Any]:
    """Metrics of updates, weights after them, and of the last update's sequences log-probs and what is off the reward.

    ``folder``: where a checkpoint goes before the last update. ``resumed``: a checkpoint to go on from.
    """
    learner = Learner(tiny_recipe(batch={"minibatches": minibatches}, **sections), keep_current_logprobs=True)
    if resumed:
        learner.load(Path(resumed))
    results: dict[str, Any] = {"metrics": []}
    for step in range(learner.step, num_steps):
        if folder and step == num_steps - 1:
            learner.step = step
            results["path"] = str(learner.save(Path(folder), {}))
        batch = stored_rollouts(step, minibatches=minibatches)
        results["metrics"].append(learner.update(batch))
    for name in ("reference_logprobs", "old_logprobs", "current_logprobs"):
        held = {i: array for i, s in enumerate(batch.sequences) if (array := getattr(s, name)) is not None}
        shared = learner.passes.share(held)
        results[name] = [shared[i] for i in sorted(shared)]
    results["penalties"] = [s.kl_penalty for s in batch.sequences]
    results["weights"] = {name: tensor.float().clone() for name, tensor in learner.export_weights()}
    return results


def trained_folder(folder: str) -> str:
    """A Hugging Face folder of the tiny model after an update."""
    learner = Learner(tiny_recipe())
    learner.update(stored_rollouts(7))
    learner.export_hf(Path(folder))
    return folder


def passes_of(path: str, **sections: Any) -> list[np.ndarray]:
    """Log-probs of the last update's sequences under the model ``path``, as a policy."""
    return Learner(tiny_recipe(model={"path": path}, **sections)).compute_logprobs(stored_rollouts(1), "native")
