"""`plan` against reality: the arithmetic for GPUs predicts what PyTorch's allocator handed out, within 15%.

The whole table (1 to 30 million parameters, every recomputation) is tools.dev.measure_memory's.
"""

import pytest

from tests.parallel.gloo import run_ranks
from tests.support.slow import asked, slow_but
from tools.dev.measure_memory import TOLERANCE

TOKENS = 1024

ALONE = {
    f"{model}-{dtype}-{recompute}": (model, {"dtype": dtype, "recompute": recompute, "tokens": TOKENS})
    for model, dtype, recompute in (
        ("moe-1m", "fp32", "none"),
        ("moe-1m", "bf16", "selective"),
        ("moe-1m", "bf16", "full"),
        ("moe-4m", "bf16", "none"),
        ("moe-10m", "fp32", "full"),
        ("dense-10m", "bf16", "none"),
        ("dense-10m", "fp32", "full"),
    )
}
LAYOUTS = {
    "data": {},
    "pipeline": {"pipeline": 2},
}


# Each type, each kind of model and two ways to recompute; a larger one of experts and a part of recomputation are slow.
QUICK = ("moe-1m-fp32-none", "moe-1m-bf16-full", "dense-10m-bf16-none", "dense-10m-fp32-full")


@pytest.fixture(scope="module")
def alone(request) -> dict[str, tuple[int, float]]:
    names = list(dict.fromkeys([*QUICK, *(case for (case,) in asked(request, "case"))]))
    cases = [ALONE[name] for name in names]
    (results,) = run_ranks("tests.parallel.programs.memory", "measure_cases", world_size=1, cases=cases)
    return dict(zip(names, results, strict=True))


@pytest.fixture(scope="module")
def on_two_ranks() -> dict[str, list[tuple[int, float]]]:
    cases = [
        ("moe-1m", {"dtype": "bf16", "recompute": "none", "tokens": TOKENS, "microbatches": 3, "parallel": parallel})
        for parallel in LAYOUTS.values()
    ]
    ranks = run_ranks("tests.parallel.programs.memory", "measure_cases", world_size=2, cases=cases)
    return {name: [rank[i] for rank in ranks] for i, name in enumerate(LAYOUTS)}


@pytest.mark.parametrize("case", slow_but(QUICK, ALONE))
def test_one_rank(alone, case):
    measured, predicted = alone[case]
    assert predicted == pytest.approx(measured, rel=TOLERANCE)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_rank_of_a_layout(on_two_ranks, layout):
    for measured, predicted in on_two_ranks[layout]:
        assert predicted == pytest.approx(measured, rel=TOLERANCE)
