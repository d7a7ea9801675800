"""Metric names and numbers against numpy, by the age of weights too, and no wait for the device."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from megatron_rl.config.objective import ObjectiveConfig
from megatron_rl.objective import (
    POLICY_TERMS,
    NoiseKey,
    ObjectiveInputs,
    compute_denominators,
    compute_objective,
    finalize_metrics,
)
from megatron_rl.objective.aggregation import MetricStats
from megatron_rl.objective.metrics import EDGES, LABELS, PLACE_EDGES, log_rho_edges, mismatch_metrics, place_labels
from tests.support.rounding import CLOSED_FORM, assert_rounded, gamma, rounded, unit_roundoff
from tests.unit.objective.batches import BATCH, EXTREMES, packed, padded, random_batch
from tests.unit.objective.reference import TERMS, reference_mismatch, term_values

GAP = 1e-3  # relative difference of two engines' log-probs

pytestmark = pytest.mark.filterwarnings("ignore::megatron_rl.config.objective.ObjectiveWarning")


@pytest.mark.parametrize("extremes", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_mismatch_metrics_are_the_formulas(seed, extremes):
    batch = random_batch(seed, num_sequences=9, extremes=extremes)
    want = reference_mismatch(batch)
    inputs, _ = padded(batch)
    alone = mismatch_metrics(inputs.old_logprobs, inputs.inference_logprobs, inputs.loss_mask)
    assert alone == rounded(want, EXTREMES if extremes else BATCH)
    assert all(type(value) is float for value in alone.values())
    flat, _ = packed(batch)
    assert mismatch_metrics(flat.old_logprobs, flat.inference_logprobs, flat.loss_mask, flat.cu_seqlens) == rounded(
        want, EXTREMES if extremes else BATCH
    )
    with_objective = compute_objective(inputs, ObjectiveConfig()).metrics
    assert {name: with_objective[name] for name in want} == alone


def test_the_effective_sample_of_sequences_that_all_weigh_nothing():
    """Products of rho of e^-30, clamped to e^-20 as every ratio is, and e^-19: it is their relation that counts."""
    log_rho = torch.tensor([[-15.0, -15.0], [-9.0, -10.0]], dtype=torch.float64)
    measured = mismatch_metrics(log_rho - 30, torch.full_like(log_rho, -30.0), torch.ones(2, 2, dtype=torch.bool))
    expected = (math.exp(-20) + math.exp(-19)) ** 2 / (2 * (math.exp(-40) + math.exp(-38)))
    assert measured["rollout_corr/eff_sample_size_seq"] == rounded(expected)


def test_extremes_look_at_trained_tokens_only():
    """Every rho is below 1, padding (whose log-probs are taken as 0, ratio 1) included in the tensor."""
    log_po = torch.tensor([[-1.0, -2.0, 0.0]])
    log_mu = torch.tensor([[-0.5, -1.0, 0.0]])
    mask = torch.tensor([[True, True, False]])
    assert mismatch_metrics(log_po, log_mu, mask)["mismatch/rho_max"] == rounded(math.exp(-0.5), dtype=torch.float32)
    inputs = ObjectiveInputs(log_po, log_po, log_mu, torch.ones(1), mask)
    measured = compute_objective(inputs, ObjectiveConfig.model_validate({"correction": ["is"]})).metrics
    assert measured["rollout_corr/rollout_is_max"] == rounded(math.exp(-0.5), dtype=torch.float32)
    assert measured["rollout_corr/rollout_is_min"] == rounded(math.exp(-1.0), dtype=torch.float32)


def test_names_of_the_specification_are_all_there():
    batch = random_batch(1)
    inputs, mask = padded(batch)
    inputs = replace(inputs, entropy=mask.double() * 0.7)
    config = ObjectiveConfig.model_validate(
        {"policy_term": {"name": "ppo_clip", "dual_clip": 3.0}, "correction": [{"mode": "icepop"}]}
    )
    metrics = compute_objective(inputs, config).metrics
    rollout = "kl k3_kl chi2_token chi2_seq eff_sample_size_seq log_ppl_abs_diff log_ppl_abs_diff_sum ppl_ratio"
    weights = "mean std max min eff_sample_size oob_ratio"
    want = {f"rollout_corr/{name}" for name in rollout.split()}
    want |= {f"rollout_corr/rollout_is_{name}" for name in weights.split()}
    want |= {"rollout_corr/rollout_rs_masked_fraction", "rollout_corr/rollout_rs_seq_masked_fraction"}
    want |= {f"training/rollout_probs_diff_{name}" for name in ("mean", "max", "std")}
    want |= {"training/rollout_actor_probs_pearson_corr", "mismatch/rho_std", "mismatch/rho_max", "mismatch/pcc"}
    want |= {f"actor/{name}" for name in ("pg_loss", "pg_clipfrac", "pg_clipfrac_lower", "ppo_kl", "entropy")}
    want |= {"hacking/J", "hacking/cov_x_inv_rho"}
    assert want <= set(metrics)
    assert metrics["actor/entropy"] == rounded(0.7)


@pytest.mark.parametrize("term", TERMS, ids=str)
def test_actor_metrics(term):
    batch, name = random_batch(4), term["name"]
    inputs, _ = padded(batch)
    result = compute_objective(inputs, ObjectiveConfig.model_validate({"policy_term": term}))
    num_tokens = sum(len(s) for s in batch)
    values = [term_values(s, term) for s in batch]
    metrics = result.metrics
    assert metrics["actor/pg_loss"] == result.loss.item()
    assert metrics["actor/ppo_kl"] == rounded(sum(q - p for s in batch for p, q in zip(s.pi, s.po)) / num_tokens)
    if name in ("reinforce", "sapo", "vespo"):
        assert "actor/pg_clipfrac" not in metrics, "a term that clips nothing has no clip fraction"
    else:
        clipped = sum(sum(clipped) for _, _, clipped, _ in values)
        assert metrics["actor/pg_clipfrac"] == rounded(clipped / num_tokens)
    if name in ("ppo_clip", "fipo"):
        assert metrics.get("actor/pg_clipfrac_lower", 0) == sum(sum(lower) for *_, lower in values) / num_tokens


def test_without_inference_logprobs_no_mismatch_is_claimed():
    inputs, _ = padded(random_batch(5))
    inputs = replace(inputs, inference_logprobs=None)
    names = set(compute_objective(inputs, ObjectiveConfig()).metrics)
    assert not any(name.startswith(("mismatch/", "rollout_corr/", "training/")) for name in names)


def test_small_differences_keep_their_digits_in_float32():
    """Engines that agree to 1e-3 on confident tokens: plain float32 formulas lose k3, rho_std and the correlation."""
    generator = torch.Generator().manual_seed(0)
    log_po = -(10 ** (-4 * torch.rand(64, 500, generator=generator) - 1))
    log_mu = log_po - GAP * log_po * torch.randn(64, 500, generator=generator)
    mask = torch.ones_like(log_po, dtype=torch.bool)
    measured = mismatch_metrics(log_po, log_mu, mask)
    po, mu = log_po.double(), log_mu.double()
    difference = po - mu  # exact in float32 too: the two lie within a factor of two (Sterbenz)
    rho = difference.expm1()
    one_function = gamma(9, torch.float32)  # expm1 to 4 units of the last place, and one rounding
    k3, bound = (rho - difference).mean().item(), one_function * difference.abs().mean().item()
    assert abs(measured["rollout_corr/k3_kl"] - k3) <= bound
    naive = log_po - log_mu
    assert abs((naive.exp() - 1 - naive).double().mean().item() - k3) > bound
    assert measured["mismatch/rho_std"] == pytest.approx(rho.std().item(), rel=one_function, abs=0)
    # 1 - pcc is half the variance of differences, GAP of the probabilities 1 - po, each rounded once to float32.
    exact = np.corrcoef(-po.expm1().flatten().numpy(), -mu.expm1().flatten().numpy())[0, 1]
    bound = 2 * 2 * one_function / GAP * (1 - exact)
    assert abs(exact - measured["mismatch/pcc"]) <= bound
    naive = log_po.exp().flatten(), log_mu.exp().flatten()
    assert abs(exact - torch.corrcoef(torch.stack(naive))[0, 1].item()) > bound


def test_equal_engines_have_exactly_zero_mismatch():
    log_po = -torch.rand(8, 9, generator=torch.Generator().manual_seed(0)) - 0.01
    measured = mismatch_metrics(log_po, log_po.clone(), torch.ones(8, 9, dtype=torch.bool))
    zero = [name for name, value in measured.items() if value == 0.0 and "count" not in name]
    assert {"rollout_corr/kl", "rollout_corr/k3_kl", "rollout_corr/chi2_seq", "mismatch/rho_std"} <= set(zero)
    assert measured["mismatch/rho_max"] == measured["rollout_corr/ppl_ratio"] == 1.0
    assert measured["mismatch/pcc"] == rounded(1.0)


@pytest.mark.parametrize("term", POLICY_TERMS)
@pytest.mark.parametrize("form", [padded, packed])
def test_nothing_reads_a_value_before_the_metrics_do(term, form):
    """Under fake tensors any operation whose result decides Python's path (item, nonzero, bool) raises: on a GPU each
    would wait for the device."""
    corrections = [{"mode": "reject", "upper": 0.1}, {"mode": "veto"}, {"mode": "opsm"}]
    if term not in ("minirl", "dppo", "drpo", "vespo"):
        corrections += [{"mode": "icepop"}]
    config = ObjectiveConfig.model_validate(
        {
            "policy_term": term,
            "correction": corrections,
            "aggregation": "seq-mean-token-mean",
            "distortion": {"delta": 2.0},
            "variance": {"sigma": 0.2},
            "mismatch_detail": True,
        }
    )
    real, _ = form(random_batch(6))
    tensors = {k: v.detach() for k, v in vars(real).items() if v is not None}
    with FakeTensorMode() as mode:
        inputs = ObjectiveInputs(**{k: mode.from_tensor(v) for k, v in tensors.items()})
        inputs.current_logprobs.requires_grad_()
        result = compute_objective(inputs, config, compute_denominators(inputs, config), NoiseKey(1, 2))
        result.loss.backward()
        with pytest.raises(DataDependentOutputException):
            result.loss.item()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("term", POLICY_TERMS)
def test_a_gpu_is_never_waited_for_and_agrees_with_the_cpu(term):
    config = ObjectiveConfig.model_validate({"policy_term": term, "variance": {"sigma": 0.2}, "mismatch_detail": True})
    real, mask = packed(random_batch(7))
    want = compute_objective(real, config, noise_key=(1, 2))
    inputs = ObjectiveInputs(**{k: v.detach().cuda() for k, v in vars(real).items() if v is not None})
    inputs.current_logprobs.requires_grad_()
    torch.cuda.set_sync_debug_mode("error")
    try:
        counts = compute_denominators(inputs, config)
        result = compute_objective(inputs, config, counts, noise_key=(1, 2))
        result.loss.backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    (gradient,) = torch.autograd.grad(want.loss, real.current_logprobs)
    assert_rounded(inputs.current_logprobs.grad.cpu()[mask], gradient[mask], BATCH)
    assert result.metrics == rounded(want.metrics, BATCH)


DETAIL = ObjectiveConfig.model_validate({"mismatch_detail": True, "prob_bands": [0.1, 0.5]})

ROUNDING = CLOSED_FORM * unit_roundoff()  # of a logarithm around 0

BANDS = {"0-0.1": (0.0, 0.1), "0.1-0.5": (0.1, 0.5), "0.5-1": (0.5, 1.0)}


@pytest.fixture(scope="module")
def batch():
    return random_batch(3, num_sequences=40)


def reference(batch) -> dict[str, float]:
    po, mu = (np.array([x for s in batch for x in getattr(s, name)]) for name in ("po", "mu"))
    d, rho = po - mu, np.exp(po - mu)
    metrics = {
        "mismatch/prob_diff_max": (np.exp(po) - np.exp(mu)).max(),
        "mismatch/prob_diff_min": (np.exp(po) - np.exp(mu)).min(),
        "mismatch/total_variation": np.abs(rho - 1).mean() / 2,
        "mismatch/log_rho_std": d.std(ddof=1),
        "mismatch/abs_log_rho_sum": np.abs(d).sum() / sum(len(s) > 0 for s in batch),
    }
    for label, (low, high) in BANDS.items():
        inside = (np.exp(po) >= low) & (np.exp(po) < high)
        metrics[f"mismatch/rho_std/{label}"] = rho[inside].std(ddof=1)
    for name, values in (("mu", mu), ("po", po)):
        counts, _ = np.histogram(np.exp(values), 20, (0, 1))
        for i, count in enumerate(counts):
            metrics[f"mismatch/{name}_share/{i / 20:g}-{(i + 1) / 20:g}"] = count / len(values)
    position = np.concatenate([np.arange(len(s)) for s in batch])
    lengths = np.array([len(s) for s in batch])
    sums = np.array([abs(np.sum(np.subtract(s.po, s.mu))) for s in batch])
    for i, label in enumerate(place_labels()):
        here = np.digitize(position, PLACE_EDGES) == i
        of_length = (np.digitize(lengths, PLACE_EDGES) == i) & (lengths > 0)
        if here.any():
            metrics[f"mismatch/abs_log_rho/position/{label}"] = np.abs(d[here]).mean()
        if of_length.any():
            metrics[f"mismatch/log_ppl_abs_diff_sum/length/{label}"] = sums[of_length].mean()
            bound = 2 * metrics["mismatch/total_variation"] * (lengths[of_length] ** 2).mean()
            metrics[f"mismatch/gradient_bound/length/{label}"] = bound
    return metrics


@pytest.mark.parametrize("form", [padded, packed])
def test_every_figure_is_its_formula(batch, form):
    inputs, _ = form(batch)
    detailed, plain = (compute_objective(inputs, config).metrics for config in (DETAIL, ObjectiveConfig()))
    want = reference(batch)
    assert {name: detailed[name] for name in want} == rounded(want, BATCH)
    quantiles = {name for name in detailed if "/rho_q" in name}
    assert set(detailed) - set(want) - quantiles <= set(plain) | {
        f"mismatch/rho_{kind}/{label}" for kind in ("mean", "count") for label in BANDS
    }, "nothing else"


@pytest.mark.parametrize("form", [padded, packed])
def test_quantiles_lie_in_the_bin_of_the_exact_ones(batch, form):
    inputs, _ = form(batch)
    measured = compute_objective(inputs, DETAIL).metrics
    po, mu = (np.array([x for s in batch for x in getattr(s, name)]) for name in ("po", "mu"))
    edges = np.array([-20.0, *log_rho_edges(), 20.0])
    for label, (low, high) in BANDS.items():
        log_rho = np.sort((po - mu)[(np.exp(po) >= low) & (np.exp(po) < high)])
        for share in (0.05, 0.5, 0.95):
            exact = log_rho[int(np.ceil(share * len(log_rho))) - 1]
            bin_of = np.digitize(exact, edges)
            interpolated = np.log(measured[f"mismatch/rho_q{100 * share:02.0f}/{label}"])
            assert edges[bin_of - 1] - ROUNDING <= interpolated <= edges[bin_of] + ROUNDING


def test_parts_of_a_minibatch_add_up(batch):
    inputs, _ = padded(batch)
    whole = compute_objective(inputs, DETAIL)
    counts = compute_denominators(inputs, DETAIL)

    def part(rows: slice) -> MetricStats:
        tensors = {k: None if v is None else v[rows] for k, v in vars(inputs).items()}
        return compute_objective(ObjectiveInputs(**tensors), DETAIL, counts).stats

    merged = finalize_metrics(MetricStats.merge([part(slice(0, 13)), part(slice(13, 40))]))
    assert merged == rounded(whole.metrics, BATCH)


def test_it_is_off_unless_asked_for(batch):
    inputs, _ = padded(batch)
    names = set(compute_objective(inputs, ObjectiveConfig()).metrics)
    assert not any("position" in name or "length/" in name or "_q05" in name or "share" in name for name in names)


NAMES = ("share", "log_rho_mean", "log_rho_std", "k3")


def aged_batch(seed: int, lengths: list[int], distances: bool = True) -> ObjectiveInputs:
    random, total = np.random.default_rng(seed), sum(lengths)
    logprobs = torch.from_numpy(-random.random((2, total)) - 0.1)
    return ObjectiveInputs(
        current_logprobs=logprobs[0].requires_grad_(),
        old_logprobs=logprobs[0].detach() + 0.01,
        inference_logprobs=logprobs[1],
        advantages=torch.ones(len(lengths), dtype=torch.float64),
        loss_mask=torch.from_numpy(random.random(total) < 0.8),
        cu_seqlens=torch.tensor([0, *lengths]).cumsum(0),
        distances=torch.from_numpy(random.choice([0, 1, 2, 4, 17, 300], total)) if distances else None,
    )


def metrics(parts: list[ObjectiveInputs]) -> dict[str, float]:
    config = ObjectiveConfig(max_response_length=64)
    return finalize_metrics(MetricStats.merge([compute_objective(part, config).stats for part in parts]))


def test_labels():
    assert LABELS == ["0", "1", "2", "3-4", "5-8", "9-16", "17-"]


def test_each_age_has_the_moments_of_its_tokens_over_any_split():
    parts = [aged_batch(0, [30, 50]), aged_batch(1, [64, 3])]
    measured = metrics(parts)
    mask = torch.cat([part.loss_mask for part in parts])
    distance = torch.cat([part.distances for part in parts])[mask].numpy()
    log_rho = torch.cat([part.old_logprobs - part.inference_logprobs for part in parts])[mask].numpy()
    for label, low, high in zip(LABELS, EDGES, [*EDGES[1:], np.inf]):
        here = log_rho[(low <= distance) & (distance < high)]
        names = {name for name in NAMES if f"mismatch/{name}/distance/{label}" in measured}
        assert names == (set(NAMES) if len(here) else set())
        if len(here):
            k3 = np.exp(here) - 1 - here
            plain = (len(here) / len(log_rho), here.mean(), here.std(ddof=1), k3.mean())
            for name, expected in zip(NAMES, plain, strict=True):
                assert measured[f"mismatch/{name}/distance/{label}"] == rounded(expected, 8 * len(log_rho))


@pytest.mark.parametrize("seed", [0, 1])
def test_without_ages_everything_else_is_the_same(seed):
    with_them, without = (metrics([aged_batch(seed, [30, 50], known)]) for known in (True, False))
    assert {name: value for name, value in with_them.items() if "/distance/" not in name} == without
