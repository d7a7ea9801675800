"""Worked numbers of each policy term at its edges, and the behaviour stated for impossible and extreme tokens."""

import math
from dataclasses import replace

import pytest
import torch

from megatron_rl.config import ObjectiveConfig
from megatron_rl.objective import compute_objective
from tests.support.rounding import assert_rounded, rounded
from tests.unit.objective.batches import BATCH, loss_and_gradient, padded, random_batch, worked
from tests.unit.objective.reference import ANCHORED, DEFAULTS

pytestmark = pytest.mark.filterwarnings("ignore::megatron_rl.config.objective.ObjectiveWarning")


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
        inputs = worked(current, old, inference, a)
        result = compute_objective(inputs, ObjectiveConfig.model_validate({"policy_term": name}))
        loss, gradient = loss_and_gradient(result, inputs, inputs.loss_mask)
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
    inputs = worked(current, current.detach(), inference)
    result = compute_objective(inputs, ObjectiveConfig.model_validate({"correction": [correction]}))
    loss, gradient = loss_and_gradient(result, inputs, inputs.loss_mask)
    assert math.isfinite(loss)
    assert gradient[1].item() == rounded(-weight / 2)
    assert all(math.isfinite(value) for value in result.metrics.values())


@pytest.mark.parametrize("name", ANCHORED)
def test_terms_anchored_on_the_rollout_engine_do_not_read_po(name):
    correction = [{"mode": "mis", "cap": 1.4}, {"mode": "veto", "threshold": 0.5}] if name == "reinforce" else []
    inputs, mask = padded(random_batch(4))
    config = ObjectiveConfig.model_validate({"policy_term": name, "correction": correction})
    other = replace(inputs, old_logprobs=inputs.old_logprobs - 0.3)
    first, second = (loss_and_gradient(compute_objective(x, config), x, mask) for x in (inputs, other))
    assert first[0] == second[0]
    assert torch.equal(first[1], second[1])
    assert not config.needs_old_logprobs(num_updates_per_batch=4)
