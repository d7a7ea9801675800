"""The learner over the real TransformerEngine's layers, on a CPU, against Megatron's own layers on one rank.

`tests.support.te` says what runs and what does not. One helper imports TransformerEngine, ranks start once per number
of ranks, and run the programs of the other tests of the learner. All that a run has beside an update:
test_transformer_engine_layouts.py.
"""

import numpy as np
import pytest

from tests.parallel.programs.learner import largest_difference
from tests.parallel.transformer_engine import (
    EPS,
    STEPS,
    learner,
    over_local,
    over_te,
)
from tests.support import te
from tests.support.plain_training import float32_limits
from tests.support.slow import slow_but

pytestmark = pytest.mark.skipif(te.MISSING is not None, reason=str(te.MISSING))

LAYOUTS = {
    "one": (1, {}),
    "dp2": (2, {}),
    "tp2": (2, {"tensor": 2}),
    "ep2": (2, {"expert": 2}),
    "tp2ep2": (2, {"tensor": 2, "expert": 2}),
    "tp2etp2": (2, {"tensor": 2, "expert_tensor": 2}),
    "pp2": (2, {"pipeline": 2}),
    "pp2ep2": (4, {"pipeline": 2, "expert": 2}),
    "tp2ep2pp2": (4, {"tensor": 2, "expert": 2, "pipeline": 2}),
}
VARIANTS = {
    "small microbatches": {"max_tokens_per_microbatch": 64},
    "recompute full": {"recompute": "full"},
    "recompute selective": {"recompute": "selective"},
    "fused head": {"fused_head": True},
}


def train(section: dict) -> tuple[str, dict]:
    return "learner.train_on_stored_rollouts", {"num_steps": STEPS, "learner": section}


@pytest.fixture(scope="module")
def local():
    """Megatron's own layers on one rank."""
    with over_local({"one": train(learner())}) as results:
        yield results.of_rank(0)


@pytest.fixture(scope="module")
def runs(transformer_engine):
    """Result of every job on every rank: ``runs[job][rank]``."""
    jobs: dict[int, dict] = {1: {"attention": ("thd_choices", {})}, 2: {}, 4: {}}
    for name, (ranks, parallel) in LAYOUTS.items():
        jobs[ranks][name] = train(learner(parallel))
    for name, overrides in VARIANTS.items():
        jobs[2][name] = train(learner(LAYOUTS["tp2ep2"][1], **overrides))
    with over_te(transformer_engine, jobs) as results:
        yield results


@pytest.mark.parametrize("name", slow_but(["tp2ep2"], [*LAYOUTS, *VARIANTS]))
def test_equals_megatrons_own_layers_on_one_rank(runs, local, name):
    reference, limits = local["one"], float32_limits(STEPS, eps=EPS)
    for result in runs[name]:
        for step, (got, want) in enumerate(zip(result["metrics"], reference["metrics"], strict=True)):
            for metric in ("actor/pg_loss", "actor/grad_norm", "actor/entropy", "mismatch/rho_std"):
                assert abs(got[metric] - want[metric]) <= limits.of_metric(metric, step), (step, metric)
        for part in ("before", "after"):
            assert np.abs(np.concatenate(result[part]) - np.concatenate(reference[part])).max() <= limits.logprobs
        assert largest_difference(result["weights"], reference["weights"]) <= limits.weights


def test_unfused_attention_over_packed_rows_is_refused(runs):
    """An A100 without flash-attn would store every score of a packed row."""
    (answers,) = runs["attention"]
    assert {name: text for name, text in answers.items() if "refused" not in text} == {
        "sm80, float32": "unfused",
        "sm80 flash, bfloat16": "flash",
        "sm80 flash, float32": "unfused",
        "sm90, bfloat16": "fused",
        "sm90, float32": "unfused",
        "sm90 flash, bfloat16": answers["sm90 flash, bfloat16"],
        "sm90 flash, float32": "unfused",
    }
    assert answers["sm90 flash, bfloat16"] in ("flash", "fused")
    assert (
        "compute capability 8.0) and would store every attention score; install 'flash-attn"
        in answers["sm80, bfloat16"]
    )
