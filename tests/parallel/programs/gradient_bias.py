"""What the ranks of test_gradient_bias.py run."""

from __future__ import annotations

from typing import Any

import numpy as np

from megatron_rl.learner.learner import Learner
from megatron_rl.stored.gradient_bias import gradient_bias
from tests.support.tiny import stored_rollouts, tiny_recipe

TOKEN_IS = [{"mode": "is", "level": "token"}]
SEQUENCE_IS = [{"mode": "is", "level": "sequence"}]


def measure(parallel: dict[str, int]) -> dict[str, Any]:
    """Figures for a mu that is po, half of po at every token, and po with noise; and whether the weights stayed."""
    objective = {"policy_term": {"name": "ppo_clip"}, "aggregation": "token-mean"}
    learner = Learner(tiny_recipe(learner={"parallel": parallel}, objective=objective))
    before = {name: tensor.clone() for name, tensor in learner.export_weights()}
    batch = stored_rollouts(3)
    log_po = learner.compute_logprobs(batch)
    random = np.random.default_rng(0)
    noise = [0.1 * random.standard_normal(len(logprobs)) for logprobs in log_po]
    found = {}
    for name, shift, correction in (
        ("same", 0.0, SEQUENCE_IS),
        ("half", np.log(0.5), TOKEN_IS),
        ("noisy", None, SEQUENCE_IS),
    ):
        for sequence, logprobs, noisy in zip(batch.sequences, log_po, noise, strict=True):
            sequence.inference_logprobs = (logprobs + (noisy if shift is None else shift)).astype(np.float32)
        reference = tiny_recipe(learner={"parallel": parallel}, objective={**objective, "correction": correction})
        found[name] = gradient_bias(learner, batch, reference).figures()
    after = dict(learner.export_weights())
    found["moved"] = max(float((after[name] - tensor).abs().max()) for name, tensor in before.items())
    learner.update(batch)  # the comparison leaves a learner that can go on
    return found
