"""What the ranks of test_gradient_noise_score_norms.py run."""

from typing import Any

import numpy as np

from megatron_rl.learner.gradient_noise import score_weights
from megatron_rl.learner.learner import Learner
from megatron_rl.types import Batch
from tests.support.tiny import stored_rollouts, tiny_recipe

SIZE = 4


def groups_of_four(minibatches: int = 1) -> Batch:
    """Stored rollouts in groups."""
    batch = stored_rollouts(0, 12, minibatches)
    for i, sequence in enumerate(batch.sequences):
        sequence.group, sequence.reward = i // SIZE, float(i * i % 5)
    return batch


def log_ratio(number: int) -> float:
    """log pi - log mu of every token of a response."""
    return 0.05 * (number % 5 - 2)


def advantages(**sections: Any) -> dict[str, Any]:
    """Weights of the baseline, the advantages after an update with it, and those of a batch without groups."""
    learner = Learner(tiny_recipe(objective={"advantage": "min_variance", "max_response_length": 24}, **sections))
    batch = groups_of_four(learner.recipe.batch.minibatches)
    for i, logprobs in enumerate(learner.compute_logprobs(batch)):
        batch.sequences[i].inference_logprobs = (logprobs - log_ratio(i)).astype(np.float32)
    homes = learner._distribute(batch, makes_pass=False)[1]
    weights = score_weights(learner.scorer, batch, homes).tolist()
    learner.update(batch)
    final = groups_of_four(learner.recipe.batch.minibatches)
    for sequence in final.sequences:
        sequence.group = None
    learner.update(final)
    return {
        "weights": weights,
        "advantages": [sequence.advantage for sequence in batch.sequences],
        "final": [sequence.advantage for sequence in final.sequences],
    }
