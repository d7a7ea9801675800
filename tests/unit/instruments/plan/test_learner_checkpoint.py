"""What `plan` says of a checkpoint."""

from __future__ import annotations

import pytest

from megatron_rl.instruments.plan.hardware import HASH, HOST_LINK
from megatron_rl.instruments.plan.learner import checkpoint_cost, total_parameters
from tests.unit.instruments.plan.test_report import DENSE, MOE, work


@pytest.mark.parametrize("layout", ["{tensor: 1}", "{tensor: 4, expert: 8}", "{tensor: 2, expert: 4, pipeline: 2}"])
def test_shares_add_up_to_the_model(layout):
    """2 bytes of a bf16 weight, 12 of its optimizer. What tensor-parallel ranks hold alike is counted on each: norms,
    and the router."""
    planned = work(MOE, "h100-80", f"learner.parallel={layout}")
    a, tensor = planned.architecture, planned.parallel.tensor
    alike = (tensor - 1) * a.num_layers * a.hidden_size * (a.num_experts + 3)
    total = 14 * total_parameters(a)
    size = checkpoint_cost(planned).size * planned.ranks
    if planned.parallel.pipeline == 1:
        assert total <= size <= total + 14 * alike
    else:  # the stage that has most
        assert total < size < 1.1 * total


def test_fp32_weights_are_their_own_masters_and_written_as_both():
    bf16, fp32 = (checkpoint_cost(work(DENSE, "h100-80", f"learner.dtype={d}")).size for d in ("bf16", "fp32"))
    assert fp32 / bf16 == 16 / 14


def test_beside_training_the_copy_comes_first():
    at_once = checkpoint_cost(work(), disk=1e9)
    beside = checkpoint_cost(work(MOE, "h100-80", "checkpoint.async_save=true"), disk=1e9)
    assert beside.size == at_once.size
    assert at_once.written_s == 8 * at_once.size / 1e9 + at_once.size / HASH
    assert beside.written_s == beside.size / (HOST_LINK * work().gpu.host_link) + at_once.written_s
    assert (at_once.host, beside.host) == (at_once.size / 2, 2 * beside.size)
