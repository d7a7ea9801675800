"""What the divergence from a reference takes off rewards. Ranks and layouts: tests/parallel/test_second_model.py."""

import numpy as np
import pytest
import torch

from megatron_rl.config.policy_terms import KlInReward
from megatron_rl.errors import InputError
from megatron_rl.learner.second_model import refuse_nan, take_off_rewards
from megatron_rl.types import MIN_LOGPROB
from tests.support.rounding import rounded
from tests.support.tiny import stored_rollouts

ESTIMATES = {
    "k1": lambda d: d,
    "k2": lambda d: d**2 / 2,
    "k3": lambda d: np.minimum(np.exp(-d) - 1 + d, 10),
}


@pytest.mark.parametrize("kind", ESTIMATES)
def test_sum_over_the_tokens_that_the_policy_sampled(kind):
    """Whether the response is in the loss or not; a token that is impossible under the reference has a floor."""
    batch, random = stored_rollouts(0), np.random.default_rng(0)
    for sequence in batch.sequences:
        sequence.holder = 0
        sequence.old_logprobs = -random.exponential(1.0, sequence.length).astype(np.float32)
        sequence.reference_logprobs = sequence.old_logprobs + random.normal(0, 1.0, sequence.length).astype(np.float32)
    first, *_, last = batch.sequences
    first.masked, first.reference_logprobs[-1], first.sampled = True, -np.inf, None
    last.sampled = np.arange(last.length) % 2 == 0
    mean = take_off_rewards(batch, KlInReward(coef=0.5, type=kind))
    found = []
    for s in batch.sequences:
        kept = slice(None) if s.sampled is None else s.sampled
        k = ESTIMATES[kind](s.old_logprobs.astype(float) - np.maximum(s.reference_logprobs, MIN_LOGPROB))[kept]
        assert s.kl_penalty == rounded(0.5 * k.sum(), scale=10 + np.abs(k).sum(), dtype=torch.float32)
        found.append(2 * s.kl_penalty)
    assert mean == rounded(np.mean(found), 100, scale=max(found))


def test_a_log_prob_that_is_no_number_ends_the_update():
    refuse_nan("reference_logprobs", {0: np.array([-1.0, -np.inf], np.float32), 3: np.zeros(0, np.float32)}, "fp16")
    with pytest.raises(InputError, match=r"teacher: a log-prob under it is NaN, with learner\.dtype: fp16"):
        refuse_nan("teacher_logprobs", {0: np.zeros(2), 5: np.array([-1.0, np.nan])}, "fp16")
