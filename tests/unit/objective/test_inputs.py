"""Inputs of the objective: what does not fit is refused by name."""

import pytest
import torch

from megatron_rl.config import ObjectiveConfig
from megatron_rl.errors import InputError
from megatron_rl.objective import ObjectiveInputs, compute_objective
from tests.unit.objective.batches import worked

pytestmark = pytest.mark.filterwarnings("ignore::megatron_rl.config.objective.ObjectiveWarning")


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"inference_logprobs": None}, "correction mode tis"),
        ({"old_logprobs": torch.zeros(2, 2)}, "old_logprobs"),
        ({"loss_mask": torch.ones(3, dtype=torch.bool)}, "loss_mask"),
        ({"advantages": torch.zeros(5)}, "advantages"),
        ({"sequence_ids": torch.zeros(3)}, "sequence_ids"),
        ({"cu_seqlens": torch.tensor([0, 4])}, "current_logprobs"),
        ({"current_logprobs": torch.zeros(12)}, "current_logprobs"),
    ],
)
def test_inputs_that_do_not_fit_are_refused_by_name(changes, named):
    tensor = torch.zeros(3, 4)
    inputs = {
        "current_logprobs": tensor,
        "old_logprobs": tensor,
        "inference_logprobs": tensor,
        "advantages": torch.zeros(3),
        "loss_mask": tensor.bool(),
    }
    config = ObjectiveConfig.model_validate({"correction": [{"mode": "tis"}]})
    with pytest.raises(InputError, match=named):
        compute_objective(ObjectiveInputs(**{**inputs, **changes}), config)


@pytest.mark.parametrize(("old", "kl"), [(-1.5, 0.5), (None, 0.0)])
def test_the_ratio_is_to_the_old_policy_and_1_where_there_is_none(old, kl):
    current = torch.full((1, 2), -2.0, dtype=torch.float64)
    given = None if old is None else torch.full_like(current, old)
    assert compute_objective(worked(current, given, None), ObjectiveConfig()).metrics["actor/ppo_kl"] == kl
