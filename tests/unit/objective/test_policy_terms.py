"""Worked numbers of each policy term at its edges, and the behaviour stated for impossible and extreme tokens."""

from __future__ import annotations

import math

import pytest
import torch

from megatron_rl.config import ObjectiveConfig
from megatron_rl.objective import ObjectiveInputs, compute_objective
from tests.support.rounding import assert_rounded, rounded
from tests.unit.objective.batches import BATCH, loss_and_gradient, padded, random_batch
from tests.unit.objective.reference import ANCHORED, DEFAULTS

pytestmark = pytest.mark.filterwarnings("ignore::megatron_rl.config.objective.ObjectiveWarning")
STEP = 1e-6


def one_token(term: dict, r: float, a: float, log_pi: float = -1.0, log_mu: float | None = None, **config):
    """Loss and d loss / d log pi of a single token with ratio r = pi/po and mu = po unless said."""
    log_po = log_pi - math.log(r)
    current = torch.tensor([[log_pi]], dtype=torch.float64, requires_grad=True)
    inputs = ObjectiveInputs(
        current,
        torch.tensor([[log_po]], dtype=torch.float64),
        torch.tensor([[log_po if log_mu is None else log_mu]], dtype=torch.float64),
        torch.tensor([a], dtype=torch.float64),
        torch.ones(1, 1, dtype=torch.bool),
    )
    result = compute_objective(inputs, ObjectiveConfig.model_validate({"policy_term": term, **config}))
    return (*loss_and_gradient(result, inputs, inputs.loss_mask), result.metrics)


@pytest.mark.parametrize(
    ("r", "a", "loss", "slope"),
    [
        (1.28 - STEP, 2.0, -2 * (1.28 - STEP), -2 * (1.28 - STEP)),
        (1.28 + STEP, 2.0, -2 * 1.28, 0.0),
        (0.1, 2.0, -0.2, -0.2),  # A > 0 is never clipped from below
        (0.8 + STEP, -2.0, 2 * (0.8 + STEP), 2 * (0.8 + STEP)),
        (0.8 - STEP, -2.0, 2 * 0.8, 0.0),
        (3.0, -2.0, 6.0, 6.0),  # A < 0 is never clipped from above
        (1.0, 2.0, -2.0, -2.0),
        (3.0, 0.0, 0.0, 0.0),
    ],
)
def test_ppo_clip_edges(r, a, loss, slope):
    got_loss, gradient, metrics = one_token({"name": "ppo_clip", "clip_low": 0.2, "clip_high": 0.28}, r, a)
    assert got_loss == rounded(loss)
    assert gradient.item() == rounded(slope)
    assert metrics["actor/pg_clipfrac"] == float(slope == 0.0 and a != 0)


@pytest.mark.parametrize(
    ("r", "a", "loss", "slope", "lower"),
    [
        (3.0 - STEP, -2.0, 2 * (3.0 - STEP), 2 * (3.0 - STEP), 0.0),
        (3.0 + STEP, -2.0, 6.0, 0.0, 1.0),
        (3.0 + STEP, 2.0, -2.56, 0.0, 0.0),  # the dual clip leaves A > 0 alone
    ],
)
def test_dual_clip_edges(r, a, loss, slope, lower):
    term = {"name": "ppo_clip", "clip_low": 0.2, "clip_high": 0.28, "dual_clip": 3.0}
    got_loss, gradient, metrics = one_token(term, r, a)
    assert got_loss == rounded(loss)
    assert gradient.item() == rounded(slope)
    assert metrics["actor/pg_clipfrac_lower"] == lower


@pytest.mark.parametrize(
    ("r", "a", "kept"),
    [
        (1 + 4e-4 - 1e-8, 1.0, True),
        (1 + 4e-4 + 1e-8, 1.0, False),
        (1 - 3e-4 + 1e-8, -1.0, True),
        (1 - 3e-4 - 1e-8, -1.0, False),
    ],
)
def test_gspo_edges(r, a, kept):
    _, gradient, metrics = one_token({"name": "gspo"}, r, a)
    assert gradient.item() == rounded(-a * r if kept else 0.0)
    assert metrics["actor/pg_clipfrac"] == 1.0 - kept


