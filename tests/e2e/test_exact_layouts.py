"""Whole runs of exact mode in every layout and dtype: no step has a token that the update computes otherwise.

Ranks start once for all dtypes. `python -m tools.dev.exact_runs` makes longer runs, each with a `torchrun` of its own.
"""

from __future__ import annotations

import pytest

from tests.parallel.gloo import run_ranks
from tests.support.tiny import MODEL
from tools.dev.exact_runs import DTYPES, Outcome, arguments, num_ranks, run_name, with_four_key_heads

STEPS, SEQUENCES = 2, 8
LAYOUTS = ("tp1", "tp2ep2", "pp2", "tp4ep4")


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory) -> dict[str, dict[str, Outcome]]:
    """layout → dtype → what the run left."""
    root = tmp_path_factory.mktemp("runs")
    model = with_four_key_heads(MODEL, root / "model")
    found = {}
    for size in sorted(set(map(num_ranks, LAYOUTS))):
        layouts = [layout for layout in LAYOUTS if num_ranks(layout) == size]
        runs = [(layout, dtype) for layout in layouts for dtype in DTYPES]
        ranks = run_ranks(
            "tests.e2e.programs.exact_runs",
            "train",
            size,
            init_process_group=False,
            runs=[arguments(root, model, *run, steps=STEPS, sequences=SEQUENCES) for run in runs],
        )
        assert ranks == [[0] * len(runs)] * size
        for layout in layouts:
            found[layout] = {dtype: Outcome.of(root / run_name(layout, dtype)) for dtype in DTYPES}
    return found


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_gate_is_zero_in_every_step(outcomes, layout, dtype):
    outcome = outcomes[layout][dtype]
    assert outcome.gates == [0.0] * STEPS
    assert len(outcome.rewards) == 2, "validation before the first step and after the last"
    assert [len(tokens) for tokens in outcome.tokens] == [SEQUENCES] * STEPS


@pytest.mark.parametrize("layout", LAYOUTS[1:])
def test_every_layout_samples_what_one_rank_samples(outcomes, layout):
    """In fp32 layouts differ by rounding alone, which no draw of these few is close enough to notice."""
    assert outcomes[layout]["fp32"].differing(outcomes["tp1"]["fp32"]) == [0] * STEPS


@pytest.mark.parametrize("dtype", DTYPES)
def test_stages_of_a_pipeline_sample_what_one_rank_samples_bit_for_bit(outcomes, dtype):
    """No sum is cut: the first batch has the same bits. Later ones do not, where a gradient's norm is added up in
    another order. Tensor-parallel ranks add in another order than one rank, so that tokens in 16 bits may differ."""
    assert outcomes["pp2"][dtype].differing(outcomes["tp1"][dtype])[0] == 0
