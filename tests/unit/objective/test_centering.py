"""Score centering against the paper's sums over the whole vocabulary, in numpy."""

import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from megatron_rl.config import ObjectiveConfig
from megatron_rl.errors import InputError
from megatron_rl.objective import Head, MetricStats, ObjectiveInputs, compute_denominators, compute_objective
from megatron_rl.objective.metrics import finalize_metrics
from tests.support.rounding import rounded
from tests.unit.objective.batches import BATCH

pytestmark = pytest.mark.filterwarnings("ignore::megatron_rl.config.objective.ObjectiveWarning")

V, LENGTHS, ADVANTAGES = 9, (4, 1, 6, 3), (1.3, -0.7, 0.0, -2.0)
WEIGHTS = {
    "none": ([], lambda r: 1.0),
    "is": (["is"], lambda r: r),
    "tis": (["tis"], lambda r: min(r, 2.0)),
    "tis within": ([{"mode": "tis", "cap": 1.5, "lower": 0.7}], lambda r: min(max(r, 0.7), 1.5)),
    "mis": (["mis"], lambda r: r if r <= 3.0 else 0.0),
    "icepop": (["icepop"], lambda r: r if 0.5 <= r <= 5.0 else 0.0),
    "mask": ([{"mode": "mask", "upper": 1.2}], lambda r: 1.0 if r <= 1.2 else 0.0),
    "tis and mask": (["tis", {"mode": "mask", "lower": 0.6}], lambda r: min(r, 2.0) if r >= 0.6 else 0.0),
}
"""The corrections, and f of them as the paper writes it."""


class Policies:
    """Logits of pi, po and mu [N, V] of all tokens, and what was sampled."""

    def __init__(self, seed=0, spread=1.0):
        random, n = np.random.default_rng(seed), sum(LENGTHS)
        self.pi = 1.5 * random.normal(size=(n, V))
        self.mu = self.pi + spread * random.normal(size=(n, V))
        self.po = self.pi + 0.3 * np.random.default_rng(seed + 100).normal(size=(n, V))
        self.sampled = np.array([random.choice(V, p=p) for p in softmax(self.mu)])
        self.advantages = np.repeat(ADVANTAGES, LENGTHS)

    def head(self, k):
        return np.argsort(-self.mu, axis=1, kind="stable")[:, :k]


def softmax(z):
    return np.exp(z) / np.exp(z).sum(axis=-1, keepdims=True)


def centred_gradient(policies, k, f):
    """−A (f_y s_y − Σ_v μ̂_v f(pi_v/μ̂_v) s_v), s_v = ∂ log pi_v / ∂ z, over the whole vocabulary: [N, V]."""
    rows = []
    for z_pi, z_mu, y, a, head in zip(
        policies.pi, policies.mu, policies.sampled, policies.advantages, policies.head(k), strict=True
    ):
        pi, mu = softmax(z_pi), softmax(z_mu)
        s = np.eye(V) - pi  # s[v] = ∂ log pi_v / ∂ z
        in_head = np.isin(np.arange(V), head)
        believed = mu.copy()
        if k < V:
            believed[~in_head] = (1 - mu[in_head].sum()) / (1 - pi[in_head].sum()) * pi[~in_head]
        mean = sum(believed[v] * f(pi[v] / believed[v]) * s[v] for v in range(V))
        rows.append(-a * (f(pi[y] / mu[y]) * s[y] - mean))
    return np.array(rows)


