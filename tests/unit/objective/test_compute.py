"""The objective as a whole: every part against plain loops (reference.py), empty batches, half precision."""

import itertools
import math
from dataclasses import replace

import pytest
import torch

from megatron_rl.config import ObjectiveConfig
from megatron_rl.errors import InputError
from megatron_rl.objective import AGGREGATIONS, POLICY_TERMS, compute_objective
from tests.support.rounding import assert_rounded, rounded
from tests.unit.objective.batches import BATCH, EXTREMES, loss_and_gradient, packed, padded, random_batch
from tests.unit.objective.reference import ANCHORED, CARRY_W, DEFAULTS, TERMS, reference_objective

pytestmark = pytest.mark.filterwarnings("ignore::megatron_rl.config.objective.ObjectiveWarning")


@pytest.mark.parametrize("name", DEFAULTS)
@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"])
def test_everything_masked_is_zero_and_not_nan(name, aggregation):
    inputs, _ = padded(random_batch(1))
    inputs = replace(inputs, loss_mask=torch.zeros_like(inputs.loss_mask))
    config = ObjectiveConfig.model_validate(
        {
            "policy_term": name,
            "aggregation": aggregation,
            "max_response_length": 9,
            "correction": [{"mode": "reject", "upper": 0.1}],
        }
    )
    result = compute_objective(inputs, config)
    loss, gradient = loss_and_gradient(result, inputs, inputs.loss_mask)
    assert loss == 0.0
    assert gradient.numel() == 0
    assert all(math.isfinite(value) for value in result.metrics.values())


@pytest.mark.parametrize("mode", ["mis", "reject"])
def test_everything_rejected_is_zero_and_not_nan(mode):
    entry = {"mode": "mis", "cap": 1e-6} if mode == "mis" else {"mode": "reject", "upper": 1e-30}
    for renormalize in (False, True):
        inputs, mask = padded(random_batch(2))
        config = ObjectiveConfig.model_validate({"correction": [{**entry, "renormalize": renormalize}]})
        result = compute_objective(inputs, config)
        loss, gradient = loss_and_gradient(result, inputs, mask)
        assert loss == 0.0
        assert torch.all(gradient == 0)
        assert result.metrics["rollout_corr/rollout_rs_masked_fraction"] == 1.0


@pytest.mark.parametrize("name", DEFAULTS)
def test_one_update_per_batch_needs_no_old_logprobs(name):
    """old_logprobs = None is po = sg(pi): same loss, gradient and metrics as passing the current ones."""
    inputs, mask = padded(random_batch(3))
    config = ObjectiveConfig.model_validate(
        {"policy_term": name, "correction": [] if name in CARRY_W else [{"mode": "tis"}]}
    )
    without = replace(inputs, old_logprobs=None)
    with_current = replace(inputs, old_logprobs=inputs.current_logprobs.detach())
    results = [compute_objective(x, config) for x in (without, with_current)]
    (loss, gradient), (loss_2, gradient_2) = (
        loss_and_gradient(r, x, mask) for r, x in zip(results, (without, with_current))
    )
    assert loss == loss_2
    assert torch.equal(gradient, gradient_2)
    assert torch.any(gradient != 0)
    assert results[0].metrics == results[1].metrics


def test_needs_old_logprobs():
    def needs(num_updates: int, **config) -> bool:
        return ObjectiveConfig.model_validate(config).needs_old_logprobs(num_updates)

    for name in set(POLICY_TERMS) - set(ANCHORED):
        assert not needs(1, policy_term=name)
        assert needs(2, policy_term=name)
    assert not needs(4, policy_term="reinforce", correction=[{"mode": "is", "level": "sequence"}])
    assert needs(4, policy_term="reinforce", correction=[{"mode": "opsm", "pi_old": "learner"}])
    assert not needs(4, policy_term="reinforce", correction=[{"mode": "opsm"}])
    assert needs(4, policy_term="reinforce", distortion={"delta": 2.0})
    assert needs(1, correction=[{"mode": "mis", "renormalize": True}])
    assert needs(1, correction=[{"mode": "tis", "normalize": True}])
    assert not needs(4, anchor="interpolate", correction=["tis"])
    assert needs(4, anchor="interpolate", correction=[{"mode": "opsm", "pi_old": "learner"}])


