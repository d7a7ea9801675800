"""What must be equal bit for bit, or to rounding, on every processor: run under several of them by `make test-isa`.

One rank in this process, and one layout of two; tests/parallel and tests/e2e hold the same properties on every layout.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_rl.learner.learner import Learner
from megatron_rl.learner.process_groups import shutdown
from tests.parallel.gloo import run_ranks
from tests.parallel.programs.exact import bits_over_batches, update_with_gate
from tests.parallel.programs.learner import load_and_continue, save_after
from tests.support.plain_training import float32_limits, run
from tests.support.tiny import stored_rollouts, tiny_recipe


@pytest.fixture(autouse=True)
def _leave_no_process_group():
    yield
    shutdown()


CAPABILITIES = {"default": "DEFAULT", "avx2": "AVX2", "avx512": "AVX512"}  # as one asks for it, as torch names it
BUILDS = {"DEFAULT": "AVX2", "AVX2": "AVX2", "AVX512": "AVX512"}  # of vLLM's kernels, for a processor with no more


def vllm_builds() -> list[str]:
    """Names of the builds of vLLM's kernels in this process."""
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    return sorted(set(re.findall(r"/vllm/_C_?(\w*)\.abi3\.so", Path("/proc/self/maps").read_text())))


one_thread = pytest.mark.skipif(os.environ.get("OMP_NUM_THREADS") == "2", reason="ranks have one thread in any case")


@one_thread
def test_the_setting_is_in_force_here_and_in_ranks():
    here = torch.backends.cpu.get_cpu_capability()
    asked = CAPABILITIES.get(os.environ.get("ATEN_CPU_CAPABILITY", ""), here)
    assert [here] == run_ranks("torch.backends.cpu", "get_cpu_capability", 1) == [asked]
    if "older_processor" in os.environ.get("PYTEST_PLUGINS", ""):
        assert vllm_builds() == run_ranks(__name__, "vllm_builds", 1)[0] == [BUILDS[asked]]
    deterministic = "tests.support.deterministic" in os.environ.get("PYTEST_PLUGINS", "")
    assert run_ranks("torch", "are_deterministic_algorithms_enabled", 1) == [deterministic]
    assert torch.are_deterministic_algorithms_enabled() == deterministic


def test_the_number_of_threads_is_that_of_the_setting():
    assert torch.get_num_threads() == int(os.environ.get("OMP_NUM_THREADS", torch.get_num_threads()))


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_exact_mode_has_the_bits_of_the_update(dtype):
    bits = bits_over_batches(dtype, {}, [1, 16])
    assert set(bits["differing"].values()) == {0}, bits["differing"]


@one_thread
def test_exact_mode_has_the_bits_of_the_update_on_two_ranks():
    program, arguments = "tests.parallel.programs.exact", {"dtype": "bf16", "parallel": {"tensor": 2}, "sizes": [3]}
    for of_rank in run_ranks(program, "bits_over_batches", 2, init_process_group=False, **arguments):
        assert set(of_rank["differing"].values()) == {0}, of_rank["differing"]


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
    logprobs = np.concatenate(learner.compute_logprobs(stored_rollouts(100)))
    assert np.abs(logprobs - plain.before).max() <= limits.logprobs
    norm = learner.update(stored_rollouts(0))["actor/grad_norm"]
    assert abs(norm - np.linalg.norm(plain.gradients[0])) <= limits.gradients[0]