def given(policies, k, form="packed", rows=None, absent=0, with_po=False):
    """Inputs of sequences ``rows``, and the logits that they come from: NaN stands wherever nothing is trained."""
    rows = range(len(LENGTHS)) if rows is None else rows
    starts = np.cumsum([0, *LENGTHS])
    chosen = np.concatenate([np.arange(starts[i], starts[i + 1]) for i in rows])
    logits = torch.tensor(policies.pi[chosen], requires_grad=True)
    mu, ids = torch.tensor(policies.mu[chosen]).log_softmax(-1), torch.tensor(policies.head(k)[chosen])
    po = torch.tensor(policies.po[chosen]).log_softmax(-1)
    sampled = torch.tensor(policies.sampled[chosen])[:, None]
    log_pi = logits.log_softmax(-1)
    current, inference = log_pi.gather(1, sampled)[:, 0], mu.gather(1, sampled)[:, 0]
    of_head, mu_of_head = log_pi.gather(1, ids), mu.gather(1, ids)
    old, old_of_head = po.gather(1, sampled)[:, 0], po.gather(1, ids)
    if absent:
        of_head = torch.cat([of_head, torch.full((len(chosen), absent), -3.0, dtype=torch.float64)], 1)
        mu_of_head = torch.cat([mu_of_head, torch.full((len(chosen), absent), -torch.inf, dtype=torch.float64)], 1)
    has_sampled, lengths = (ids == sampled).any(1), [LENGTHS[i] for i in rows]
    advantages = torch.tensor([ADVANTAGES[i] for i in rows], dtype=torch.float64)
    if form == "packed":
        mask, cu_seqlens = torch.ones(len(chosen), dtype=torch.bool), torch.tensor([0, *lengths]).cumsum(0)
    else:
        mask, cu_seqlens = torch.arange(max(lengths) + 2)[None] < torch.tensor(lengths)[:, None], None

        def pad(x):
            return torch.full((*mask.shape, *x.shape[1:]), torch.nan, dtype=x.dtype).masked_scatter(
                mask.reshape(*mask.shape, *[1] * (x.dim() - 1)), x
            )

        current, inference, old = (pad(x) for x in (current, inference, old))
        of_head, mu_of_head, old_of_head = (pad(x) for x in (of_head, mu_of_head, old_of_head))
        has_sampled = torch.zeros_like(mask).masked_scatter(mask, has_sampled)
    if not with_po:
        old = old_of_head = None
    head = Head(of_head, mu_of_head, has_sampled, old=old_of_head)
    return ObjectiveInputs(current, old, inference, advantages, mask, cu_seqlens, head=head), logits


def config(corrections=(), **more):
    values = {"policy_term": "reinforce", "score_centering": True, "correction": list(corrections)}
    return ObjectiveConfig.model_validate({**values, **more})


@pytest.mark.parametrize("form", ["packed", "padded"])
@pytest.mark.parametrize("k", [1, 4, V])
@pytest.mark.parametrize("name", WEIGHTS)
def test_the_gradient_is_the_paper_s_sum_over_the_vocabulary(name, k, form):
    corrections, f = WEIGHTS[name]
    policies = Policies()
    inputs, logits = given(policies, k, form)
    result = compute_objective(inputs, config(corrections))
    (gradient,) = torch.autograd.grad(result.loss, logits)
    want = centred_gradient(policies, k, f) / sum(LENGTHS)
    assert gradient.flatten().tolist() == rounded(want.flatten().tolist(), BATCH, scale=1.0)


def ppo_gradient(policies, k, f, low, high, dual):
    """The gradient of ppo_clip with a truncated weight, minus its mean over the sampler (App. A.2): [N, V].

    A token v that mu would have sampled has the gradient −A f(po_v/mu_v) (pi_v/po_v) s_v, or none where the clip for
    this A is active. Outside of the head mu and po are multiples of pi.
    """
    rows = []
    for z_pi, z_po, z_mu, y, a, head in zip(
        *(policies.pi, policies.po, policies.mu, policies.sampled, policies.advantages, policies.head(k)), strict=True
    ):
        pi, po, mu = softmax(z_pi), softmax(z_po), softmax(z_mu)
        s, rest = np.eye(V) - pi, ~np.isin(np.arange(V), head)
        mu_all, po_all = mu.copy(), po.copy()
        if k < V:
            mu_all[rest] = pi[rest] * mu[rest].sum() / pi[rest].sum()
            po_all[rest] = pi[rest] * po[rest].sum() / pi[rest].sum()

        def slope(v, mu, po, pi=pi, a=a):
            r = pi[v] / po[v]
            active = r <= high if a > 0 else low <= r <= dual
            return f(po[v] / mu[v]) * r * active

        mean = sum(mu_all[v] * slope(v, mu_all, po_all) * s[v] for v in range(V))
        rows.append(-a * (slope(y, mu, po) * s[y] - mean))
    return np.array(rows)