@pytest.mark.parametrize(
    ("log_r", "a", "ratio", "kept"),
    [
        (0.4 - STEP, 1.0, math.exp(0.4 - STEP), True),
        (0.4 + STEP, 1.0, math.exp(0.4), False),
        (-3.0, 1.0, math.exp(-3.0), True),
        (-0.4 + STEP, -1.0, math.exp(-0.4 + STEP), True),
        (-0.4 - STEP, -1.0, math.exp(-0.4), False),
        (3.0, -1.0, math.exp(3.0), True),
        (3.0, 0.0, 0.0, True),
    ],
)
def test_gmpo_edges(log_r, a, ratio, kept):
    loss, gradient, _ = one_token({"name": "gmpo"}, math.exp(log_r), a)
    assert loss == rounded(-a * ratio)
    assert gradient.item() == rounded(-a * ratio if kept else 0.0)


@pytest.mark.parametrize(("r", "weight"), [(1.2 - STEP, 1.2 - STEP), (1.2 + STEP, 1.2), (1e-3, 1e-3)])
@pytest.mark.parametrize("a", [1.5, -1.5, 0.0])
def test_cispo_clips_the_weight_and_keeps_the_gradient(r, weight, a):
    loss, gradient, _ = one_token({"name": "cispo", "clip_high": 0.2}, r, a, log_pi=-0.7)
    assert loss == rounded(0.7 * weight * a)
    assert gradient.item() == rounded(-weight * a)


@pytest.mark.parametrize(
    ("r", "clipped"), [(0.9 - STEP, 1.0), (0.9 + STEP, 0.0), (1.0, 0.0), (1.2 - STEP, 0.0), (1.2 + STEP, 1.0)]
)
@pytest.mark.parametrize("a", [1.5, -1.5])
def test_cispo_counts_the_tokens_beyond_either_bound(r, clipped, a):
    _, _, metrics = one_token({"name": "cispo", "clip_low": 0.1, "clip_high": 0.2}, r, a)
    assert metrics["actor/pg_clipfrac"] == clipped
    _, _, one_sided = one_token({"name": "cispo", "clip_high": 0.2}, r, a)
    assert one_sided["actor/pg_clipfrac"] == clipped * (r > 1)


@pytest.mark.parametrize(
    ("r", "w", "a", "weight"),
    [
        (1.27 - STEP, 2.0, 1.0, 2.0),
        (1.27 + STEP, 2.0, 1.0, 0.0),
        (1.27 + STEP, 2.0, -1.0, 2.0),
        (0.8 + STEP, 2.0, -1.0, 2.0),
        (0.8 - STEP, 2.0, -1.0, 0.0),
        (0.8 - STEP, 2.0, 1.0, 2.0),
        (1.0, 5.0 - STEP, 1.0, 5.0 - STEP),
        (1.0, 5.0 + STEP, 1.0, 5.0),
    ],
)
def test_minirl_edges(r, w, a, weight):
    loss, gradient, _ = one_token({"name": "minirl"}, r, a, log_pi=-0.5, log_mu=-0.5 - math.log(w))
    assert loss == rounded(0.5 * weight * a)
    assert gradient.item() == rounded(-weight * a)


@pytest.mark.parametrize(
    ("mu", "pi", "a", "kept"),
    [
        (0.5, 0.65 - STEP, 1.0, True),
        (0.5, 0.65 + STEP, 1.0, False),
        (0.5, 0.65 + STEP, -1.0, True),  # back towards mu
        (0.5, 0.35 + STEP, -1.0, True),
        (0.5, 0.35 - STEP, -1.0, False),
        (0.5, 0.35 - STEP, 1.0, True),
        (0.01, 0.15, 1.0, True),  # w = 15 but the distance is small: the point of the method
    ],
)
def test_dppo_tv_edges_at_the_default_delta(mu, pi, a, kept):
    _, gradient, _ = one_token({"name": "dppo"}, 1.0, a, log_pi=math.log(pi), log_mu=math.log(mu))
    assert gradient.item() == rounded(-a * pi / mu if kept else 0.0)


@pytest.mark.parametrize(("pi", "kept"), [(0.6542, True), (0.6543, False)])
def test_dppo_kl_edge_at_the_default_delta(pi, kept):
    """KL(0.5 ‖ pi) = -log(4 pi (1 - pi)) / 2 crosses 0.05 at pi = 0.654243."""
    kl = 0.5 * math.log(0.5 / pi) + 0.5 * math.log(0.5 / (1 - pi))
    assert (kl <= 0.05) == kept
    _, gradient, _ = one_token({"name": "dppo", "divergence": "kl"}, 1.0, 1.0, math.log(pi), math.log(0.5))
    assert gradient.item() == rounded(-pi / 0.5 if kept else 0.0)


