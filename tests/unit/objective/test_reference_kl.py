"""The divergence from a reference policy against k1, k2 and k3 in numpy, and against the divergence of distributions.

The tokens of a batch have log-probs of every kind: near the reference, far from it, and impossible under it.
"""

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from megatron_rl.config import ObjectiveConfig
from megatron_rl.errors import InputError
from megatron_rl.objective import MetricStats, ObjectiveInputs, compute_denominators, compute_objective
from megatron_rl.objective.metrics import finalize_metrics
from megatron_rl.objective.reference_kl import estimate
from tests.support.rounding import rounded
from tests.unit.objective.batches import BATCH

pytestmark = pytest.mark.filterwarnings("ignore::megatron_rl.config.objective.ObjectiveWarning")

LENGTHS, BETA, V = (5, 1, 7, 3), 0.3, 6


def k1(pi, ref):
    return np.log(pi) - np.log(ref)


def k2(pi, ref):
    return 0.5 * (np.log(pi) - np.log(ref)) ** 2


def k3(pi, ref):
    return ref / pi - 1 - np.log(ref / pi)


def capped(pi, ref):
    return np.minimum(k3(pi, ref), 10.0)


VALUES = {"k1": k1, "k2": k2, "k3": capped, "k1+": k1, "k3+": capped}
GRADIENTS = VALUES | {"k1+": k2, "k3+": k2}
"""Of a token: the value of k, and what its gradient is that of (verl's `kl_penalty` for a type with a plus)."""
CASES = {
    **{kind: {"type": kind} for kind in VALUES},
    "k3 without a bound": {"type": "k3", "cap": None},
    "k3, low bound": {"type": "k3", "cap": 0.1},
    "k3, unbiased": {"type": "k3", "unbiased": True},
    "k2, unbiased": {"type": "k2", "unbiased": True},
}


class Batch:
    """Probabilities [N] of the sampled tokens under four policies, and a mask."""

    def __init__(self, seed=0):
        random, n = np.random.default_rng(seed), sum(LENGTHS)
        self.pi = np.exp(-random.exponential(1.2, n) - 1e-3)
        self.po, self.mu = (np.minimum(self.pi * np.exp(random.normal(0, 0.3, n)), 0.999) for _ in range(2))
        self.ref = np.minimum(self.pi * np.exp(random.normal(0, 1.5, n)), 0.999)
        self.mask = random.random(n) > 0.2
        self.mask[: LENGTHS[0]] = True
        self.pi[1], self.ref[1] = 1e-3, 0.9  # k3 beyond its bound of 10
        self.pi[2], self.ref[2] = 0.9, 1e-8

    def inputs(self, rows=None, pi=None):
        starts = np.cumsum([0, *LENGTHS])
        rows = range(len(LENGTHS)) if rows is None else rows
        chosen = np.concatenate([np.arange(starts[i], starts[i + 1]) for i in rows])
        current, old, inference, reference = (
            torch.tensor(np.where(self.mask, np.log(x), np.nan)[chosen])
            for x in (self.pi if pi is None else pi, self.po, self.mu, self.ref)
        )
        return ObjectiveInputs(
            current_logprobs=current.requires_grad_(),
            old_logprobs=old,
            inference_logprobs=inference,
            advantages=torch.zeros(len(rows), dtype=torch.float64),
            loss_mask=torch.tensor(self.mask[chosen]),
            cu_seqlens=torch.tensor([0, *(LENGTHS[i] for i in rows)]).cumsum(0),
            reference_logprobs=reference,
        )


def config(case, **keys):
    return ObjectiveConfig.model_validate({"kl_loss": {"coef": BETA, **CASES[case]}, **keys})


def value(case, batch, term="ppo_clip", table=VALUES):
    """β mean over trained tokens of k, or of ratio · k, as the symbols say."""
    keys, kind = CASES[case], CASES[case]["type"]
    k = table[kind](batch.pi, batch.ref)
    if kind == "k3" and "cap" in keys:
        k = np.minimum(k3(batch.pi, batch.ref), keys["cap"] or np.inf)
    if keys.get("unbiased"):
        k = k * batch.pi / (batch.mu if term == "reinforce" else batch.po)
    return BETA * k[batch.mask].mean()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("term", ["ppo_clip", "reinforce"])
def test_loss_is_that_of_the_symbols(case, term):
    batch = Batch()
    result = compute_objective(batch.inputs(), config(case, policy_term=term, correction=[]))
    assert result.loss.item() == rounded(value(case, batch, term), BATCH)
    assert result.metrics["actor/regularizer_loss"] == result.loss.item()
    assert result.metrics["reference/kl"] == rounded(k1(batch.pi, batch.ref)[batch.mask].mean(), BATCH, scale=10)
    assert result.metrics["reference/k3_kl"] == rounded(k3(batch.pi, batch.ref)[batch.mask].mean(), BATCH)


@pytest.mark.parametrize("case", CASES)
def test_gradient_by_differences(case):
    batch, step = Batch(1), 1e-6
    inputs = batch.inputs()
    compute_objective(inputs, config(case)).loss.backward()
    for t in np.flatnonzero(batch.mask):
        moved = []
        for sign in (1, -1):
            other = Batch(1)
            other.pi[t] *= np.exp(sign * step)
            moved.append(value(case, other, table=GRADIENTS))
        wanted, size = (moved[0] - moved[1]) / (2 * step), 1 + abs(moved[0])
        assert inputs.current_logprobs.grad[t].item() == rounded(wanted, BATCH, scale=size / step), t
    assert torch.equal(inputs.current_logprobs.grad[~torch.tensor(batch.mask)], torch.zeros(sum(~batch.mask)).double())


