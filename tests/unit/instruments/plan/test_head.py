"""The planner's peak in the output layer against what the functions that run there really take."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from megatron_rl.config.learner import ParallelConfig
from megatron_rl.instruments.plan.learner import Activations
from megatron_rl.learner.logprobs import head_logprobs, token_logprobs
from megatron_rl.model.architecture import read_architecture
from tests.support.tiny import MODEL
from tools.dev.measure_memory import peak_bytes

TOKENS, WIDTH, VOCABULARY = 1024, 64, 8192
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def measured_peak(dtype: str, fused: bool) -> int:
    """Bytes above the inputs during the forward and the backward pass."""
    hidden = torch.randn(TOKENS, WIDTH, dtype=DTYPES[dtype], requires_grad=True)
    weight = torch.randn(VOCABULARY, WIDTH, dtype=DTYPES[dtype], requires_grad=True)
    positions, labels = torch.arange(TOKENS), torch.randint(0, VOCABULARY - 5, (TOKENS,))
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        if fused:
            logprobs, _ = head_logprobs(
                hidden, weight, positions, labels, vocab_size=VOCABULARY - 5
            )  # padded, as under tensor parallelism
        else:
            logprobs, _ = token_logprobs(
                hidden @ weight.t(), positions, labels, vocab_size=VOCABULARY - 5
            )  # padded, as under tensor parallelism
        logprobs.sum().backward()
    return peak_bytes(profiler)


def test_the_pages_of_a_mapped_file_are_not_allocated(tmp_path):
    file = tmp_path / "weights"
    file.write_bytes(bytes(1 << 20))
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        mapped = torch.from_file(str(file), size=1 << 18)
        made = torch.empty(1000)
    assert peak_bytes(profiler) == mapped.nbytes + made.nbytes
    assert peak_bytes(profiler, {file.stat().st_size}) == made.nbytes


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_peak_in_the_output_layer_is_the_one_that_is_planned(dtype, fused):
    architecture = replace(
        read_architecture(MODEL), hidden_size=WIDTH, vocab_size=VOCABULARY - 5
    )  # padded, as under tensor parallelism
    planned = Activations(architecture, ParallelConfig(), dtype, TOKENS, fused_head=fused).head_peak()
    # The plan leaves out what has one number a token or a column, and not the whole table of logits.
    assert measured_peak(dtype, fused) == pytest.approx(planned, rel=0.01)