def test_dppo_truncates_w():
    _, gradient, _ = one_token({"name": "dppo"}, 1.0, 1.0, log_pi=math.log(0.1), log_mu=math.log(0.1 / 30))
    assert gradient.item() == rounded(-20.0)


@pytest.mark.parametrize(("a", "tau"), [(1.0, 1.0), (-1.0, 1.05), (0.0, 1.0)])
@pytest.mark.parametrize("r", [0.5, 1.0, 1.8])
def test_sapo(a, tau, r):
    loss, gradient, _ = one_token({"name": "sapo"}, r, a)
    gate = 1 / (1 + math.exp(-tau * (r - 1)))
    assert loss == rounded(-4 / tau * gate * a)
    assert gradient.item() == rounded(-4 * gate * (1 - gate) * r * a)
    if r == 1.0:
        assert gradient.item() == rounded(-a), "at r = 1 the gradient is the policy gradient"


@pytest.mark.parametrize(
    ("low", "a", "kept"),
    [(0.1, -1.0, False), (0.2, -1.0, True), (None, -1.0, False), (0.01, 1.0, True), (0.01, -1.0, False)],
)
def test_dppo_has_a_distance_of_its_own_for_probabilities_that_fall(low, a, kept):
    """mu = 0.5; pi = 0.34 is 0.16 below where A < 0, pi = 0.64 is 0.14 above where A > 0; δ = 0.15."""
    pi = 0.34 if a < 0 else 0.64
    _, gradient, _ = one_token({"name": "dppo", "delta_low": low}, 1.0, a, math.log(pi), math.log(0.5))
    assert gradient.item() == rounded(-a * pi / 0.5 if kept else 0.0)


def test_gspo_token_form_has_the_gradient_of_the_sequence_form():
    """-min(s_i A, clip(s_i) A) differentiated through s_i, against the stop-gradient form, with kept and clipped
    sequences of both signs."""
    config = ObjectiveConfig.model_validate(
        {"policy_term": {"name": "gspo", "clip_low": 0.05, "clip_high": 0.04}, "aggregation": "seq-mean-token-mean"}
    )
    kept = []
    for seed in range(8):
        batch = random_batch(seed)
        inputs, mask = padded(batch)
        result = compute_objective(inputs, config)
        _, gradient = loss_and_gradient(result, inputs, mask)
        pi = torch.tensor([x for s in batch for x in s.pi], dtype=torch.float64, requires_grad=True)
        terms = []
        for seq, log_pi in zip(batch, pi.split([len(s) for s in batch])):
            if len(seq):
                s = (log_pi - torch.tensor(seq.po, dtype=torch.float64)).mean().exp()
                terms.append(-torch.minimum(s * seq.a[0], s.clamp(0.95, 1.04) * seq.a[0]))
                kept.append((result.metrics["actor/pg_clipfrac"], seq.a[0]))
        sequence_loss = torch.stack(terms).sum() / len(batch)
        (expected,) = torch.autograd.grad(sequence_loss, pi)
        assert_rounded(result.loss, sequence_loss, BATCH)
        assert_rounded(gradient, expected, BATCH)
    assert any(fraction > 0 and a != 0 for fraction, a in kept), "no sequence was clipped: the test would show nothing"


def test_gmpo_averages_over_trained_tokens_only():
    """A fully masked row and padding change nothing: the mean log-ratio is over T_i tokens, not over the width."""
    log_pi = torch.tensor([[-1.0, -2.0]], dtype=torch.float64)
    log_po = torch.tensor([[-1.2, -2.1]], dtype=torch.float64)
    config = ObjectiveConfig.model_validate({"policy_term": "gmpo", "aggregation": "seq-mean-token-sum"})
    want = -1.5 * math.exp((0.2 + 0.1) / 2) * 2

    def loss(pad: int, rows: int) -> float:
        mask = torch.zeros(rows, 2 + pad, dtype=torch.bool)
        mask[0, :2] = True
        wide = [torch.nn.functional.pad(x, (0, pad, 0, rows - 1), value=-9.0) for x in (log_pi, log_po)]
        advantages = torch.full((rows,), 1.5, dtype=torch.float64)
        return compute_objective(ObjectiveInputs(wide[0], wide[1], None, advantages, mask), config).loss.item() * rows

    assert loss(0, 1) == rounded(want)
    assert loss(5, 1) == rounded(want)
    assert loss(5, 3) == rounded(want)


