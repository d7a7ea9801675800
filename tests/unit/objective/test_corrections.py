"""Corrections by worked numbers: the traps peers fell into, and what a learner reports about them."""

import math
from dataclasses import replace

import pytest
import torch

from megatron_rl.config import ObjectiveConfig
from megatron_rl.errors import InputError
from megatron_rl.objective import POLICY_TERMS, Denominators, compute_denominators, compute_objective
from megatron_rl.objective.corrections import condensed, smallest_dropped
from tests.support.rounding import assert_rounded, rounded
from tests.unit.objective.batches import BATCH, loss_and_gradient, padded, random_batch, worked
from tests.unit.objective.reference import reference_objective

pytestmark = pytest.mark.filterwarnings("ignore::megatron_rl.config.objective.ObjectiveWarning")


def weights(log_rho: list[list[float]], correction: list[dict], term: str = "cispo", a: float = 1.0) -> torch.Tensor:
    """Weight of every token, read off the gradient of a term whose own weight is 1 (r = 1)."""
    log_rho = torch.tensor(log_rho, dtype=torch.float64)
    current = torch.full_like(log_rho, -1.0).requires_grad_()
    inputs = worked(current, current.detach(), current.detach() - log_rho, a)
    config = ObjectiveConfig.model_validate({"policy_term": term, "correction": correction})
    (gradient,) = torch.autograd.grad(compute_objective(inputs, config).loss, current)
    return -gradient * log_rho.numel() / a


@pytest.mark.parametrize(
    "correction",
    [
        {"mode": "icepop", "lower": 1.0, "upper": 5.0},
        {"mode": "icepop", "lower": 0.5, "upper": 1.0},
        {"mode": "mis", "cap": 1.0},
        {"mode": "mis", "cap": 5.0, "lower": 1.0},
        {"mode": "reject", "statistic": "seq_mean_k1", "lower": 1.0, "upper": 5.0},
        {"mode": "reject", "statistic": "geometric", "upper": 1.0},
        {"mode": "mask", "lower": 1.0},
        {"mode": "mask", "upper": 1.0},
        {"mode": "mask", "level": "sequence", "lower": 1.0},
    ],
)
def test_a_ratio_on_the_bound_is_kept(correction):
    """rho = 1 is exact in every dtype, and so is a bound of 1 (of its logarithm, 0)."""
    assert weights([[0.0, 0.0]], [correction])[0].tolist() == [1.0, 1.0]


def test_the_sequence_ratio_is_clamped_after_the_sum():
    """Sum 30 with tokens of 10: e^20, not e^30; and +25 -25 cancels instead of clamping apart."""
    assert weights([[10.0, 10.0, 10.0]], [{"mode": "is", "level": "sequence"}])[0, 0] == rounded(math.exp(20))
    assert weights([[25.0, -25.0, 0.1]], [{"mode": "is", "level": "sequence"}])[0, 0] == rounded(math.exp(0.1))


def test_normalized_weights_of_nothing_stay_finite():
    current = torch.zeros(2, 3, dtype=torch.float64, requires_grad=True)
    inputs = worked(current, current.detach(), current.detach(), mask=torch.zeros(2, 3, dtype=torch.bool))
    config = ObjectiveConfig.model_validate({"correction": [{"mode": "is", "normalize": True}]})
    for counts in (None, Denominators(0.0, 0.0, True)):
        assert compute_objective(inputs, config, counts).loss.item() == 0.0


@pytest.mark.parametrize(
    ("log_rho", "a", "threshold", "kept"),
    [
        ([0.25, 0.75, 1.0, -2.0], 1.0, 0.3125, [1, 1, 0, 1]),  # on the bound; -2.0 comes back to mu
        ([0.1, 0.3, 0.5, -0.9], 1.0, 0.049, [1, 0, 0, 1]),
        ([0.1, 0.3, 0.5, -0.9], 1.0, 1.0, [1, 1, 1, 1]),
        ([0.1, 0.3, 0.5, -0.9], -1.0, 0.8, [1, 1, 1, 0]),
        ([0.25, 0.5, 0.5, 0.0], 1.0, 0.17, [1, 0, 0, 1]),  # equal ones go together, though one of them would fit
        ([0.5, 0.6, 0.7, 0.0], 1.0, 0.01, [0, 0, 0, 1]),
        ([100.0, 0.1, 0.1, 0.0], 1.0, 0.04, [0, 1, 1, 1]),
    ],
)
def test_m2po_drops_the_largest_squares_of_updates_away_from_mu(log_rho, a, threshold, kept):
    assert weights([log_rho], [{"mode": "m2po", "threshold": threshold}], a=a)[0].tolist() == kept