@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-mean"])
def test_parts_of_a_minibatch_add_up(aggregation):
    batch, chosen = Batch(2), config("k3, unbiased", aggregation=aggregation)
    whole = compute_objective(batch.inputs(), chosen)
    counts = compute_denominators(batch.inputs(), chosen)
    parts = [compute_objective(batch.inputs(rows), chosen, denominators=counts) for rows in ([2, 0], [3], [1])]
    assert sum(part.loss.item() for part in parts) == rounded(whole.loss.item(), BATCH)
    metrics = finalize_metrics(MetricStats.merge([part.stats for part in parts]))
    assert metrics == {name: rounded(x, BATCH, scale=10) for name, x in whole.metrics.items()}


def distributions():
    random = np.random.default_rng(3)
    return (torch.tensor(0.4 * random.normal(size=V)).softmax(0) for _ in range(2))


@pytest.mark.parametrize(
    ("case", "ratio"), [("k2", 1), ("k1+", 1), ("k3+", 1), ("k3, unbiased", 1), ("k3", 0), ("k1", None)]
)
def test_whose_mean_gradient_is_that_of_the_divergence(case, ratio):
    """Over all V tokens of one place, each with its probability under pi: the gradient of Σ_v pi_v log(pi_v/ref_v).

    No token is beyond the bound of k3. The mean gradient of k3 is that of the divergence the other way round; k1 has
    none.
    """
    ref, start = distributions()
    logits = start.log().requires_grad_()
    log_pi = logits.log_softmax(0)
    pi = log_pi.exp()
    weights = pi.detach()
    inputs = ObjectiveInputs(
        current_logprobs=log_pi[:, None],
        old_logprobs=None,
        inference_logprobs=None,
        advantages=torch.zeros(V, dtype=torch.float64),
        loss_mask=torch.ones(V, 1),
        reference_logprobs=ref.log()[:, None],
    )
    loss = [
        compute_objective(
            _row(inputs, v), ObjectiveConfig.model_validate({"kl_loss": {"coef": 1.0, **CASES[case]}})
        ).loss
        for v in range(V)
    ]
    (mean,) = torch.autograd.grad(sum(w * x for w, x in zip(weights, loss)), logits, retain_graph=True)
    forward = (pi * (log_pi - ref.log())).sum()
    backward = (ref * (ref.log() - log_pi)).sum()
    wanted = {1: forward, 0: backward, None: 0.0 * forward}[ratio]
    (gradient,) = torch.autograd.grad(wanted, logits)
    assert mean.tolist() == [rounded(x, BATCH, scale=1) for x in gradient.tolist()]


def _row(inputs, v):
    row = slice(v, v + 1)
    return ObjectiveInputs(
        inputs.current_logprobs[row],
        None,
        None,
        inputs.advantages[row],
        inputs.loss_mask[row],
        reference_logprobs=inputs.reference_logprobs[row],
    )


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_estimate(kind):
    pi, ref = np.array([0.5, 1e-3, 0.9]), np.array([0.5, 0.9, 1e-12])
    found = estimate(torch.tensor(np.log(pi) - np.log(ref)), kind)
    assert found.tolist() == [rounded(x, BATCH, scale=1) for x in VALUES[kind](pi, ref)]
    assert estimate(torch.zeros(1), kind).item() == 0.0


def test_impossible_tokens_stay_finite():
    batch = Batch()
    inputs = batch.inputs()
    inputs.reference_logprobs[0] = -torch.inf
    for case in CASES:
        assert torch.isfinite(compute_objective(inputs, config(case)).loss)


def test_refused():
    inputs = Batch().inputs()
    given = {name: getattr(inputs, name) for name in ("loss_mask", "advantages", "cu_seqlens", "old_logprobs")}
    with pytest.raises(InputError, match="reference_logprobs is None, but kl_loss"):
        compute_objective(ObjectiveInputs(inputs.current_logprobs, inference_logprobs=None, **given), config("k3"))
    other = ObjectiveInputs(
        inputs.current_logprobs, inference_logprobs=None, reference_logprobs=torch.zeros(2), **given
    )
    with pytest.raises(InputError, match="reference_logprobs has shape"):
        compute_objective(other, config("k3"))
    with pytest.raises(InputError, match="kl_loss with unbiased need"):
        compute_objective(
            ObjectiveInputs(
                inputs.current_logprobs, inference_logprobs=None, reference_logprobs=inputs.old_logprobs, **given
            ),
            config("k3, unbiased", policy_term="reinforce"),
        )
    with pytest.raises(ValidationError, match=r"type k3\+, whose gradient is k2's; use k3"):
        ObjectiveConfig.model_validate({"kl_loss": {"type": "k3+", "unbiased": True}})
    for keys in ({"anchor": "interpolate"}, {"router_shift": 0.8}):
        with pytest.raises(ValidationError, match=r"kl_loss\.unbiased: true with"):
            ObjectiveConfig.model_validate({"kl_loss": {"unbiased": True}, **keys})


def test_k1_in_the_loss_is_warned_of():
    with pytest.warns(match="kl_loss of type k1: its gradient"):
        ObjectiveConfig.model_validate({"kl_loss": {"type": "k1"}})


def test_a_reward_needs_old_logprobs():
    assert ObjectiveConfig.model_validate({"kl_in_reward": {}}).needs_old_logprobs(1)
    assert not ObjectiveConfig.model_validate({"kl_loss": {}}).needs_old_logprobs(1)
