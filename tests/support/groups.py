"""Responses made without an engine, and groups of them."""

from typing import Any

import numpy as np

from megatron_rl.types import Group, Prompt, Rollout


def any_response(id: str, length: int = 1, finish_reason: str = "stop", **fields: Any) -> Rollout:
    """A response of ``length`` tokens of which nobody looks at the numbers, or at ``fields`` alone."""
    tokens = fields.pop("tokens", np.ones(length, np.int32))
    zeros = np.zeros(len(tokens), np.float32)
    fields = {"prompt": [1], "inference_logprobs": zeros, "policy_versions": zeros.astype(np.int32), **fields}
    return Rollout(id, tokens=np.asarray(tokens, np.int32), finish_reason=finish_reason, **fields)


def whole_sequence(
    id: str, tokens: np.ndarray, prompt_length: int, loss_mask: np.ndarray | None = None, **fields: Any
) -> Rollout:
    """A response by all ``tokens`` of prompt and response, of which ``loss_mask`` are trained."""
    tokens = tokens.astype(np.int32)
    return Rollout(id, tokens[:prompt_length], tokens[prompt_length:], sampled=loss_mask, **fields)


def group(rewards: list[float], responses: list[list[int]], reason: str = "stop") -> Group:
    rollouts = [
        any_response(f"p:0/{i}", tokens=tokens, finish_reason=reason, text="text", reward=reward, raw_reward=reward)
        for i, (reward, tokens) in enumerate(zip(rewards, responses, strict=True))
    ]
    return Group(Prompt(id="p:0", tokens=[1], answer="1"), rollouts)
