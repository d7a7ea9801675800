"""`plan` of rounded rollouts: bytes of weights and cache, and what a decoding step reads, against closed forms."""

from __future__ import annotations

import pytest

from megatron_rl.config import load_recipe
from megatron_rl.errors import InputError
from megatron_rl.instruments.plan import GPUS, make_workload
from megatron_rl.instruments.plan.generation import Decoding, engine_memory
from megatron_rl.instruments.plan.hardware import (
    DECODE_BANDWIDTH,
    DECODE_EXCHANGE_S,
    DECODE_LAYER_S,
    ROUNDED_LAYER_S,
    SAMPLED_S,
)
from megatron_rl.instruments.plan.workload import Workload
from megatron_rl.model.architecture import shape_of
from tests.support.rounding import rounded
from tests.support.tiny import REPOSITORY

RECIPE = REPOSITORY / "recipes" / "quantized" / "grpo-qwen3-30b-a3b-4n8g-tp4ep8-fp8.yaml"
LAYERS, HIDDEN, HEADS, KV_HEADS, WIDTH, EXPERTS, EXPERT_WIDTH, VOCABULARY = 48, 2048, 32, 4, 128, 128, 768, 151936
ATTENTION = LAYERS * (2 * HEADS + 2 * KV_HEADS) * WIDTH * HIDDEN
EXPERT = 3 * HIDDEN * EXPERT_WIDTH
NORMS = LAYERS * (2 * HIDDEN + 2 * WIDTH) + HIDDEN
KEPT = 2 * VOCABULARY * HIDDEN + LAYERS * HIDDEN * EXPERTS  # tables and routers
ROUNDED = ATTENTION + LAYERS * EXPERTS * EXPERT + NORMS
BY_BLOCK = 1 + 4 / 128**2  # bytes of a code and its share of a scale


def work(*overrides: str) -> Workload:
    recipe = load_recipe(RECIPE, list(overrides))
    return make_workload(recipe, shape_of(recipe.model.path)[0], GPUS["h100-80"])


def engine(w: Workload):
    return engine_memory(w.recipe, w.architecture, w.gpu, 0.7)


@pytest.mark.parametrize(
    ("quantization", "size"), [("null", 2), ("fp8", BY_BLOCK), ("{weights: fp8, block: [1, null]}", 1)]
)
def test_weights_in_memory_and_read_in_a_step(quantization, size):
    w = work(f"rollout.quantization={quantization}")
    whole = KEPT * 2 + ROUNDED * size
    sizes = engine(w)
    assert sizes.weights == rounded(whole / 2)  # engines of two GPUs
    decoding = Decoding.of(w, sizes)
    bandwidth = DECODE_BANDWIDTH * 3.35e12
    layer = DECODE_LAYER_S["hopper"] + DECODE_EXCHANGE_S["hopper"] + ROUNDED_LAYER_S * (quantization != "null")
    idle = LAYERS * (EXPERTS - 8) * EXPERT * size
    expected = LAYERS * layer + (whole - idle) / 2 / bandwidth + SAMPLED_S
    assert decoding.step(1, 0) == rounded(expected)
    many = LAYERS * layer + (whole / 2 + 4e6 * sizes.token_bytes) / bandwidth + 2000 * SAMPLED_S
    assert decoding.step(2000, 4e6) == rounded(many)


def test_a_cache_in_fp8_holds_twice_the_tokens():
    plain, small = (engine(work(f"rollout.quantization.kv_cache={kind}")) for kind in ("null", "fp8"))
    assert plain.token_bytes == 2 * LAYERS * (KV_HEADS // 2) * WIDTH * 2
    assert small.token_bytes == plain.token_bytes / 2
    assert small.cache == plain.cache
    assert small.tokens // 2 == plain.tokens


def test_what_gpus_cannot_round_is_not_planned():
    with pytest.raises(InputError, match=r"rollout\.quantization\.weights: int4 on CUDA"):
        work("rollout.quantization=int4")
    with pytest.raises(InputError, match=r"rollout\.tensor_parallel: 4 leaves experts of 2048 × 192"):
        work("rollout.tensor_parallel=4")
    work("rollout.tensor_parallel=4", "rollout.quantization.block=[1, null]")
