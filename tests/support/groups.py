"""Groups of rollouts with given rewards and responses."""

from __future__ import annotations

import numpy as np

from megatron_rl.types import Group, Prompt, Rollout


def group(rewards: list[float], responses: list[list[int]], reason: str = "stop") -> Group:
    rollouts = [
        Rollout(
            prompt_id="p:0",
            sample=i,
            tokens=tokens,
            inference_logprobs=np.zeros(len(tokens), np.float32),
            finish_reason=reason,
            policy_versions=np.zeros(len(tokens), np.int32),
            text="text",
            reward=reward,
            raw_reward=reward,
        )
        for i, (reward, tokens) in enumerate(zip(rewards, responses, strict=True))
    ]
    return Group(Prompt(id="p:0", tokens=[1], answer="1"), rollouts)