@pytest.mark.parametrize("form", ["packed", "padded"])
@pytest.mark.parametrize("k", [1, 4, V])
@pytest.mark.parametrize("dual", [None, 1.4])
@pytest.mark.parametrize("name", WEIGHTS)
def test_the_clipped_surrogate_is_centred_by_what_it_gives_each_token(name, dual, k, form):
    corrections, f = WEIGHTS[name]
    policies = Policies(5)
    inputs, logits = given(policies, k, form, with_po=True)
    term = {"name": "ppo_clip", "clip_low": 0.2, "clip_high": 0.3, "dual_clip": dual}
    result = compute_objective(inputs, config(corrections, policy_term=term))
    (gradient,) = torch.autograd.grad(result.loss, logits)
    want = ppo_gradient(policies, k, f, 0.8, 1.3, dual or math.inf) / sum(LENGTHS)
    assert gradient.flatten().tolist() == rounded(want.flatten().tolist(), BATCH, scale=1.0)


def test_of_one_update_the_clipped_surrogate_is_the_weighted_score():
    """po is sg(pi): r is 1 everywhere, and f sees pi/mu, as with `reinforce`."""
    inputs, logits = given(Policies(6), 4)
    results = [compute_objective(inputs, config(["tis"], policy_term=term)) for term in ("ppo_clip", "reinforce")]
    gradients = [torch.autograd.grad(result.loss, logits, retain_graph=True)[0] for result in results]
    assert gradients[0].flatten().tolist() == rounded(gradients[1].flatten().tolist(), BATCH, scale=1.0)


def test_of_a_ratio_to_the_sampler_the_clip_alone_leaves_a_mean():
    """anchor bypass: po is mu. Without a clip that is active the mean score is 0; tokens that it cuts leave one."""
    policies = Policies(7)
    inputs, logits = given(policies, V)
    wide = {"name": "ppo_clip", "clip_low": 0.999999, "clip_high": 1e6}
    metrics = compute_objective(inputs, config(policy_term=wide, anchor="bypass")).metrics
    assert metrics["score_centering/abs_coeff_sum"] == rounded(0.0, BATCH, scale=1.0)
    policies.po = policies.mu
    term = {"name": "ppo_clip", "clip_low": 0.2, "clip_high": 0.3}
    result = compute_objective(inputs, config(policy_term=term, anchor="bypass"))
    (gradient,) = torch.autograd.grad(result.loss, logits)
    want = ppo_gradient(policies, V, WEIGHTS["none"][1], 0.8, 1.3, math.inf) / sum(LENGTHS)
    assert gradient.flatten().tolist() == rounded(want.flatten().tolist(), BATCH, scale=1.0)


def frozen_loss(policies, k, f, logits):
    """Σ −A (sg(f) log pi_y − Σ_H c_v log pi_v) / N [Eq 12] of ``logits``, with what sg holds at the policies' own."""
    total = 0.0
    for row, head in enumerate(policies.head(k)):
        pi, mu, y = softmax(policies.pi[row]), softmax(policies.mu[row]), policies.sampled[row]
        rho = max(1 - mu[head].sum(), 1e-6) / max(1 - pi[head].sum(), 1e-6)
        alpha, log_pi = rho * f(1 / rho), np.log(softmax(logits[row]))
        c = [mu[v] * f(pi[v] / mu[v]) - alpha * pi[v] for v in head]
        bracket = f(pi[y] / mu[y]) * log_pi[y] - sum(x * log_pi[v] for x, v in zip(c, head, strict=True))
        total += -policies.advantages[row] * bracket / len(logits)
    return total


@pytest.mark.parametrize("name", WEIGHTS)
def test_loss_and_gradient_by_differences(name):
    corrections, f = WEIGHTS[name]
    policies, step = Policies(1), 2.0**-100
    inputs, logits = given(policies, 3)
    result = compute_objective(inputs, config(corrections))
    (gradient,) = torch.autograd.grad(result.loss, logits)
    assert result.loss.item() == rounded(frozen_loss(policies, 3, f, policies.pi), BATCH)
    for row, column in [(0, 0), (3, 5), (4, 8), (13, 2)]:
        moved = policies.pi.astype(complex)
        moved[row, column] += 1j * step  # a complex step: no difference of near numbers, and no error of its square
        slope = frozen_loss(policies, 3, f, moved).imag / step
        assert gradient[row, column].item() == rounded(slope, BATCH)


