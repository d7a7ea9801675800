"""What must be equal bit for bit, or to rounding, on every processor: run under several of them by `make test-isa`.

One rank, in this process; tests/parallel and tests/e2e hold the same properties on every layout.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megatron_rl.learner.learner import Learner
from megatron_rl.learner.process_groups import shutdown
from tests.parallel.programs.exact import bits_over_batches, update_with_gate
from tests.parallel.programs.learner import load_and_continue, save_after
from tests.support.plain_training import float32_limits, run
from tests.support.tiny import stored_rollouts, tiny_recipe


@pytest.fixture(autouse=True)
def _leave_no_process_group():
    yield
    shutdown()


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_exact_mode_has_the_bits_of_the_update(dtype):
    found = bits_over_batches(dtype, {}, [1, 16])
    assert set(found["differing"].values()) == {0}, found["differing"]


def test_exact_mode_has_a_gate_of_zero_in_updates():
    assert update_with_gate("bf16", {}, 2) == [0.0] * 6


def test_a_resumed_run_has_the_bits_of_the_whole_one(tmp_path):
    whole = save_after(str(tmp_path), 2)
    shutdown()
    resumed = load_and_continue(whole["path"])
    assert (resumed["logprobs"] == whole["logprobs"]).all()
    assert [m["actor/grad_norm"] for m in resumed["metrics"]] == [m["actor/grad_norm"] for m in whole["metrics"]]
    for name, tensor in whole["weights"].items():
        assert torch.equal(resumed["weights"][name], tensor), name


def test_log_probs_and_the_first_gradient_are_those_of_the_plain_model():
    learner, plain, limits = Learner(tiny_recipe()), run(torch.float64, 1), float32_limits(1)
    found = np.concatenate(learner.compute_logprobs(stored_rollouts(100)))
    assert np.abs(found - plain.before).max() <= limits.logprobs
    norm = learner.update(stored_rollouts(0))["actor/grad_norm"]
    assert abs(norm - np.linalg.norm(plain.gradients[0])) <= limits.gradients[0]
