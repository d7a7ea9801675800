"""Metrics computed from the sampled responses alone."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_rl.types import Group

# Odd multiplier of the polynomial hash over n-grams, modulo 2^64 (Knuth's MMIX constant). Two different n-grams collide
# with probability of about 2^-64, which does not matter for a fraction.
_HASH_MULTIPLIER = np.uint64(6364136223846793005)
REPETITION_NGRAM = 8
"""Length in tokens of the n-grams that response/repetition_frac counts."""


def repetition_fraction(tokens: Sequence[int], ngram: int = REPETITION_NGRAM) -> float:
    """Return the share of n-grams that occurred earlier in the response: 0 for none, near 1 for an endless loop.

    ``tokens`` [R]. Returns 0 for a response with fewer than two n-grams.
    """
    num_ngrams = len(tokens) - ngram + 1
    if num_ngrams < 2:
        return 0.0
    ids = np.asarray(tokens, dtype=np.uint64) + np.uint64(1)
    hashes = np.zeros(num_ngrams, dtype=np.uint64)
    for offset in range(ngram):
        hashes = hashes * _HASH_MULTIPLIER + ids[offset : offset + num_ngrams]
    return 1.0 - len(np.unique(hashes)) / num_ngrams


def rollout_metrics(groups: Sequence[Group], ngram: int = REPETITION_NGRAM) -> dict[str, float]:
    """Return `critic/rewards/*`, `critic/score/mean`, `response_length/*`, `response/*` and `groups/*` of a step.

    Rewards are after shaping, scores before; lengths in tokens, the stop token included; `clip_ratio` is the share of
    responses cut at the length limit; `groups/no_signal_frac` the share of groups whose rewards are all equal.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    if not rollouts:
        return {}
    rewards = np.array([rollout.reward for rollout in rollouts])
    lengths = np.array([rollout.length for rollout in rollouts])
    repeats = np.array(
        [repetition_fraction(r.tokens, ngram) if r.repetition is None else r.repetition for r in rollouts]
    )
    return {
        "critic/rewards/mean": float(rewards.mean()),
        "critic/rewards/max": float(rewards.max()),
        "critic/rewards/min": float(rewards.min()),
        "critic/score/mean": float(np.mean([rollout.raw_reward for rollout in rollouts])),
        "response_length/mean": float(lengths.mean()),
        "response_length/max": float(lengths.max()),
        "response_length/min": float(lengths.min()),
        "response_length/clip_ratio": float(np.mean([rollout.truncated for rollout in rollouts])),
        "response/repetition_frac": float(repeats.mean()),
        "response/repetitive_responses": float((repeats > 0.5).mean()),
        "groups/no_signal_frac": float(np.mean([len(set(group.rewards)) == 1 for group in groups])),
    }
