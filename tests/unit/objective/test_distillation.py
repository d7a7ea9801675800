"""Distillation on policy against its formula in numpy: A_t = A - λ Σ_k γ^(k - t) (log s - log τ)."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from megatron_rl.config import ObjectiveConfig
from megatron_rl.errors import InputError
from megatron_rl.objective import MetricStats, Teacher, compute_denominators, compute_objective
from megatron_rl.objective.metrics import finalize_metrics
from tests.support.rounding import rounded
from tests.unit.objective.batches import BATCH, loss_and_gradient, packed, padded, random_batch

CONFIG = ObjectiveConfig(policy_term="ppo_clip", correction=["tis"], mismatch_detail=True)
STUDENTS = {"rollout": "mu", "recompute": "po", "current": "pi"}


def taus(batch, seed=9):
    """log τ of every token, far from the student's on some."""
    random = np.random.default_rng(seed)
    return [-random.exponential(1.5, size=len(sequence)) for sequence in batch]


def spread(values, mask):
    """Numbers of trained tokens in their places, NaN elsewhere."""
    out = torch.full(mask.shape, torch.nan, dtype=torch.float64)
    out[mask] = torch.tensor(np.concatenate(values))
    return out


def by_the_symbols(batch, tau, weight, student, discount):
    """The batch with the advantage of each token, and the d of all tokens."""
    taught, gaps = [], []
    for sequence, log_tau in zip(batch, tau, strict=True):
        d = np.array(getattr(sequence, STUDENTS[student])) - log_tau
        n = len(sequence)
        later = [sum(discount ** (k - t) * d[k] for k in range(t, n)) if discount else d[t] for t in range(n)]
        taught.append(replace(sequence, a=[a - weight * x for a, x in zip(sequence.a, later, strict=True)]))
        gaps.append(d)
    return taught, gaps


@pytest.mark.parametrize("form", [padded, packed])
@pytest.mark.parametrize("student", STUDENTS)
@pytest.mark.parametrize(("weight", "discount"), [(0.0, 0.0), (1.0, 0.0), (0.3, 0.9), (2.0, 1.0)])
def test_loss_and_gradient_are_those_of_the_formulas_advantages(form, student, weight, discount):
    batch = random_batch(seed=3)
    tau = taus(batch)
    inputs, mask = form(batch)
    given = replace(inputs, teacher=Teacher(spread(tau, mask), weight, student, discount))
    want, gaps = by_the_symbols(batch, tau, weight, student, discount)
    expected = replace(inputs, advantages=spread([sequence.a for sequence in want], mask))
    got, wanted = (compute_objective(x, CONFIG) for x in (given, expected))
    assert loss_and_gradient(got, given, mask)[0] == rounded(loss_and_gradient(wanted, expected, mask)[0], BATCH)
    gradients = [loss_and_gradient(compute_objective(x, CONFIG), x, mask)[1].tolist() for x in (given, expected)]
    assert gradients[0] == rounded(gradients[1], BATCH)
    gap = np.concatenate(gaps)
    metrics = got.metrics
    assert metrics["teacher/kl"] == rounded(gap.mean(), BATCH)
    assert metrics["teacher/kl_max"] == rounded(gap.max(), BATCH)
    assert metrics["teacher/share_floor"] == 0
    first = np.concatenate([d[:4] for d in gaps])
    assert metrics["teacher/kl/position/0-4"] == rounded(first.mean(), BATCH)


def test_without_a_teacher_there_is_no_metric_of_one():
    inputs, _ = padded(random_batch(seed=3))
    assert not [name for name in compute_objective(inputs, CONFIG).metrics if name.startswith("teacher")]


@pytest.mark.parametrize("discount", [0.0, 0.8])
def test_microbatches_add_up(discount):
    batch = random_batch(seed=5)
    tau = taus(batch)

    def of(numbers):
        inputs, mask = packed([batch[i] for i in numbers])
        return replace(inputs, teacher=Teacher(spread([tau[i] for i in numbers], mask), 0.7, "current", discount))

    whole, parts = of(range(6)), [of([0, 3, 4]), of([5]), of([1, 2])]
    counts = compute_denominators(whole, CONFIG)
    results = [compute_objective(part, CONFIG, counts) for part in parts]
    merged = finalize_metrics(MetricStats.merge([result.stats for result in results]))
    want = compute_objective(whole, CONFIG)
    assert sum(result.loss.item() for result in results) == rounded(want.loss.item(), BATCH)
    for name in ("teacher/kl", "teacher/kl_max", "teacher/share_floor", "actor/pg_loss"):
        assert merged[name] == rounded(want.metrics[name], BATCH)


