"""The objective as a whole: batches of which nothing is left, inputs that a term needs, half precision."""

from __future__ import annotations

import math

import pytest
import torch

from megatron_rl.config import ObjectiveConfig
from megatron_rl.errors import InputError
from megatron_rl.objective import POLICY_TERMS, compute_objective
from tests.unit.objective.batches import loss_and_gradient, padded, random_batch
from tests.unit.objective.reference import ANCHORED, CARRY_W, DEFAULTS

pytestmark = pytest.mark.filterwarnings("ignore::megatron_rl.config.objective.ObjectiveWarning")


@pytest.mark.parametrize("name", DEFAULTS)
@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"])
def test_everything_masked_is_zero_and_not_nan(name, aggregation):
    inputs, _ = padded(random_batch(1))
    inputs = type(inputs)(**{**vars(inputs), "loss_mask": torch.zeros_like(inputs.loss_mask)})
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
    without = type(inputs)(**{**vars(inputs), "old_logprobs": None})
    with_current = type(inputs)(**{**vars(inputs), "old_logprobs": inputs.current_logprobs.detach()})
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
    inputs = type(inputs)(**{**vars(inputs), "inference_logprobs": None})
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
