"""The section rollout: settings that contradict each other, and quantized types."""

import pytest
from pydantic import ValidationError

from megatron_rl.config.rollout import RolloutConfig
from tests.support.tiny import tiny_recipe


@pytest.mark.parametrize(
    ("rollout", "message"),
    [
        ({"top_p": 0.9}, "kept_sets: true needs top_k of 1 to 1024, found 0"),
        ({"top_k": 1025}, "kept_sets: true needs top_k of 1 to 1024, found 1025"),
        ({"top_k": 5, "engine": "vllm_server"}, "engine vllm_server returns no sets; use engine: vllm"),
    ],
)
def test_sets_that_nobody_returns_are_refused(rollout, message):
    with pytest.raises(ValidationError, match=message):
        RolloutConfig.model_validate({"kept_sets": True, **rollout})


@pytest.mark.parametrize(
    ("written", "kind", "block"),
    [
        (None, None, (128, 128)),
        ("fp8", "fp8", (128, 128)),
        ("int8", "int8", (1, None)),
        ("int4", "int4", (1, 128)),
        ({"weights": "int4", "block": [1, 32]}, "int4", (1, 32)),
        ({"weights": "fp8", "block": [None, None]}, "fp8", (None, None)),
    ],
)
def test_a_type_alone_brings_its_own_block(written, kind, block):
    quantization = tiny_recipe(rollout={"quantization": written}).rollout.quantization
    assert (quantization.weights, quantization.of_weights) == (kind, block)


@pytest.mark.parametrize(
    ("max_staleness", "mode", "weights", "through_files"),
    [
        (1, "finish", "broadcast", False),
        (2, "finish", "broadcast", True),
        (2, "keep", "broadcast", False),
        (1, "keep", "files", True),
    ],
)
def test_weights_that_would_wait_for_batches_go_through_files(max_staleness, mode, weights, through_files):
    """Where the engine finishes batches of which the learner does not wait for one, a broadcast would block."""
    rollout = RolloutConfig.model_validate(
        {
            "engine": "vllm_server",
            "max_staleness": max_staleness,
            "in_flight": {"mode": mode},
            "servers": {"weights": weights},
        }
    )
    assert bool(rollout.why_files) == through_files