def test_untrained_tokens_are_out_of_the_sum_and_of_the_distance():
    """A tool's tokens between two of the policy's: the later d counts as that of the next token."""
    logprobs, mask = torch.tensor([[-1.0, -9.0, -9.0, -2.0]]).double(), torch.tensor([[True, False, False, True]])
    teacher = Teacher(torch.tensor([[-1.5, math.nan, 3.0, -2.75]]).double(), 2.0, "current", 0.5)
    inputs = padded(random_batch(seed=0))[0]
    inputs = replace(
        inputs,
        current_logprobs=logprobs.requires_grad_(),
        old_logprobs=None,
        inference_logprobs=None,
        advantages=torch.tensor([1.0]).double(),
        loss_mask=mask,
        sequence_ids=None,
        teacher=teacher,
    )
    result = compute_objective(inputs, ObjectiveConfig(policy_term="reinforce", aggregation="seq-mean-token-sum"))
    (gradient,) = torch.autograd.grad(result.loss, logprobs)
    # d = 0.5 and 0.75, so that A_t = 1 - 2 (0.5 + 0.5 · 0.75) and 1 - 2 · 0.75.
    assert gradient.tolist() == [rounded([0.75, 0.0, 0.0, 0.5])]


@pytest.mark.parametrize("unsayable", [-math.inf, -9999.0])
def test_what_the_teacher_cannot_say_is_floored_and_counted(unsayable):
    batch = random_batch(seed=1)
    tau = taus(batch)
    tau[2][4] = unsayable
    inputs, mask = padded(batch)
    result = compute_objective(replace(inputs, teacher=Teacher(spread(tau, mask))), CONFIG)
    assert math.isfinite(result.loss.item())
    assert result.metrics["teacher/share_floor"] == rounded(1 / int(mask.sum()))
    assert result.metrics["teacher/kl_max"] > 9000


def test_the_policy_gradient_of_minus_d_is_minus_the_gradient_of_the_divergence():
    """Σ_y pi(y) ∇[loss of y], with A = 0 and s = pi, is ∇ KL(pi ‖ τ), by differences."""
    random = np.random.default_rng(2)
    z, log_tau = random.normal(size=7), np.log(random.dirichlet(np.ones(7)))

    def divergence(z):
        log_pi = z - np.log(np.exp(z).sum())
        return (np.exp(log_pi) * (log_pi - log_tau)).sum()

    step = 1e-30  # of complex differences, which take nothing away from each other
    want = [divergence(z + 1j * step * e).imag / step for e in np.eye(7)]
    logits = torch.tensor(z, requires_grad=True)
    log_pi = logits.log_softmax(-1)
    inputs = padded(random_batch(seed=0))[0]
    inputs = replace(
        inputs,
        current_logprobs=log_pi[:, None],  # one response of one token for each word
        old_logprobs=None,
        inference_logprobs=None,
        advantages=torch.zeros(7).double(),
        loss_mask=torch.ones(7, 1, dtype=torch.bool),
        sequence_ids=None,
        teacher=Teacher(torch.tensor(log_tau)[:, None], 1.0, "current"),
    )
    total = torch.zeros(7, dtype=torch.float64)
    for y in range(7):
        only = replace(inputs, loss_mask=torch.arange(7)[:, None] == y)
        loss = compute_objective(only, ObjectiveConfig(policy_term="reinforce", aggregation="token-mean")).loss
        total += log_pi[y].detach().exp() * torch.autograd.grad(loss, logits, retain_graph=True)[0]
    assert total.tolist() == rounded(want, BATCH)


def test_the_teacher_gives_no_gradient():
    inputs, mask = padded(random_batch(seed=3))
    log_tau = spread(taus(random_batch(seed=3)), mask).requires_grad_()
    result = compute_objective(replace(inputs, teacher=Teacher(log_tau)), CONFIG)
    assert torch.autograd.grad(result.loss, log_tau, allow_unused=True) == (None,)


def test_wrong_inputs_are_named():
    inputs, mask = padded(random_batch(seed=3))
    tau = spread(taus(random_batch(seed=3)), mask)
    with pytest.raises(InputError, match="teacher has log-probs of shape"):
        compute_objective(replace(inputs, teacher=Teacher(tau[:, 1:])), CONFIG)
    with pytest.raises(InputError, match="student: rollout needs"):
        compute_objective(
            replace(inputs, inference_logprobs=None, teacher=Teacher(tau, student="rollout")), ObjectiveConfig()
        )
