"""What the ranks of test_gradient_bias.py run."""

from typing import Any

import numpy as np

from megatron_rl.instruments.batch.gradient_bias import gradient_bias
from megatron_rl.learner.learner import Learner
from tests.support.plain_gradient_bias import LEVELS, PARTS, STEP, shifts
from tests.support.tiny import stored_rollouts, tiny_recipe


def measure(parallel: dict[str, int]) -> dict[str, Any]:
    """Figures for a mu that is po, half of po at every token, and po with noise; and whether the weights stayed."""
    objective = {"policy_term": {"name": "ppo_clip"}, "aggregation": "token-mean"}
    learner = Learner(tiny_recipe(learner={"parallel": parallel}, objective=objective))
    before = {name: tensor.clone() for name, tensor in learner.export_weights()}
    batch = stored_rollouts(STEP)
    log_po = learner.compute_logprobs(batch)
    results = {}
    for name, level in LEVELS.items():
        for sequence, logprobs, shift in zip(batch.sequences, log_po, shifts(name, batch), strict=True):
            sequence.inference_logprobs = (logprobs + shift).astype(np.float32)
        correction = [{"mode": "is", "level": level}]
        reference = tiny_recipe(learner={"parallel": parallel}, objective={**objective, "correction": correction})
        results[name] = gradient_bias(learner, batch, reference, PARTS).figures()
    after = dict(learner.export_weights())
    results["moved"] = max(float((after[name] - tensor).abs().max()) for name, tensor in before.items())
    learner.update(batch)  # the comparison leaves a learner that can go on
    return results