def test_one_token_by_hand():
    """mu = (0.5, 0.3, 0.2), pi = (0.4, 0.4, 0.2), H = {0}, y = 1, A = 2: ρ = 0.5/0.6, c = 0.5 − 0.4 ρ."""
    log = [torch.tensor([[math.log(x)]], dtype=torch.float64) for x in (0.4, 0.3)]
    head = Head(log[0][..., None], torch.tensor([[[math.log(0.5)]]], dtype=torch.float64), torch.tensor([[False]]))
    mask = torch.ones(1, 1, dtype=torch.bool)
    inputs = ObjectiveInputs(log[0], None, log[1], torch.tensor([2.0]).double(), mask, head=head)
    result, c = compute_objective(inputs, config()), 0.5 - 0.4 * 0.5 / 0.6
    assert result.loss.item() == rounded(-2 * (math.log(0.4) - c * math.log(0.4)))
    names = ("head_mass_mu", "head_mass_pi", "head_mass_min", "tail_ratio", "abs_coeff_sum", "outside_frac")
    found = [result.metrics[f"score_centering/{name}"] for name in names]
    assert found == rounded([0.5, 0.4, 0.5, 0.5 / 0.6, c, 1.0])


@pytest.mark.parametrize("name", WEIGHTS)
def test_with_the_whole_head_the_mean_over_the_sampler_is_zero(name):
    corrections, _ = WEIGHTS[name]
    policies = Policies(2)
    policies.advantages[:] = 1.0
    mu, total = softmax(policies.mu), np.zeros_like(policies.pi)
    for y in range(V):
        policies.sampled[:] = y
        inputs, logits = given(policies, V)
        inputs = replace(inputs, advantages=torch.ones(len(LENGTHS)).double())
        (gradient,) = torch.autograd.grad(compute_objective(inputs, config(corrections)).loss, logits)
        total += mu[:, [y]] * gradient.numpy()
    assert total.flatten().tolist() == rounded([0.0] * total.size, BATCH, scale=1.0)


@pytest.mark.parametrize("name", WEIGHTS)
@pytest.mark.parametrize("is_whole", [True, False])
def test_where_the_engines_agree_nothing_is_subtracted(name, is_whole):
    inputs, _ = given(Policies(spread=0.0), V if is_whole else 3)
    inputs = replace(inputs, head=replace(inputs.head, is_whole=is_whole))
    metrics = compute_objective(inputs, config(WEIGHTS[name][0])).metrics
    assert metrics["score_centering/abs_coeff_sum"] == rounded(0.0, BATCH, scale=1.0)
    assert metrics["score_centering/tail_ratio"] == rounded(1.0, BATCH)


def test_importance_sampling_alone_leaves_nothing_to_centre():
    inputs, _ = given(Policies(), 4)
    metrics = compute_objective(inputs, config(["is"])).metrics
    assert metrics["score_centering/abs_coeff_sum"] == rounded(0.0, BATCH, scale=1.0)
    with pytest.warns(UserWarning, match="the weighted mean score is 0 already"):
        config(["is"])


@pytest.mark.parametrize("is_whole", [True, False])
def test_places_of_a_head_that_hold_no_token_have_no_part(is_whole):
    plain, with_absent = (given(Policies(), 4, absent=absent)[0] for absent in (0, 3))
    results = [
        compute_objective(replace(x, head=replace(x.head, is_whole=is_whole)), config(["tis"]))
        for x in (plain, with_absent)
    ]
    assert results[0].loss.item() == rounded(results[1].loss.item())
    assert results[0].metrics == rounded(results[1].metrics)


@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"])
def test_microbatches_add_up_to_the_mini_batch(aggregation):
    settings = config(
        ["icepop", {"mode": "veto", "threshold": 0.2}],
        aggregation=aggregation,
        max_response_length=8,
        distortion={"delta": 3.0, "low_prob": 0.3},
        variance={"sigma": 0.2},
    )
    policies, gradients, stats, losses = Policies(3), [], [], []
    parts = [[0, 1], [2], [3]]
    everything = replace(given(policies, 4)[0], sequence_ids=torch.arange(4))
    counts = compute_denominators(everything, settings)
    for part in parts:
        inputs, logits = given(policies, 4, "padded", part)
        result = compute_objective(replace(inputs, sequence_ids=torch.tensor(part)), settings, counts, (1, 2))
        gradients.append(torch.autograd.grad(result.loss, logits)[0])
        stats.append(result.stats)
        losses.append(result.loss.item())
    inputs, logits = given(policies, 4)
    whole = compute_objective(replace(inputs, sequence_ids=torch.arange(4)), settings, counts, (1, 2))
    (gradient,) = torch.autograd.grad(whole.loss, logits)
    assert sum(losses) == rounded(whole.loss.item(), BATCH, scale=1.0)
    assert torch.cat(gradients).flatten().tolist() == rounded(gradient.flatten().tolist(), BATCH, scale=1.0)
    merged = finalize_metrics(MetricStats.merge(stats))
    assert {k: v for k, v in merged.items() if k.startswith("score")} == rounded(
        {k: v for k, v in whole.metrics.items() if k.startswith("score")}, BATCH
    )


