"""The divergence of a policy from its teacher on sets of tokens, against the sums of the papers in numpy."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from megatron_rl.config import ObjectiveConfig
from megatron_rl.errors import InputError
from megatron_rl.objective import MetricStats, Teacher, TeacherSet, compute_denominators, compute_objective
from megatron_rl.objective.metrics import finalize_metrics
from tests.support.rounding import rounded
from tests.unit.objective.batches import BATCH, packed, padded, random_batch

CONFIG = ObjectiveConfig(policy_term="reinforce", aggregation="token-mean")
V = 9


class Policies:
    """Logits [V] of pi and τ of each trained token of a batch."""

    def __init__(self, batch, seed=4):
        random, n = np.random.default_rng(seed), sum(len(sequence) for sequence in batch)
        self.pi, self.tau = 1.5 * random.normal(size=(n, V)), 1.5 * random.normal(size=(n, V))

    def sets(self, k, of="tau"):
        return np.argsort(-getattr(self, of), axis=1, kind="stable")[:, :k]


def softmax(z):
    return np.exp(z) / np.exp(z).sum(axis=-1, keepdims=True)


def divergence(z, log_tau, chosen, forward, normalized):
    """Of one token, as written: sums over the set, of distributions over it or over the vocabulary."""
    pi, tau = softmax(z)[chosen], np.exp(log_tau)[chosen]
    if normalized:
        pi, tau = pi / pi.sum(), tau / tau.sum()
    return forward * (tau * np.log(tau / pi)).sum() + (1 - forward) * (pi * np.log(pi / tau)).sum()


def by_differences(z, *about):
    """∂ divergence / ∂ z, by complex differences, which take nothing away from each other."""
    return [divergence(z + 1e-30j * e, *about).imag / 1e-30 for e in np.eye(V)]


def given(form, batch, policies, sets, forward=0.0, normalized=True, weight=1.0, rows=None):
    """Inputs with advantages 0, and the logits that log pi comes from; NaN stands where nothing is trained."""
    inputs, mask = form(batch)
    rows = slice(None) if rows is None else rows
    logits = torch.tensor(policies.pi[rows], requires_grad=True)
    chosen = torch.tensor(sets[rows])
    in_set = logits.log_softmax(-1).gather(1, chosen.clamp(min=0))
    of_teacher = torch.tensor(policies.tau[rows]).log_softmax(-1).gather(1, chosen.clamp(min=0))
    shape = (*mask.shape, chosen.size(1))
    current, teacher = (torch.full(shape, math.nan, dtype=torch.float64) for _ in range(2))
    current[mask] = in_set
    teacher[mask] = of_teacher.masked_fill(chosen < 0, -torch.inf)
    of_sampled = torch.full(mask.shape, -1.0).double()
    about = Teacher(of_sampled, weight, "current", sets=TeacherSet(current, teacher, forward, normalized))
    return replace(inputs, teacher=about, advantages=torch.zeros_like(inputs.advantages)), logits


@pytest.mark.parametrize("form", [padded, packed])
@pytest.mark.parametrize("of", ["pi", "tau"])
@pytest.mark.parametrize(("k", "forward", "normalized", "weight"), [
    (4, 0.0, True, 1.0), (4, 1.0, True, 0.3), (4, 0.5, True, 2.0), (4, 1.0, False, 1.0), (V, 0.3, True, 1.0),
])  # fmt: skip
def test_loss_and_gradient_are_those_of_the_sums(form, of, k, forward, normalized, weight):
    batch = random_batch(seed=3)
    policies = Policies(batch)
    sets = policies.sets(k, of)
    inputs, logits = given(form, batch, policies, sets, forward, normalized, weight)
    result = compute_objective(inputs, CONFIG)
    log_tau = np.log(softmax(policies.tau))
    about = [(z, tau, chosen, forward, normalized) for z, tau, chosen in zip(policies.pi, log_tau, sets, strict=True)]
    values = [divergence(*one) for one in about]
    assert result.loss.item() == rounded(weight * np.mean(values), BATCH)
    (gradient,) = torch.autograd.grad(result.loss, logits)
    wanted = np.array([by_differences(*one) for one in about]) * weight / len(values)
    assert gradient.flatten().tolist() == rounded(wanted.ravel().tolist(), BATCH)
    metrics = result.metrics
    assert metrics["teacher/divergence"] == rounded(np.mean(values), BATCH)
    masses = [np.take_along_axis(softmax(z), sets, 1).sum(1).mean() for z in (policies.tau, policies.pi)]
    assert [metrics["teacher/set_mass"], metrics["teacher/set_mass_pi"]] == rounded(masses, BATCH)


@pytest.mark.parametrize("normalized", [True, False])
def test_a_set_of_all_tokens_gives_the_whole_divergence(normalized):
    """With k = V: KL(τ‖pi) and KL(pi‖τ), whose gradients are pi - τ and that of the sampled form in the mean."""
    batch = random_batch(seed=3)
    policies = Policies(batch)
    inputs, logits = given(packed, batch, policies, policies.sets(V), 1.0, normalized)
    (gradient,) = torch.autograd.grad(compute_objective(inputs, CONFIG).loss, logits)
    pi, tau = softmax(policies.pi), softmax(policies.tau)
    assert gradient.flatten().tolist() == rounded(((pi - tau) / len(pi)).ravel().tolist(), BATCH)
    inputs, logits = given(packed, batch, policies, policies.sets(V))
    (gradient,) = torch.autograd.grad(compute_objective(inputs, CONFIG).loss, logits)
    # E_{y ~ pi} of -A_y s_y with A_y = -(log pi_y - log τ_y) and s_y = e_y - pi.
    gap = np.log(pi) - np.log(tau)
    sampled = [sum(p[y] * d[y] * (np.eye(V)[y] - p) for y in range(V)) / len(pi) for p, d in zip(pi, gap, strict=True)]
    assert gradient.flatten().tolist() == rounded(np.ravel(sampled).tolist(), BATCH)


def test_a_set_may_have_fewer_tokens():
    batch = random_batch(seed=3)
    policies = Policies(batch)
    sets = policies.sets(5)
    wide = np.concatenate([sets, np.full((len(sets), 2), -1)], axis=1)
    results = [given(padded, batch, policies, chosen, 0.4) for chosen in (sets, wide)]
    losses = [compute_objective(inputs, CONFIG).loss for inputs, _ in results]
    assert losses[1].item() == rounded(losses[0].item(), BATCH)
    gradients = [torch.autograd.grad(x, z)[0].flatten().tolist() for x, (_, z) in zip(losses, results, strict=True)]
    assert gradients[1] == rounded(gradients[0], BATCH)


def test_advantages_stay_and_without_weight_nothing_is_learned():
    batch = random_batch(seed=3)
    policies = Policies(batch)
    inputs, logits = given(packed, batch, policies, policies.sets(4), weight=0.0)
    own = packed(batch)[0]
    measured = compute_objective(replace(inputs, advantages=own.advantages), CONFIG)
    alone = compute_objective(replace(own, advantages=own.advantages), CONFIG)
    assert measured.loss.item() == alone.loss.item()
    assert measured.metrics["teacher/divergence"] > 0
    assert torch.autograd.grad(measured.loss, logits, allow_unused=True) == (None,)


def test_what_both_hold_for_impossible_stays_finite():
    """Log-probs far below what float32 can exp: the set is normalized in logarithms."""
    batch = random_batch(seed=3)
    inputs, logits = given(packed, batch, policies := Policies(batch), policies.sets(4), 0.5)
    sets = inputs.teacher.sets
    far = replace(sets, current=(sets.current - 500).float(), teacher=(sets.teacher - 900).float())
    results = [
        compute_objective(replace(inputs, teacher=replace(inputs.teacher, sets=of)), CONFIG) for of in (sets, far)
    ]
    assert results[1].loss.item() == rounded(results[0].loss.item(), BATCH, dtype=torch.float32, scale=900)
    assert torch.isfinite(torch.autograd.grad(results[1].loss, logits)[0]).all()


def test_microbatches_add_up():
    batch = random_batch(seed=5)
    policies = Policies(batch)
    starts = np.cumsum([0, *(len(sequence) for sequence in batch)])

    def of(numbers):
        rows = np.concatenate([np.arange(starts[i], starts[i + 1]) for i in numbers])
        return given(packed, [batch[i] for i in numbers], policies, policies.sets(4), 0.5, rows=rows)[0]

    whole, parts = of(range(6)), [of([0, 3, 4]), of([5]), of([1, 2])]
    counts = compute_denominators(whole, CONFIG)
    results = [compute_objective(part, CONFIG, counts) for part in parts]
    merged = finalize_metrics(MetricStats.merge([result.stats for result in results]))
    want = compute_objective(whole, CONFIG)
    assert sum(result.loss.item() for result in results) == rounded(want.loss.item(), BATCH)
    for name in ("teacher/divergence", "teacher/set_mass", "teacher/set_mass_pi"):
        assert merged[name] == rounded(want.metrics[name], BATCH)


def test_sets_of_another_shape_are_named():
    batch = random_batch(seed=3)
    inputs, _ = given(padded, batch, policies := Policies(batch), policies.sets(4))
    sets = inputs.teacher.sets
    for wrong in (replace(sets, teacher=sets.teacher[..., 1:]), TeacherSet(sets.current[:1], sets.teacher[:1])):
        with pytest.raises(InputError, match=r"teacher\.sets has log-probs of shapes"):
            compute_objective(replace(inputs, teacher=replace(inputs.teacher, sets=wrong)), CONFIG)
