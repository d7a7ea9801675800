"""Metric names and numbers against numpy, numbers close to agreement, and no wait for the device."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from megatron_rl.config import ObjectiveConfig
from megatron_rl.objective import (
    POLICY_TERMS,
    NoiseKey,
    ObjectiveInputs,
    compute_denominators,
    compute_objective,
)
from megatron_rl.objective.metrics import mismatch_metrics
from tests.support.rounding import assert_rounded, gamma, rounded
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
    inputs = type(inputs)(**{**vars(inputs), "entropy": mask.double() * 0.7})
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
    inputs = type(inputs)(**{**vars(inputs), "inference_logprobs": None})
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
    if term not in ("minirl", "dppo", "vespo"):
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
