"""The section rollout: settings that contradict each other, and quantized types."""

import pytest
from pydantic import ValidationError

from megatron_rl.config.rollout import RolloutConfig
from megatron_rl.errors import InputError
from megatron_rl.run.prepare import check_recipe
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
    ("rollout", "message"),
    [
        ({"sampled_head": 1025}, "at most 1024 are returned"),
        ({"function": "f.py:f"}, "conversations carry no heads; use function: null"),
        ({"top_k": 8, "kept_sets": True}, "whose head is the set that top_k: 8 keeps; use sampled_head: 8"),
        ({"top_k": 8}, "cut the tail off mu but not off pi; use top_p: 1"),
        ({"top_p": 0.9}, "or kept_sets: true"),
    ],
)
def test_heads_that_nobody_returns_are_refused(rollout, message):
    with pytest.raises(ValidationError, match=message):
        RolloutConfig.model_validate({"sampled_head": 32, **rollout})


def test_a_head_is_asked_for_where_scores_are_centred():
    centred = {"policy_term": "reinforce", "score_centering": True}
    check_recipe(tiny_recipe(objective=centred, rollout={"sampled_head": 32}))
    kept = {"top_k": 8, "kept_sets": True}
    check_recipe(tiny_recipe(objective=centred, rollout={"sampled_head": 8, **kept}))
    for rollout, wanted in (({}, 128), (kept, 8)):
        with pytest.raises(ValidationError, match=f"rollout.sampled_head is 0; set it to {wanted}"):
            tiny_recipe(objective=centred, rollout=rollout)
    with pytest.raises(ValidationError, match="nothing reads the head"):
        tiny_recipe(rollout={"sampled_head": 32})
    with pytest.raises(InputError, match=r"rollout.sampled_head: 129, but the model has 128 tokens"):
        check_recipe(tiny_recipe(objective=centred, rollout={"sampled_head": 129}))


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