def test_a_mask_of_a_sequence_takes_its_centre_with_it():
    """A ratio of a token's own that is cut leaves the centre; a whole sequence that is dropped has neither."""
    policies = Policies(4)
    w = softmax(policies.pi) / softmax(policies.mu)
    sampled = w[np.arange(len(w)), policies.sampled]
    starts = np.cumsum([0, *LENGTHS])
    smallest = [sampled[a:b].min() for a, b in pairwise(starts)]
    threshold = float(np.median(smallest))
    inputs, logits = given(policies, 4)
    entry = {"mode": "veto", "threshold": threshold}
    (gradient,) = torch.autograd.grad(compute_objective(inputs, config(["tis", entry])).loss, logits)
    want = centred_gradient(policies, 4, WEIGHTS["tis"][1]) / sum(LENGTHS)
    for a, b, least in zip(starts, starts[1:], smallest):
        want[a:b] *= least >= threshold
    assert 0 < sum(least >= threshold for least in smallest) < len(LENGTHS)
    assert gradient.flatten().tolist() == rounded(want.flatten().tolist(), BATCH, scale=1.0)


def test_without_the_key_a_head_is_not_read():
    inputs, _ = given(Policies(), 4)
    plain = ObjectiveConfig.model_validate({"policy_term": "reinforce"})
    without, beside = (compute_objective(x, plain) for x in (replace(inputs, head=None), inputs))
    assert without.loss.item() == beside.loss.item()
    assert without.metrics == beside.metrics


@pytest.mark.parametrize(
    ("objective", "message"),
    [
        ({"policy_term": "cispo"}, "score_centering with policy term cispo"),
        ({"policy_term": "minirl"}, "score_centering with policy term minirl"),
        ({"correction": [{"mode": "tis", "level": "sequence"}]}, "correction mode tis at level sequence"),
        ({"correction": [{"mode": "is", "level": "geometric"}]}, "correction mode is at level geometric"),
        ({"correction": ["own.py:weight"]}, "correction mode own.py:weight, which is not a function of one token"),
        ({"correction": [{"mode": "tis", "normalize": True}]}, "normalize on tis"),
        ({"anchor": "interpolate"}, "anchor interpolate with policy term reinforce"),
        ({"router_shift": 0.8}, "router_shift with policy term reinforce"),
        ({"policy_term": "ppo_clip", "anchor": "interpolate"}, "score_centering with anchor interpolate"),
        ({"policy_term": "ppo_clip", "router_shift": 0.8}, "score_centering with router_shift"),
        (
            {"policy_term": "ppo_clip", "correction": [{"mode": "tis", "normalize": True}]},
            "score_centering with normalize or renormalize on tis",
        ),
    ],
)
def test_what_is_no_function_of_one_token_is_refused(objective, message):
    with pytest.raises(ValidationError, match=message):
        config(**{"corrections": objective.pop("correction", ()), **objective})


def test_a_head_is_needed_and_has_to_fit():
    inputs, _ = given(Policies(), 4)
    with pytest.raises(InputError, match="head is None, but score_centering needs"):
        compute_objective(replace(inputs, head=None), config())
    with pytest.raises(InputError, match="score_centering need the rollout engine's log-probs"):
        compute_objective(replace(inputs, inference_logprobs=None), config())
    ppo = config(policy_term="ppo_clip")
    with pytest.raises(InputError, match=r"head\.old is None, but score_centering with policy term ppo_clip"):
        compute_objective(replace(inputs, old_logprobs=inputs.inference_logprobs), ppo)
    short = replace(inputs.head, inference=inputs.head.inference[:, :3])
    with pytest.raises(InputError, match=r"head has log-probs of shapes \[\[14, 4\], \[14, 3\]\]"):
        compute_objective(replace(inputs, head=short), config())