@pytest.mark.parametrize("name", DEFAULTS)
@pytest.mark.parametrize("log_ratio", [100.0, -100.0])
@pytest.mark.parametrize("which", ["old", "inference"])
@pytest.mark.parametrize("a", [1.0, -1.0])
def test_log_ratios_of_100_stay_finite_and_beyond_the_clamp_constant(name, log_ratio, which, a):
    """Ratios stop at e^±20. A term that differentiates its ratio has no gradient there; one with a detached weight
    keeps gradient -weight · A."""
    for dtype in (torch.float32, torch.float64):
        current = torch.tensor([[-0.5, -101.0 if log_ratio < 0 else -0.25]], dtype=dtype, requires_grad=True)
        far = current.detach() - torch.tensor([[0.0, log_ratio]], dtype=dtype)
        near = current.detach().clone()
        old, inference = (far, near) if which == "old" else (near, far)
        mask = torch.ones(1, 2, dtype=torch.bool)
        inputs = ObjectiveInputs(current, old, inference, torch.tensor([a], dtype=dtype), mask)
        result = compute_objective(inputs, ObjectiveConfig.model_validate({"policy_term": name}))
        loss, gradient = loss_and_gradient(result, inputs, mask)
        assert math.isfinite(loss)
        assert torch.isfinite(gradient).all()
        assert all(math.isfinite(value) for value in result.metrics.values())
        if which == "old" and name in ("ppo_clip", "sapo"):
            assert gradient[1] == 0.0
        if which == "inference" and name == "reinforce":
            assert gradient[1] == rounded(-a / 2)


@pytest.mark.parametrize(
    ("correction", "weight"),
    [
        ({"mode": "is"}, math.exp(20)),
        ({"mode": "tis", "cap": 2.0}, 2.0),
        ({"mode": "tis", "level": "sequence", "cap": 3.0}, 3.0),
        ({"mode": "mis", "cap": 2.0}, 0.0),
        ({"mode": "icepop"}, 0.0),
        ({"mode": "reject", "upper": 0.1}, 0.0),
        ({"mode": "reject", "statistic": "geometric", "upper": 2.0}, 0.0),
        ({"mode": "veto"}, 1.0),
    ],
    ids=str,
)
def test_a_token_that_the_engine_calls_impossible(correction, weight):
    """Inference log-prob -inf: rho is at its clamp e^20; truncation holds, every upper bound drops it, veto (a lower
    bound) does not."""
    current = torch.tensor([[-0.5, -1.0]], dtype=torch.float64, requires_grad=True)
    inference = torch.tensor([[-0.5, -torch.inf]], dtype=torch.float64)
    mask = torch.ones(1, 2, dtype=torch.bool)
    inputs = ObjectiveInputs(current, current.detach(), inference, torch.ones(1, dtype=torch.float64), mask)
    result = compute_objective(inputs, ObjectiveConfig.model_validate({"correction": [correction]}))
    loss, gradient = loss_and_gradient(result, inputs, mask)
    assert math.isfinite(loss)
    assert gradient[1].item() == rounded(-weight / 2)
    assert all(math.isfinite(value) for value in result.metrics.values())


@pytest.mark.parametrize("name", ANCHORED)
def test_terms_anchored_on_the_rollout_engine_do_not_read_po(name):
    correction = [{"mode": "mis", "cap": 1.4}, {"mode": "veto", "threshold": 0.5}] if name == "reinforce" else []
    inputs, mask = padded(random_batch(4))
    config = ObjectiveConfig.model_validate({"policy_term": name, "correction": correction})
    other = type(inputs)(**{**vars(inputs), "old_logprobs": inputs.old_logprobs - 0.3})
    first, second = (loss_and_gradient(compute_objective(x, config), x, mask) for x in (inputs, other))
    assert first[0] == second[0]
    assert torch.equal(first[1], second[1])
    assert not config.needs_old_logprobs(num_updates_per_batch=4)
