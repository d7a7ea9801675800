"""Whole runs of exact mode in every layout and dtype: no step has a token that the update computes otherwise.

Ranks start once for all dtypes.
"""

import functools

import pytest

from tests.parallel.pool import Jobs
from tests.support.slow import slow_but
from tests.support.tiny import MODEL
from tools.dev.exact_runs import DTYPES, Outcome, arguments, num_ranks, run_name, with_four_key_heads

STEPS, SEQUENCES = 2, 8
LAYOUTS = ("tp1", "tp2ep2", "pp2", "tp4ep4")


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """(layout, dtype) → what the run left; a run is made when it is first asked for."""
    root = tmp_path_factory.mktemp("runs")
    model = with_four_key_heads(MODEL, root / "model")
    jobs: dict[int, dict] = {num_ranks(layout): {} for layout in LAYOUTS}
    for layout in LAYOUTS:
        for dtype in DTYPES:
            run = arguments(root, model, layout, dtype, steps=STEPS, sequences=SEQUENCES)
            jobs[num_ranks(layout)][run_name(layout, dtype)] = ("train", {"runs": [run]})
    with Jobs(jobs, module="tests.e2e.programs.exact_runs", init_process_group=False) as ended:

        @functools.cache
        def outcome(layout: str, dtype: str) -> Outcome:
            name = run_name(layout, dtype)
            assert ended[name] == [[0]] * num_ranks(layout)
            return Outcome.of(root / name)

        yield outcome


@pytest.mark.parametrize(
    ("layout", "dtype"), slow_but([("tp2ep2", "bf16")], [(layout, dtype) for layout in LAYOUTS for dtype in DTYPES])
)
def test_the_gate_is_zero_in_every_step(outcomes, layout, dtype):
    outcome = outcomes(layout, dtype)
    assert outcome.gates == [0.0] * STEPS
    assert len(outcome.rewards) == 2, "validation before the first step and after the last"
    assert [len(tokens) for tokens in outcome.tokens] == [SEQUENCES] * STEPS


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS[1:])
def test_every_layout_samples_what_one_rank_samples(outcomes, layout):
    """In fp32 layouts differ by rounding alone, which no draw of these few is close enough to notice."""
    assert outcomes(layout, "fp32").differing(outcomes("tp1", "fp32")) == [0] * STEPS


@pytest.mark.parametrize("dtype", slow_but(["bf16"], DTYPES))
def test_stages_of_a_pipeline_sample_what_one_rank_samples_bit_for_bit(outcomes, dtype):
    """No sum is cut: the first batch has the same bits. Later ones do not, where a gradient's norm is added up in
    another order. Tensor-parallel ranks add in another order than one rank, so that tokens in 16 bits may differ."""
    assert outcomes("pp2", dtype).differing(outcomes("tp1", dtype))[0] == 0
