"""`megatron-rl parity` under layouts: parts of ranks are put together, and a shard on the wrong rank is named."""

from __future__ import annotations

import pytest

from megatron_rl.instruments.parity.definition import MOE_FAMILIES
from tests.parallel.pool import Jobs
from tests.support.slow import slow_but
from tools.dev.parity_bench import make_models

MODULE = "tests.parallel.programs.parity"
BOTH = {"tensor": 2, "expert": 2}
CLEAN = [
    ("qwen3_moe", BOTH, "bf16", False),
    ("qwen3_moe", BOTH, "fp32", False),
    ("qwen3_moe", BOTH, "fp16", False),
    ("qwen3_moe", BOTH, "bf16", True),
    ("qwen3_moe", {"expert": 2}, "fp32", False),
    ("qwen3_moe", {"pipeline": 2}, "fp32", False),
    ("qwen2", {"tensor": 2}, "bf16", False),
    ("qwen3", {"tensor": 2}, "fp32", False),
    ("llama", {"tensor": 2}, "fp16", False),
    ("qwen2_moe", BOTH, "bf16", False),
    ("glm4_moe", BOTH, "bf16", False),
    ("glm4_moe", BOTH, "fp32", False),
    ("deepseek_v3", BOTH, "bf16", False),
    ("deepseek_v3", BOTH, "fp32", False),
]
LAYERS = {"qwen3_moe": 36, "qwen2_moe": 34, "glm4_moe": 36, "deepseek_v3": 36, "qwen3": 34, "qwen2": 30, "llama": 30}
"""Operators with a tap, of both layers."""
EXCHANGED = {
    "self_attention.linear_qkv.weight": ["1.q", "1.k", "1.v"],
    "self_attention.linear_proj.weight": ["1.o_proj"],
}


def name_of(case: tuple) -> str:
    return " ".join(map(str, case))


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    models = make_models(tmp_path_factory.mktemp("models"))
    jobs = {
        name_of(case): (
            "learner_errors",
            {"path": str(models[case[0]]), "parallel": case[1], "dtype": case[2], "exact": case[3]},
        )
        for case in CLEAN
    }
    for parameter in EXCHANGED:
        arguments = {"path": str(models["qwen3_moe"]), "parallel": BOTH, "dtype": "fp32", "exchange": parameter}
        jobs[parameter] = ("learner_errors", arguments)
    with Jobs({2: jobs}, module=MODULE) as started:
        yield started


@pytest.mark.parametrize(("family", "parallel", "dtype", "exact"), slow_but(CLEAN[:1], CLEAN))
def test_a_sound_learner_is_within_every_bound(runs, family, parallel, dtype, exact):
    for found in runs[name_of((family, parallel, dtype, exact))]:  # whole on every rank
        assert found["beyond"] == []
        assert found["number"] == 4 + LAYERS[family]
        assert found["experts"] == ([0, 1, 2, 3] if family in MOE_FAMILIES else [])


@pytest.mark.slow
@pytest.mark.parametrize(("parameter", "beyond"), EXCHANGED.items())
def test_shards_of_two_ranks_exchanged_are_named(runs, parameter, beyond):
    assert [found["beyond"] for found in runs[parameter]] == [beyond, beyond]