@pytest.mark.parametrize("name", CARRY_W)
def test_terms_with_w_ask_for_inference_logprobs(name):
    inputs, _ = padded(random_batch(5))
    inputs = replace(inputs, inference_logprobs=None)
    with pytest.raises(InputError, match=f"policy term {name}"):
        compute_objective(inputs, ObjectiveConfig.model_validate({"policy_term": name}))


def test_half_precision_is_computed_in_float32():
    inputs, mask = padded(random_batch(6), dtype=torch.bfloat16)
    result = compute_objective(inputs, ObjectiveConfig())
    assert result.loss.dtype == torch.float32
    wide = type(inputs)(
        **{
            **vars(inputs),
            **{
                name: getattr(inputs, name).detach().float()
                for name in ("current_logprobs", "old_logprobs", "inference_logprobs", "advantages")
            },
        }
    )
    assert result.loss.item() == compute_objective(wide, ObjectiveConfig()).loss.item()
    (gradient,) = torch.autograd.grad(result.loss, inputs.current_logprobs)
    assert torch.isfinite(gradient[mask]).all()


WEIGHTS = (
    [[{"mode": "is", "level": level}] for level in ("token", "sequence", "geometric")]
    + [
        [{"mode": "tis", "level": level, "cap": cap}]
        for level, cap in (("token", 1.2), ("sequence", 1.5), ("geometric", 1.05))
    ]
    + [
        [{"mode": "mis", "level": "token", "cap": 1.3}],
        [{"mode": "mis", "level": "sequence", "cap": 3.0, "lower": 0.4}],
        [{"mode": "mis", "level": "geometric", "cap": 1.1, "lower": 0.95}],
        [{"mode": "icepop", "lower": 0.8, "upper": 1.3}],
        [{"mode": "icepop"}],
        [{"mode": "tis", "lower": 0.9, "cap": 1.1}],
    ]
)

MASKS = [
    [{"mode": "reject", "statistic": "geometric", "lower": 0.9, "upper": 1.05}],
    [{"mode": "reject", "statistic": "geometric", "lower": 0.97}],
    [{"mode": "reject", "statistic": "seq_mean_k1", "lower": 0.97, "upper": 1.4}],
    [{"mode": "reject", "statistic": "seq_mean_k3", "upper": 0.02}],
    [{"mode": "reject", "statistic": "seq_mean_k3", "lower": 1e-4}],
    [{"mode": "reject", "statistic": "max_k3", "upper": 0.1}],
    [{"mode": "veto", "threshold": 0.7}],
    [{"mode": "veto"}],
    [{"mode": "opsm"}],
    [{"mode": "opsm", "delta": 0.05}],
    [{"mode": "opsm", "delta": 0.05, "pi_old": "learner"}],
    [{"mode": "mask", "lower": 0.8, "upper": 1.2}],
    [{"mode": "mask", "level": "sequence", "lower": 0.5}],
    [{"mode": "mask", "level": "geometric", "upper": 1.02}],
]

CHAINS = [
    [],
    [{"mode": "none"}],
    [{"mode": "tis", "cap": 2.0}, {"mode": "reject", "statistic": "seq_mean_k3", "upper": 0.02}],
    [{"mode": "icepop", "lower": 0.7, "upper": 1.5}, {"mode": "veto", "threshold": 0.5}, {"mode": "opsm"}],
]


def check(config: dict, seed: int, extremes: bool = False, step: int = 0) -> None:
    batch = random_batch(seed, extremes=extremes)
    loss, grads = reference_objective(batch, config, seed=5, step=step)
    gradient = torch.tensor([g for row in grads for g in row], dtype=torch.float64)
    parsed = ObjectiveConfig.model_validate(config)
    for form in (padded, packed):
        inputs, mask = form(batch)
        got_loss, got_gradient = loss_and_gradient(compute_objective(inputs, parsed, noise_key=(5, step)), inputs, mask)
        roundings = EXTREMES if extremes else BATCH
        assert got_loss == rounded(loss, roundings, scale=1 + float(gradient.abs().sum())), form.__name__
        assert_rounded(got_gradient, gradient, roundings)


