"""The hacking instruments: what is biased, what is not, and noise that no layout can change."""

import math
from dataclasses import replace

import pytest
import torch

from megatron_rl.config import ObjectiveConfig
from megatron_rl.objective import ObjectiveInputs, compute_objective
from megatron_rl.objective.instruments import sequence_keys, standard_normal
from tests.support.rounding import STANDARD_ERRORS, rounded
from tests.unit.objective.batches import BATCH, loss_and_gradient, packed, padded, random_batch
from tests.unit.objective.reference import normal

# Two-sided 5-sigma: a false alarm once in two million seeds; seeds are fixed anyway.


def draws(num_sequences: int, num_places: int, seed: int = 0, step: int = 0) -> torch.Tensor:
    keys = sequence_keys(seed, step, torch.arange(num_sequences))
    return standard_normal(keys[:, None].expand(-1, num_places), torch.arange(num_places).expand(num_sequences, -1))


def test_the_generator_is_the_published_hash():
    """Big-integer arithmetic in plain Python, for negative ids and seeds beyond 32 bits too."""
    ids = torch.tensor([0, 1, -5, 2**62])
    for seed, step in ((0, 0), (2**40 + 7, 123_456)):
        keys = sequence_keys(seed, step, ids)
        for i, place in ((0, 0), (1, 1), (2, 4096), (3, 70_000)):
            got = standard_normal(keys[i], torch.tensor(place)).item()
            assert got == rounded(normal(seed, step, ids[i].item(), place))


def test_draws_are_standard_normal():
    sample = draws(500, 1000).flatten()
    n = sample.numel()
    assert abs(sample.mean()) < STANDARD_ERRORS / math.sqrt(n)
    assert abs(sample.var() - 1) < STANDARD_ERRORS * math.sqrt(2 / n)
    assert abs(sample.pow(3).mean()) < STANDARD_ERRORS * math.sqrt(15 / n)
    assert abs(sample.pow(4).mean() - 3) < STANDARD_ERRORS * math.sqrt(96 / n)
    for bound in (0.5, 1.0, 2.0, 3.0):
        inside = math.erf(bound / math.sqrt(2))
        assert abs((sample.abs() < bound).double().mean() - inside) < STANDARD_ERRORS * math.sqrt(
            inside * (1 - inside) / n
        )


@pytest.mark.parametrize(
    "other",
    [
        lambda: draws(500, 1000, seed=1),
        lambda: draws(500, 1000, step=1),
        lambda: draws(500, 1001)[:, 1:],
        lambda: draws(501, 1000)[1:],
    ],
    ids=["seed", "step", "neighbouring token", "neighbouring sequence"],
)
def test_draws_of_different_keys_are_uncorrelated(other):
    first, second = draws(500, 1000).flatten(), other().flatten()
    assert abs((first * second).mean()) < STANDARD_ERRORS / math.sqrt(first.numel())


def noise_factor(form, batch, sigma=0.2, key=(3, 1)) -> torch.Tensor:
    """xi of every trained token, read off the gradient of a loss that is linear in it."""
    config = ObjectiveConfig.model_validate({"policy_term": "cispo", "variance": {"sigma": sigma}})
    clean = ObjectiveConfig.model_validate({"policy_term": "cispo"})
    inputs, mask = form(batch)
    inputs = replace(inputs, old_logprobs=None, advantages=torch.ones(len(batch), dtype=torch.float64))
    noisy = loss_and_gradient(compute_objective(inputs, config, noise_key=key), inputs, mask)[1]
    return noisy / loss_and_gradient(compute_objective(inputs, clean), inputs, mask)[1]


def test_noise_follows_the_token_and_not_its_place_in_the_batch():
    batch = random_batch(1)
    factors = noise_factor(padded, batch)
    want = [1 + 0.2 * normal(3, 1, seq.id, t) for seq in batch for t in range(len(seq))]
    assert factors.tolist() == rounded(want)
    assert noise_factor(packed, batch).tolist() == rounded(want)
    assert noise_factor(lambda b: padded(b, seed=9, extra=11), batch).tolist() == rounded(want)
    by_sequence = factors.split([len(s) for s in batch])
    for seq, part in zip(reversed(batch), noise_factor(padded, batch[::-1]).split([len(s) for s in batch[::-1]])):
        assert part.tolist() == rounded(by_sequence[batch.index(seq)].tolist())
    assert noise_factor(padded, batch, key=(3, 2)).tolist() != rounded(want)


@pytest.mark.parametrize(
    ("distortion", "want"),
    [(None, 1.0), ({"delta": 2.0}, 1.0), ({"delta": 0.0}, -1.0), ({"delta": 3.0, "low_prob": 0.3}, 3.0)],
)
def test_j_is_a_sum_and_is_there_without_distortion(distortion, want):
    """A (φ - 1): A = 1.5 on po = 0.05 and on 0.2, A = -0.5 on 0.01; the reference is δ = 2 below 0.1."""
    current = torch.tensor([[math.log(0.05), math.log(0.2)], [math.log(0.01), math.log(0.5)]], dtype=torch.float64)
    inputs = ObjectiveInputs(
        current, current, None, torch.tensor([1.5, -0.5]).double(), torch.ones(2, 2, dtype=torch.bool)
    )
    config = ObjectiveConfig.model_validate({"distortion": distortion})
    if distortion and distortion.get("low_prob"):
        want = 2 * (1.5 + 1.5 - 0.5)
    assert compute_objective(inputs, config).metrics["hacking/J"] == rounded(want)


def test_spurious_signal_estimates():
    """Cov(X, 1/rho), X = r A, over trained tokens (population); mean of X (φ - 1), φ = 0 outside the range."""
    batch = random_batch(2)
    inputs, mask = padded(batch)
    metrics = compute_objective(inputs, ObjectiveConfig()).metrics
    pi, po, mu = (x[mask].detach() for x in (inputs.current_logprobs, inputs.old_logprobs, inputs.inference_logprobs))
    a = torch.tensor([a for s in batch for a in s.a], dtype=torch.float64)
    r, inverse = (pi - po).exp(), (mu - po).exp()
    covariance = ((r * a - (r * a).mean()) * (inverse - inverse.mean())).mean()
    outside = (r > 1.28) | (r < 0.8)
    cut = ((a > 0) & (r > 1.28)) | ((a < 0) & (r < 0.8))
    assert cut.any()
    assert (outside & ~cut).any(), "Eq 12 counts tokens whose gradient is left alone as well"
    assert metrics["hacking/cov_x_inv_rho"] == rounded(covariance.item(), BATCH)
    assert metrics["hacking/clip_bias"] == rounded((r * a * -outside.double()).mean().item(), BATCH)
    without = replace(inputs, inference_logprobs=None)
    assert "hacking/cov_x_inv_rho" not in compute_objective(without, ObjectiveConfig()).metrics
