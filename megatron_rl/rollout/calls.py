"""Checks that every engine makes of a call of `Generator.rollout`, and the speed that it reports."""

from __future__ import annotations

import numpy as np

from megatron_rl.errors import InputError
from megatron_rl.rollout.generator import RolloutError, Sampling
from megatron_rl.types import Prompt, Rollout


def check_version(who_holds: str, held: int, wanted: int) -> None:
    """Raise `RolloutError` unless the weights that are asked for are there. ``who_holds`` begins the message."""
    if wanted != held:
        raise RolloutError(
            f"{who_holds} the weights of policy version {held}, rollouts of {wanted} were asked for: a refit is missing"
        )


def check_token_versions(name: str, versions: np.ndarray, begun_with: int, exactly: bool) -> int:
    """How many policies sampled a response: ``versions`` [R] of its tokens, each ``begun_with`` or later.

    Raises `RolloutError`, begun with ``name``, for a token of older weights; with ``exactly``, of any others.
    """
    wrong = versions != begun_with if exactly else versions < begun_with
    if wrong.any():
        token = int(wrong.argmax())
        due = f"{begun_with}" if exactly else f"{begun_with} or a later one, with which its batch was begun"
        raise RolloutError(f"{name}: token {token} was sampled by policy version {versions[token]}, expected {due}")
    return 1 + int(np.count_nonzero(np.diff(versions)))


def check_lengths(prompts: list[Prompt], sampling: Sampling, max_prompt_length: int, max_response_length: int) -> None:
    """Raise `InputError` where ``prompts`` or ``sampling`` go beyond what the engine was started for."""
    if sampling.max_response_length > max_response_length:
        raise InputError(
            f"sampling: max_response_length {sampling.max_response_length} is above the engine's "
            f"{max_response_length} (rollout.max_response_length)"
        )
    for prompt in prompts:
        if not 0 < len(prompt.tokens) <= max_prompt_length:
            raise InputError(
                f"prompt {prompt.id!r} has {len(prompt.tokens)} tokens; 1 … {max_prompt_length} are allowed "
                "(data.prompt.max_length)"
            )


def throughput(rollouts: list[Rollout], seconds: float) -> dict[str, float]:
    """`perf/*` of a call that took ``seconds``. Tokens are those of responses."""
    num_tokens = sum(rollout.length for rollout in rollouts)
    return {"perf/rollout_tokens": float(num_tokens), "perf/tokens_per_s/rollout": num_tokens / seconds}