@pytest.mark.parametrize("threshold", [0.001, 0.02, 0.04, 0.2])
@pytest.mark.parametrize("more", [[], [{"mode": "tis", "cap": 1.2, "normalize": True}]])
def test_m2po_is_the_papers_and_fewer_rows_say_the_same(threshold, more):
    correction = [{"mode": "m2po", "threshold": threshold}, *more]
    config = ObjectiveConfig.model_validate({"correction": correction})
    num_dropped = 0
    for seed in range(6):
        batch = random_batch(seed, num_sequences=9)
        inputs, mask = padded(batch)
        result = compute_objective(inputs, config)
        loss, gradient = loss_and_gradient(result, inputs, mask)
        want, want_gradient = reference_objective(batch, {"correction": correction})
        assert loss == rounded(want, BATCH)
        assert_rounded(gradient, torch.tensor([g for row in want_gradient for g in row], dtype=torch.float64), BATCH)
        counts = compute_denominators(inputs, config)
        fewer = condensed(counts.moments, threshold)
        assert len(fewer) == 1 + int((counts.moments[:, 0] > threshold).sum())
        assert smallest_dropped(fewer, threshold) == smallest_dropped(counts.moments, threshold)
        num_dropped += result.metrics["rollout_corr/rollout_rs_masked_fraction"] > 0
    assert num_dropped > 0 or threshold == 0.2


def test_m2po_needs_the_squares_of_the_whole_minibatch():
    inputs, _ = padded(random_batch(1))
    config = ObjectiveConfig.model_validate({"correction": ["m2po"]})
    counts = compute_denominators(inputs, config)
    with pytest.raises(InputError, match="no moments"):
        compute_objective(inputs, config, Denominators.from_tensor(counts.as_tensor(), renormalized=True))
    empty = replace(inputs, loss_mask=torch.zeros_like(inputs.loss_mask))
    assert compute_objective(empty, config).loss.item() == 0.0
    assert config.needs_old_logprobs(num_updates_per_batch=1)


def test_renormalize_needs_denominators_counted_with_the_same_config():
    inputs, _ = padded(random_batch(1))
    renormalizing = ObjectiveConfig.model_validate({"correction": [{"mode": "mis", "renormalize": True}]})
    with pytest.raises(InputError, match="renormalize"):
        compute_objective(inputs, renormalizing, compute_denominators(inputs))
    with pytest.raises(InputError, match="renormalize"):
        compute_objective(inputs, ObjectiveConfig(), compute_denominators(inputs, renormalizing))
    with pytest.raises(InputError, match="cannot be added"):
        compute_denominators(inputs) + compute_denominators(inputs, renormalizing)
    without_old = replace(inputs, old_logprobs=None)
    with pytest.raises(InputError, match="old_logprobs is None"):
        compute_denominators(without_old, renormalizing)


def test_metrics_of_the_weights():
    """Ratios 1, 4, 0.25 under tis C = 2: mean and extremes before truncation, spread and sample size after it."""
    log_rho = torch.tensor([[0.0, math.log(4.0), math.log(0.25)]], dtype=torch.float64)
    current = torch.full((1, 3), -1.0, dtype=torch.float64)
    inputs = worked(current, current, current - log_rho)

    def metrics(*correction: dict) -> dict[str, float]:
        measured = compute_objective(inputs, ObjectiveConfig.model_validate({"correction": correction})).metrics
        return {
            k.removeprefix("rollout_corr/"): v for k, v in measured.items() if "rollout_is_" in k or "rollout_rs_" in k
        }

    bounded = torch.tensor([1.0, 2.0, 0.5]).double()
    assert metrics({"mode": "tis", "cap": 2.0}) == rounded(
        {
            "rollout_is_mean": 5.25 / 3,
            "rollout_is_std": bounded.std(correction=0).item(),
            "rollout_is_max": 4.0,
            "rollout_is_min": 0.25,
            "rollout_is_eff_sample_size": (bounded.mean() ** 2 / bounded.square().mean()).item(),
            "rollout_is_oob_ratio": 1 / 3,
        }
    )
    dropped = metrics({"mode": "icepop", "lower": 0.5, "upper": 5.0}, {"mode": "veto"})
    assert dropped["rollout_is_oob_ratio"] == rounded(1 / 3)
    assert dropped["rollout_rs_masked_fraction"] == rounded(1 / 3)
    assert dropped["rollout_rs_seq_masked_fraction"] == 1.0
    untouched = metrics({"mode": "is"})
    assert untouched["rollout_is_std"] == rounded(torch.tensor([1.0, 4.0, 0.25]).double().std(correction=0).item())
    assert untouched["rollout_is_oob_ratio"] == 0.0
    assert metrics() == {}