def test_the_dictionary_and_the_defaults_cover_the_same_terms():
    assert set(POLICY_TERMS) == set(DEFAULTS)


@pytest.mark.parametrize("term", TERMS, ids=str)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("extremes", [False, True])
def test_terms(term, seed, extremes):
    check({"policy_term": term, "aggregation": "seq-mean-token-mean"}, seed, extremes)


@pytest.mark.parametrize(("name", "aggregation"), list(itertools.product(DEFAULTS, AGGREGATIONS)))
def test_aggregations(name, aggregation):
    check({"policy_term": {"name": name}, "aggregation": aggregation, "max_response_length": 17}, seed=11)


@pytest.mark.parametrize("correction", WEIGHTS + MASKS + CHAINS, ids=str)
@pytest.mark.parametrize("name", ["ppo_clip", "reinforce", "gmpo"])
@pytest.mark.parametrize("extremes", [False, True])
def test_corrections(correction, name, extremes):
    for seed in range(2):
        check({"policy_term": {"name": name}, "correction": correction}, seed + 20, extremes)


@pytest.mark.parametrize("correction", MASKS, ids=str)
@pytest.mark.parametrize("name", CARRY_W)
def test_masks_on_terms_that_carry_w(correction, name):
    check({"policy_term": {"name": name}, "correction": correction}, seed=30)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize(
    "correction",
    [
        [{"mode": "mis", "cap": 1.1, "renormalize": True}],
        [{"mode": "reject", "upper": 0.02, "renormalize": True}],
        [{"mode": "icepop", "lower": 0.9, "upper": 1.2}, {"mode": "veto", "threshold": 0.8, "renormalize": True}],
        [{"mode": "tis", "normalize": True}],
        [{"mode": "is", "level": "sequence", "normalize": True}, {"mode": "mask", "upper": 1.1, "renormalize": True}],
        [{"mode": "tis", "level": "geometric", "cap": 1.02, "normalize": True}],
    ],
    ids=str,
)
def test_renormalize(aggregation, correction):
    for seed in range(3):
        check({"correction": correction, "aggregation": aggregation, "max_response_length": 12}, seed + 40)


@pytest.mark.parametrize("name", DEFAULTS)
def test_instruments_multiply_the_clipped_term(name):
    config = {"policy_term": {"name": name}, "distortion": {"delta": 3.0, "low_prob": 0.3}, "variance": {"sigma": 0.2}}
    for step in (0, 7):
        check(config, seed=50, step=step)


def test_zero_distortion_silences_improbable_tokens():
    check({"distortion": {"delta": 0.0}}, seed=51)


@pytest.mark.parametrize("name", DEFAULTS)
def test_advantages_of_single_tokens(name):
    """[B, T] advantages of both signs within one sequence."""
    batch = random_batch(60)
    for i, seq in enumerate(batch):
        seq.a = [0.5 * ((i + t) % 4 - 1) for t in range(len(seq))]
    config = {"policy_term": {"name": name}, "correction": [{"mode": "opsm"}]}
    loss, grads = reference_objective(batch, config)
    for form in (padded, packed):
        inputs, mask = form(batch)
        per_token = torch.full(mask.shape, math.nan, dtype=torch.float64)
        per_token[mask] = torch.tensor([a for s in batch for a in s.a], dtype=torch.float64)
        inputs = replace(inputs, advantages=per_token)
        result = compute_objective(inputs, ObjectiveConfig.model_validate(config))
        got_loss, got_gradient = loss_and_gradient(result, inputs, mask)
        assert got_loss == rounded(loss, BATCH)
        assert_rounded(got_gradient, torch.tensor([g for row in grads for g in row], dtype=torch.float64), BATCH)
