"""The exact engine on a policy of fixed logits: where the dose of noise falls."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megatron_rl.config.exact import ExactConfig
from megatron_rl.config.rollout import RolloutConfig
from megatron_rl.exact.generator import ExactGenerator
from megatron_rl.rollout.generator import Sampling
from megatron_rl.types import Prompt

LOGITS = torch.tensor([0.0, 1.0, 2.0, -1.0])


class FixedPolicy:
    """The same distribution after every prefix; one replica."""

    def run(self, prompts, max_new_tokens, pick):
        running = list(range(len(prompts)))
        while running:
            picked = pick(running, LOGITS.expand(len(running), -1))
            running = [i for i, (_, ended) in zip(running, picked, strict=True) if not ended]
        return range(len(prompts))

    def logprobs(self, logits, tokens, temperature):
        return (logits / temperature).log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]

    def whole_vocabulary(self, logits):
        return logits

    def share(self, mine):
        return mine


@pytest.mark.parametrize("validates", [False, True])
def test_the_dose_falls_on_training_and_not_on_validation(validates):
    generator = ExactGenerator(
        RolloutConfig(engine="exact", max_response_length=8),
        ExactConfig(noise_std=0.5),
        FixedPolicy(),
        stop_token_ids=[],
        decode=str,
        describe=dict,
    )
    prompts = [Prompt(f"p:{i}", [1], "0") for i in range(4)]
    (group, *_) = generator.rollout(prompts, 2, policy_version=0, step=0, sampling=Sampling(8) if validates else None)
    for rollout in group.rollouts:
        differs = np.abs(rollout.inference_logprobs - rollout.exact_logprobs)
        assert differs.max() == 0 if validates else differs.min() > 0
