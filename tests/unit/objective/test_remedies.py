"""Worked numbers of the remedies of 2026: VESPO, FIPO and the interpolated anchor; and of the regularizers."""

import math
from dataclasses import replace

import pytest
import torch
from pydantic import ValidationError

from megatron_rl.config import ObjectiveConfig
from megatron_rl.errors import InputError
from megatron_rl.objective import AGGREGATIONS, ObjectiveInputs, compute_objective
from tests.support.rounding import assert_rounded, rounded
from tests.unit.objective.batches import BATCH, loss_and_gradient, packed, padded, random_batch, worked
from tests.unit.objective.reference import Seq, reference_objective, router_shift_weight

pytestmark = pytest.mark.filterwarnings("ignore::megatron_rl.config.objective.ObjectiveWarning")


@pytest.mark.parametrize(("anchor", "log_ratio"), [("recompute", 0.3), ("bypass", -0.2)])
def test_the_penalty_is_on_the_squared_log_ratio_of_the_anchor(anchor, log_ratio):
    """log r = 0.3, log w = -0.2; A = 0, so that nothing else is left. λ = 0.5."""
    current = torch.tensor([[-1.0, -1.0]], dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([[True, False]])
    inputs = worked(current, current.detach() - 0.3, current.detach() + 0.2, 0.0, mask)
    config = ObjectiveConfig.model_validate({"log_ratio_penalty": 0.5, "anchor": anchor})
    result = compute_objective(inputs, config)
    loss, gradient = loss_and_gradient(result, inputs, mask)
    assert loss == rounded(0.5 * log_ratio**2)
    assert gradient.tolist() == rounded([2 * 0.5 * log_ratio])
    assert result.metrics["actor/regularizer_loss"] == rounded(loss)
    assert result.metrics["actor/pg_loss"] == 0.0


def test_terms_anchored_on_the_rollout_engine_are_held_to_it():
    """prime-rl's loss: DPPO and kl_tau (log w)², whatever is dropped. log w = 0.3, log r = 0.1; A = 0."""
    current, old, mu = (torch.tensor([[x]], dtype=torch.float64) for x in (-0.7, -0.8, -1.0))
    inputs = worked(current.requires_grad_(), old, mu, advantage=0.0)
    config = ObjectiveConfig.model_validate({"policy_term": "dppo", "log_ratio_penalty": 0.5})
    _, gradient = loss_and_gradient(compute_objective(inputs, config), inputs, inputs.loss_mask)
    assert gradient.tolist() == rounded([0.3])
    inputs, _ = padded(random_batch(1))
    without = replace(inputs, inference_logprobs=None)
    config = ObjectiveConfig.model_validate({"policy_term": "reinforce", "log_ratio_penalty": 0.5})
    with pytest.raises(InputError, match="log_ratio_penalty need"):
        compute_objective(without, config)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("form", [padded, packed])
def test_regularizers_are_aggregated_as_terms_are_and_no_correction_drops_them(form, aggregation):
    batch = random_batch(7)
    common = {
        "aggregation": aggregation,
        "max_response_length": 11,
        "correction": [{"mode": "tis"}, {"mode": "mask", "upper": 1.1}],
    }

    def loss_and_gradient(**more):
        inputs, mask = form(batch)
        entropy = (2.0 * inputs.current_logprobs.detach()).requires_grad_()
        inputs = replace(inputs, entropy=entropy)
        result = compute_objective(inputs, ObjectiveConfig.model_validate({**common, **more}))
        leaves = (inputs.current_logprobs, entropy)
        gradient, of_entropy = torch.autograd.grad(result.loss, leaves, allow_unused=True, materialize_grads=True)
        return result.loss.item(), gradient[mask], of_entropy[mask]

    def values():
        num_tokens = sum(len(s) for s in batch)
        for seq in batch:
            factor = {
                "token-mean": 1 / num_tokens,
                "seq-mean-token-mean": 1 / len(batch) / max(len(seq), 1),
                "seq-mean-token-sum": 1 / len(batch),
                "seq-mean-token-sum-norm": 1 / len(batch) / 11,
            }[aggregation]
            yield from ((factor, p, p - q) for p, q in zip(seq.pi, seq.po))

    plain, (loss, gradient, of_entropy) = (
        loss_and_gradient(),
        loss_and_gradient(log_ratio_penalty=0.3, entropy_bonus=0.05),
    )
    added = sum(factor * (0.3 * log_r**2 - 0.05 * 2 * log_pi) for factor, log_pi, log_r in values())
    assert loss - plain[0] == rounded(added, BATCH, scale=1 + abs(loss))
    slopes = [0.3 * 2 * factor * log_r for factor, _, log_r in values()]
    assert (gradient - plain[1]).tolist() == rounded(slopes, BATCH, scale=1 + float(gradient.abs().max()))
    assert of_entropy.tolist() == rounded([-0.05 * factor for factor, *_ in values()])


@pytest.mark.parametrize(
    ("aggregation", "renormalize", "want"),
    [
        ("token-mean", False, (3 * 0.04 + 0.01) / 4),
        ("token-mean", True, 0.01),
        ("seq-mean-token-mean", False, (0.04 + 0.01) / 2),
        ("seq-mean-token-mean", True, 0.01),
    ],
)
def test_what_leaves_the_denominators_leaves_the_regularizer(aggregation, renormalize, want):
    """Three tokens of log r = 0.2, which `reject` drops, and one of 0.1; λ = 1 and A = 0."""
    log_r = torch.tensor([[0.2, 0.2, 0.2], [0.1, 0.0, 0.0]], dtype=torch.float64)
    current = torch.full_like(log_r, -1.0)
    log_rho = torch.tensor([[1.0] * 3, [0.0] * 3], dtype=torch.float64)
    mask = torch.tensor([[True] * 3, [True, False, False]])
    inputs = worked(current, current - log_r, current - log_r - log_rho, 0.0, mask)
    entry = {"mode": "reject", "upper": 0.1, "renormalize": renormalize}
    config = {"log_ratio_penalty": 1.0, "correction": [entry], "aggregation": aggregation}
    result = compute_objective(inputs, ObjectiveConfig.model_validate(config))
    assert result.metrics["actor/regularizer_loss"] == rounded(want)


def test_a_bonus_needs_the_entropy():
    inputs, _ = padded(random_batch(1))
    with pytest.raises(InputError, match="entropy is None, but entropy_bonus needs it"):
        compute_objective(inputs, ObjectiveConfig.model_validate({"entropy_bonus": 0.01}))


INTERPOLATE = {"anchor": "interpolate", "correction": ["is"]}


@pytest.mark.parametrize(
    ("d", "log_r", "log_weight"),
    [(0, 0.2, 0.0), (1, 0.2, 0.0), (2, 0.1, 0.1), (4, 0.05, 0.15), (5, 0.04, 0.16)],
)
def test_the_older_a_token_the_nearer_its_anchor_is_to_pi(d, log_r, log_weight):
    """log w = 0.2: r = w^(1/d), and the weight of pi_prox against mu is w^(1 - 1/d). Their product is w."""
    current = torch.tensor([[-1.0]], dtype=torch.float64, requires_grad=True)
    inputs = worked(current, None, torch.tensor([[-1.2]], dtype=torch.float64), distances=torch.tensor([[d]]))
    result = compute_objective(inputs, ObjectiveConfig.model_validate(INTERPOLATE))
    loss, gradient = loss_and_gradient(result, inputs, inputs.loss_mask)
    assert loss == rounded(-math.exp(0.2))
    assert gradient.item() == rounded(-math.exp(0.2))
    assert result.metrics["actor/ppo_kl"] == rounded(-log_r)
    assert result.metrics["rollout_corr/rollout_is_max"] == rounded(math.exp(log_weight))
    narrow = {**INTERPOLATE, "policy_term": {"name": "ppo_clip", "clip_high": math.exp(0.07) - 1}}
    clipped = compute_objective(inputs, ObjectiveConfig.model_validate(narrow))
    assert clipped.metrics["actor/pg_clipfrac"] == float(log_r > 0.07)


def prox_logp(log_behav: float, log_theta: float, d: int) -> float:
    """log π_prox = α log π_behav + (1 - α) log π_θ, α = 1 for d = 0 and 1/d for d >= 1."""
    alpha = 1.0 if d == 0 else 1 / d
    return alpha * log_behav + (1 - alpha) * log_theta


@pytest.mark.parametrize("form", [padded, packed])
@pytest.mark.parametrize("term", ["ppo_clip", "gspo", "gmpo", "cispo", "sapo", "fipo"])
def test_terms_and_corrections_see_the_interpolated_policy_in_the_place_of_po(form, term):
    """The decoupled loss with π_prox for po, by the plain loops: π_prox is a constant there, as its gradient is cut."""
    batch = random_batch(21)
    correction = [{"mode": "tis", "cap": 1.1}, {"mode": "reject", "statistic": "seq_mean_k3", "upper": 0.05}]
    ages = [[(i + 2 * t) % 6 for t in range(len(seq))] for i, seq in enumerate(batch)]
    decoupled = [
        Seq(s.pi, [prox_logp(m, p, d) for m, p, d in zip(s.mu, s.pi, row)], s.mu, s.a, s.id)
        for s, row in zip(batch, ages)
    ]
    config = {"policy_term": {"name": term}, "correction": correction}
    loss, gradients = reference_objective(decoupled, config)
    inputs, mask = form(batch)
    distances = torch.zeros(mask.shape, dtype=torch.int64)
    distances[mask] = torch.tensor([d for row in ages for d in row])
    inputs = replace(inputs, old_logprobs=None, distances=distances)
    result = compute_objective(inputs, ObjectiveConfig.model_validate({**config, "anchor": "interpolate"}))
    computed, gradient = loss_and_gradient(result, inputs, mask)
    assert computed == rounded(loss, BATCH)
    assert_rounded(gradient, torch.tensor([g for row in gradients for g in row], dtype=torch.float64), BATCH)
    assert all(min(m, p) <= q <= max(m, p) for s in decoupled for m, p, q in zip(s.mu, s.pi, s.po))


def test_the_interpolated_anchor_needs_the_age_of_a_token():
    inputs, _ = padded(random_batch(1))
    with pytest.raises(InputError, match="distances is None, but anchor interpolate needs"):
        compute_objective(inputs, ObjectiveConfig.model_validate(INTERPOLATE))
    without = replace(inputs, inference_logprobs=None, distances=torch.zeros_like(inputs.loss_mask))
    with pytest.raises(InputError, match="anchor interpolate need"):
        compute_objective(without, ObjectiveConfig.model_validate({"anchor": "interpolate"}))


def with_shift(inputs: ObjectiveInputs, mask: torch.Tensor, shifts: list[list[float]]) -> ObjectiveInputs:
    shift = torch.full(mask.shape, torch.nan, dtype=torch.float64)
    shift[mask] = torch.tensor([x for row in shifts for x in row], dtype=torch.float64)
    return replace(inputs, router_shift=shift)


@pytest.mark.parametrize("name", ["ppo_clip", "gspo", "gmpo", "cispo", "sapo", "fipo"])
@pytest.mark.parametrize("form", [padded, packed])
def test_the_ratio_is_multiplied_by_the_routers_weight(name, form):
    """log r + log γ̃ is log r of a po that is divided by γ̃. Half of the shifts are beyond the floor."""
    batch, floor = random_batch(7), 0.9
    shifts = [[0.03 * ((3 * i + t) % 7) for t in range(len(s))] for i, s in enumerate(batch)]
    config = {"policy_term": {"name": name}, "router_shift": floor}
    moved = [
        Seq(s.pi, [p - math.log(max(math.exp(-x), floor)) for p, x in zip(s.po, row)], s.mu, s.a, s.id)
        for s, row in zip(batch, shifts)
    ]
    loss, grads = reference_objective(moved, {"policy_term": {"name": name}})
    inputs, mask = form(batch)
    inputs = with_shift(inputs, mask, shifts)
    result = compute_objective(inputs, ObjectiveConfig.model_validate(config))
    got_loss, got_gradient = loss_and_gradient(result, inputs, mask)
    assert got_loss == rounded(loss, BATCH, scale=1.0)
    assert_rounded(got_gradient, torch.tensor([g for row in grads for g in row], dtype=torch.float64), BATCH, scale=1.0)
    weights = [max(math.exp(-x), floor) for row in shifts for x in row]
    assert result.metrics["actor/router_weight"] == rounded(sum(weights) / len(weights), BATCH)
    assert result.metrics["actor/router_floor_frac"] == sum(w == floor for w in weights) / len(weights)


@pytest.mark.parametrize(("score", "slope"), [(0.45, 1.2 * 0.9), (0.05, 1.2 * 0.8)])
def test_a_router_that_halves_a_score_moves_the_ratio(score, slope):
    """One layer, one expert of score 1/2 that falls: γ = new/old, here 0.9, and below the floor of 0.8 that."""
    assert router_shift_weight([[0.5]], [[score]], 0.8) == rounded(slope / 1.2)
    current = torch.tensor([[-1.0]], dtype=torch.float64, requires_grad=True)
    old = torch.tensor([[-1.0 - math.log(1.2)]], dtype=torch.float64)
    shift = torch.tensor([[math.log(0.5 / score)]], dtype=torch.float64)
    inputs = worked(current, old, old, router_shift=shift)
    result = compute_objective(inputs, ObjectiveConfig.model_validate({"router_shift": 0.8}))
    (gradient,) = torch.autograd.grad(result.loss, current)
    assert (result.loss.item(), gradient.item()) == (rounded(-slope), rounded(-slope))


def test_the_shift_has_to_be_known_and_to_weigh_a_ratio():
    inputs, _ = padded(random_batch(0))
    with pytest.raises(InputError, match="router_shift is None, but"):
        compute_objective(inputs, ObjectiveConfig.model_validate({"router_shift": 0.8}))
    for config in ({"policy_term": "vespo"}, {"anchor": "bypass"}, {"anchor": "interpolate"}):
        with pytest.raises(ValidationError, match="router_shift with policy term"):
            ObjectiveConfig.model_validate({"router_shift": 0.8, **config})
