"""Delta nets in a plan against numbers that are written out here."""

from __future__ import annotations

import pytest

from megatron_rl.config.learner import LoraConfig, ParallelConfig
from megatron_rl.instruments.plan import delta_net
from megatron_rl.instruments.plan.generation import EngineMemory, flops_forward
from megatron_rl.instruments.plan.learner import (
    Activations,
    active_parameters,
    adapter_parameters,
    stage_parameters,
    total_parameters,
)
from megatron_rl.model.architecture import KNOWN_MODELS, architecture_from

NEXT, SMALL = (architecture_from(KNOWN_MODELS[name]) for name in ("Qwen3-Next-80B-A3B-Instruct", "Qwen3.5-35B-A3B"))


@pytest.mark.parametrize(("a", "billions", "active"), [(NEXT, 79.7, 3.6), (SMALL, 34.7, 2.9)])
def test_parameters_are_those_that_the_names_say(a, billions, active):
    whole = total_parameters(a)
    assert (round(whole / 1e9, 1), round(active_parameters(a) / 1e9, 1)) == (billions, active)
    stages = stage_parameters(a, ParallelConfig(pipeline=4))
    assert [sum(getattr(s, kind) for s in stages) for kind in ("layers", "linear_layers")] == [
        a.num_layers,
        3 * a.num_layers // 4,
    ]
    assert sum(stage.total for stage in stages) == whole
    halves = stage_parameters(a, ParallelConfig(tensor=2))[0].dense
    whole_on_each = a.num_layers * (a.hidden_size * (2 + a.num_experts + 1) + 256) + a.hidden_size
    norms = delta_net.layers(a) * (256 - 128) + (a.num_layers - delta_net.layers(a)) * (256 - 512)
    assert 2 * halves - stage_parameters(a, ParallelConfig())[0].dense == whole_on_each - norms


def test_a_state_is_of_a_sequence_and_in_fp32():
    """36 layers: three inputs of the convolution, of 2 · 16 · 128 + 32 · 128 numbers, and 32 matrices of 128 × 128."""
    for b, tp in ((2, 1), (2, 2), (4, 1)):
        assert delta_net.sequence_bytes(NEXT, b, tp) == 36 * (3 * 8192 * b + 32 * 128 * 128 * 4) / tp
    engine = EngineMemory(0, 0, 0, cache=1000.0, token_bytes=1.0, longest=50, sequence_bytes=150.0)
    assert (engine.tokens, engine.sequences(50)) == (1000, 5.0)


def test_operations_grow_with_tokens_not_with_length():
    """Of a head and a token, C = 64, K = V = 128: k·kᵀ and q·kᵀ, the solved system, values of the chunk, and three
    products with the state."""
    head = 2 * 2 * 64 * 128 + 64 * (128 + 128) + 2 * 64 * 128 + 3 * 2 * 128 * 128
    assert delta_net.flops(NEXT) == 36 * 32 * head
    first, second = (flops_forward(NEXT, 1.0, length) for length in (1000.0, 2000.0))
    assert second - first == 12 * 2 * 16 * 256 * 1000.0
    assert first == 2 * active_parameters(NEXT) + delta_net.flops(NEXT) + second - first


def test_what_a_layer_keeps_and_what_its_adapters_have():
    """In bf16: 12,352 columns of the projection; convolution 8,192 in and out; 32 queries and keys of 128; 4,096 values
    before and behind the gate; 64 numbers of each head's system; three fp32 numbers a head."""
    kept = delta_net.activations(NEXT, 2)
    assert kept == 2 * (12352 + 2 * 8192 + 2 * 32 * 128 + 2 * 4096 + 32 * 64) + 3 * 4 * 32
    layer = Activations(NEXT, ParallelConfig(), "bf16", 100)
    assert layer.delta_net() + layer.attention() == layer._norm() + 100 * kept
    stage = stage_parameters(NEXT, ParallelConfig())[0]
    dense, _ = adapter_parameters(NEXT, LoraConfig(rank=1), ParallelConfig(), stage)
    attention, net = 2 * 2048 + 3 * 4096 + 2 * 512, 2 * 2048 + 12352 + 4096
    assert dense == 12 * attention + 36 * net + 48 * (2 * 2048 + 3 * 512)


def test_other_models_have_none():
    a = architecture_from(KNOWN_MODELS["Qwen3-30B-A3B"])
    assert (delta_net.layers(a), delta_net.flops(a), delta_net.sequence_bytes(a, 2, 1)) == (0, 0.0, 0.0)