def test_denominators_travel_as_a_tensor():
    counts = Denominators(3.0, torch.tensor(2.0), True, 2.5, torch.tensor(3.0))
    doubled = Denominators.from_tensor(counts.as_tensor() * 2, counts.renormalized)
    assert doubled == Denominators(6.0, 4.0, True, 5.0, 6.0) == counts + counts


def test_weights_as_applied_are_measured_with_what_was_dropped():
    """icepop on rho = 1, 2, 6: the weights are 1, 2, 0."""
    log_rho = torch.tensor([[0.0, math.log(2), math.log(6)]], dtype=torch.float64)
    current = torch.full_like(log_rho, -1.0).requires_grad_()
    inputs = worked(current, current.detach(), current.detach() - log_rho)
    metrics = compute_objective(inputs, ObjectiveConfig.model_validate({"correction": ["icepop"]})).metrics
    expected = {"mean": 1.0, "std": math.sqrt(2 / 3), "max": 2.0, "min": 0.0, "eff_sample_size": 1 / (5 / 3)}
    measured = {name: metrics[f"rollout_corr/applied_weight_{name}"] for name in expected}
    assert list(measured.values()) == rounded(list(expected.values()))
    assert metrics["rollout_corr/rollout_is_mean"] == rounded(3.0)


def test_weights_as_applied_are_those_of_trained_tokens():
    """One of two sequences is dropped; beside its one trained token stand two that are not trained, of weight 0, too.
    A third sequence has no trained token at all, and is outside the bounds of `reject`."""
    log_rho = torch.tensor([[0.1, 0.1, 0.1], [1.0, 0.0, 0.0], [0.0, 0.0, 0.0]], dtype=torch.float64)
    current = torch.full_like(log_rho, -1.0)
    mask = torch.tensor([[True] * 3, [True, False, False], [False] * 3])
    inputs = worked(current, current, current - log_rho, mask=mask)
    for bounds, kept in (({"lower": 0.001, "upper": 0.1}, 3), ({"lower": 0.001}, 4)):
        entry = {"mode": "reject", "statistic": "seq_mean_k3", **bounds}
        metrics = compute_objective(inputs, ObjectiveConfig.model_validate({"correction": [entry]})).metrics
        share = kept / 4
        expected = {"mean": share, "std": math.sqrt(share - share**2), "min": float(kept == 4), "max": 1.0}
        measured = {name: metrics[f"rollout_corr/applied_weight_{name}"] for name in expected}
        assert measured == rounded(expected)
        assert metrics["rollout_corr/applied_weight_eff_sample_size"] == rounded(share)


@pytest.mark.parametrize("term", POLICY_TERMS)
@pytest.mark.parametrize("old", [True, False])
def test_a_token_that_the_learner_holds_for_impossible_gives_no_nan(term, old):
    current = torch.tensor([[-1.0, -math.inf, -0.5]], dtype=torch.float64, requires_grad=True)
    other = torch.full((1, 3), -1.0, dtype=torch.float64)
    inputs = worked(current, other if old else None, other, advantage=-1.0)
    result = compute_objective(inputs, ObjectiveConfig.model_validate({"policy_term": term}))
    (gradient,) = torch.autograd.grad(result.loss, current)
    assert bool(result.loss.isfinite())
    assert bool(gradient.isfinite().all())
    assert float(gradient[0, 1]) == 0.0
    assert all(math.isfinite(value) for value in result.metrics.values())
    # log r is 0, -10⁴ + 1 and 0.5: the floor of log pi is that of mu and po. Without po, r = 1.
    assert result.metrics["actor/ppo_kl"] == rounded((1e4 - 1 - 0.5) / 3 if old else 0.0)
