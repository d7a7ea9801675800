"""Frequencies of the rotary embedding in float64 against those that transformers computes in fp32."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from megatron_rl.instruments.parity.arithmetic import FP32, rotation_of
from tests.support.rounding import rounded

WIDTH, LONGEST = 16, 16384
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
CASES = {
    "llama3": (
        1e4,
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 4096,
        },
    ),
    "yarn": (1e4, YARN),
    "yarn, a line beyond the last frequency": (10.0, {**YARN, "beta_fast": 256}),
    "yarn, a line from the first": (1e4, {**YARN, "beta_fast": 4000}),
    "yarn, turns": (1e4, {**YARN, "beta_fast": 64, "beta_slow": 4}),
    "yarn, a line of no length": (1e4, {**YARN, "beta_fast": 2.9, "beta_slow": 2.9, "truncate": False}),
    "yarn, not truncated": (1e4, {**YARN, "truncate": False}),
    "yarn, DeepSeek's scales": (1e4, {**YARN, "mscale": 0.7, "mscale_all_dim": 1.0}),
    "yarn, a scale of its own": (1e4, {**YARN, "attention_factor": 1.5}),
}


@pytest.mark.parametrize("name", CASES)
def test_frequencies_and_scale_are_those_of_transformers(name):
    theta, rope = CASES[name]
    config = LlamaConfig(
        hidden_size=WIDTH,
        num_attention_heads=1,
        max_position_embeddings=LONGEST,
        rope_parameters={**rope, "rope_theta": theta},
    )
    theirs, scale = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, device="cpu")
    ours = rotation_of(rope, theta, WIDTH, LONGEST)
    # 16 units of the power (`arithmetic.rotate`), and Llama 3's line: a quotient, a difference and a quotient
    allowed = ours.uncertain + (16 + 8) * FP32
    assert ((theirs.double() - ours.frequencies).abs() <= allowed * ours.frequencies).all()
    assert ours.scale == rounded(scale)
    assert (ours.uncertain <= (8 + 3 * rope["factor"]) * FP32).all()  # found is at least plain / factor


def test_without_a_kind_frequencies_are_powers():
    ours = rotation_of({}, 1e4, WIDTH, LONGEST)
    powers = torch.tensor([1e4 ** (-i / WIDTH) for i in range(0, WIDTH, 2)], dtype=torch.float64)
    assert ours.frequencies.tolist() == rounded(powers.tolist())
    assert (ours.scale, ours.of_scores) == (1.0, 1.0)


def test_scores_have_the_square_of_deepseek_s_scale():
    """mscale of DeepSeek-V3's own code: 0.1 · mscale_all_dim · ln(factor) + 1, squared."""
    ours = rotation_of({**YARN, "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 1.0}, 1e4, WIDTH, LONGEST)
    wanted = (0.1 * math.log(40.0) + 1.0) ** 2
    assert ours.of_scores == rounded(wanted)
    assert ours.scale == 1.0


def test_another_kind_is_none():
    assert rotation_of({"rope_type": "dynamic", "factor": 2.0}, 1e4, WIDTH, LONGEST) is None
