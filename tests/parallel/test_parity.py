"""`megatron-rl parity` under layouts: parts of ranks are put together, and a shard on the wrong rank is named."""

import pytest

from tests.parallel.pool import Jobs
from tests.support.slow import asked, slow_but
from tools.dev.parity_bench import MODELS, WITH_EXPERTS, make_models

MODULE = "tests.parallel.programs.parity"
LAYOUTS = {
    "TP2·EP2": {"tensor": 2, "expert": 2},
    "TP2": {"tensor": 2},
    "EP2": {"expert": 2},
    "PP2": {"pipeline": 2},
    "CP2": {"context": 2},
}
DTYPES = ("fp32", "bf16", "fp16")
CLEAN = [
    *((model, "TP2·EP2" if model in WITH_EXPERTS else "TP2", dtype, False) for model in MODELS for dtype in DTYPES),
    ("qwen3_moe", "TP2·EP2", "bf16", True),
    ("qwen3_moe", "EP2", "fp32", False),
    ("qwen3_moe", "PP2", "fp32", False),
    ("qwen3_moe", "CP2", "fp32", False),
    ("llama", "CP2", "bf16", False),
    ("olmoe", "PP2", "fp32", False),
    ("deepseek_v3 yarn", "PP2", "fp32", False),
]
QUICK = [("qwen3_moe", "TP2·EP2", "bf16", False)]
EXCHANGED = {
    "self_attention.linear_qkv.weight": ["1.q", "1.k", "1.v"],
    "self_attention.linear_proj.weight": ["1.o_proj"],
}


def name_of(case: tuple) -> str:
    return " ".join(map(str, case))


@pytest.fixture(scope="module")
def runs(tmp_path_factory, request):
    cases = asked(request, "model", "layout", "dtype", "exact")
    models = make_models(tmp_path_factory.mktemp("models"), list({"qwen3_moe": 0} | {case[0]: 0 for case in cases}))
    jobs = {}
    for model, layout, dtype, exact in cases:
        arguments = {"path": str(models[model]), "parallel": LAYOUTS[layout], "dtype": dtype, "exact": exact}
        jobs[name_of((model, layout, dtype, exact))] = ("learner_errors", arguments)
    for (parameter,) in asked(request, "parameter"):
        arguments = {"path": str(models["qwen3_moe"]), "parallel": LAYOUTS["TP2·EP2"], "dtype": "fp32"}
        jobs[parameter] = ("learner_errors", arguments | {"exchange": parameter})
    with Jobs({2: jobs}, module=MODULE) as started:
        yield started


@pytest.mark.parametrize(("model", "layout", "dtype", "exact"), slow_but(QUICK, CLEAN))
def test_a_sound_learner_is_within_every_bound(runs, model, layout, dtype, exact):
    for report in runs[name_of((model, layout, dtype, exact))]:  # whole on every rank
        assert report["beyond"] == []
        assert report["missing"] == []
        assert report["experts"] == list(range(report["num_experts"]))


@pytest.mark.slow
@pytest.mark.parametrize(("parameter", "beyond"), EXCHANGED.items())
def test_shards_of_two_ranks_exchanged_are_named(runs, parameter, beyond):
    assert [report["beyond"] for report in runs[parameter]] == [beyond, beyond]
