"""Whole runs in exact mode, from the command line: the gate stays at zero, and a run repeats itself."""

import json
from pathlib import Path

import numpy as np
import pytest

from megatron_rl.rollout import Sampling
from tests.e2e.hf_reference import rounding_bound
from tests.parallel.gloo import run_ranks
from tests.support.centering_bias import HEADS, WEIGHTS, shares
from tests.support.families import DENSE, save_family
from tests.support.rounding import rounded
from tests.support.slow import slow_but
from tests.support.tiny import MODEL
from tests.support.written_run import without_times
from tests.support.zygote import run_command

STEPS = 6


def train(folder: Path, name: str, *settings: str, status: int = 0) -> tuple[list[dict], str]:
    values = [f"run_root={folder}", f"name={name}", f"num_steps={STEPS}", "validation.every=3", "validation.limit=16"]
    values += ["batch.prompts=4", "monitor.plots=false", "learner.optimizer.lr=1e-3", *settings]
    arguments = [argument for value in values for argument in ("--set", value)]
    done = run_command("megatron_rl", ["train", "recipes/tiny/exact.yaml", *arguments], folder)
    assert done.returncode == status, done.stdout[-3000:] + done.stderr[-3000:]
    file = folder / name / "metrics.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return rows, done.stdout + done.stderr


FP32_TWO_UPDATES = [
    "learner.dtype=fp32",
    "rollout.dtype=fp32",
    "batch.minibatches=2",
    "learner.max_tokens_per_microbatch=100",
]


@pytest.mark.parametrize(
    ("settings", "repeat"), slow_but([([], False)], [([], False), (FP32_TWO_UPDATES, True)]), ids=["bf16", "fp32"]
)
def test_the_gate_is_zero_in_every_step_and_the_run_repeats(tmp_path, settings, repeat):
    first, _ = train(tmp_path, "first", *settings)
    updated = [row for row in first if "actor/pg_loss" in row]
    assert len(updated) == STEPS
    for row in updated:
        assert row["exact/max_abs_prob_diff"] == 0.0
        assert row["mismatch/rho_std"] == 0.0
        assert row["mismatch/rho_max"] == 1.0
        assert row["perf/rollout_tokens"] > 0
    if repeat:
        second, _ = train(tmp_path, "second", *settings)
        assert without_times(first) == without_times(second)
    assert {row["actor/grad_norm"] for row in updated} != {updated[0]["actor/grad_norm"]}, "something was learned"


@pytest.mark.slow
@pytest.mark.parametrize("family", [*DENSE, "olmoe", "qwen2_moe"])
def test_another_family_has_no_mismatch(family, tmp_path):
    model = save_family(tmp_path / "model", family)
    rows, _ = train(tmp_path, "run", f"model.path={model}", "num_steps=2")
    updated = [row for row in rows if "actor/pg_loss" in row]
    assert [(row["exact/max_abs_prob_diff"], row["mismatch/rho_std"]) for row in updated] == [(0.0, 0.0)] * 2


def test_stale_weights_are_those_of_the_run_itself_from_its_first_step_on(tmp_path):
    bounded = "schedule.staleness_bound=1.0"
    rows, _ = train(tmp_path, "stale", *FP32_TWO_UPDATES, "exact.noise={kind: stale, updates: 2}", bounded)
    sizes = [row["exact/log_rho_std"] for row in rows if "actor/pg_loss" in row]
    assert len(sizes) == STEPS
    assert sizes[0] == 0.0, "there are no weights before the first"
    assert min(sizes[1:]) > 0.0
    ages = [row["lr_sched/staleness"] for row in rows if "actor/pg_loss" in row]
    assert ages == [0.5] + [2.5] * (STEPS - 1), "mean of two updates, the second one step further from its tokens"


CENTERED = "objective.score_centering=true"


@pytest.mark.parametrize("term", ["reinforce", "ppo_clip"])
def test_without_a_dose_centering_subtracts_nothing(tmp_path, term):
    settings = [CENTERED, f"objective.policy_term={term}", "rollout.sampled_head=8", "num_steps=2"]
    rows, _ = train(tmp_path, "run", *settings)
    found = [(row["score_centering/abs_coeff_sum"], row["score_centering/tail_ratio"]) for row in rows[:2]]
    assert found == [(0.0, 1.0)] * 2
    assert rows[0]["score_centering/head_mass_mu"] < 1


def test_under_a_dose_centering_subtracts_the_mean_score_of_the_closed_form(tmp_path):
    """The stored head is all of mu; pi is transformers'. What is left of the mean falls with the tail, and to 0."""
    dose = "exact.noise={kind: weights, bits: int4, strength: 4}"
    whole = ["rollout.sampled_head=128", "recorder.record_batches=all", "num_steps=1", *FP32_TWO_UPDATES]
    train(tmp_path, "run", CENTERED, "objective.policy_term=reinforce", *whole, dose)
    found = shares(tmp_path / "run", 0, MODEL)
    for name in WEIGHTS:
        for left in zip(*(found[name, k] for k in HEADS), strict=True):
            assert left[0] > 0.01, "of the score itself"
            assert left == tuple(sorted(left, reverse=True))
            assert left[-1] == rounded(0.0, 128, scale=1.0)


def test_vllm_draws_the_responses_that_the_exact_engine_draws():
    """Both take a token by the same random number: an arm with vLLM differs from one without by rounding only."""
    (result,) = run_ranks("tests.e2e.programs.rollout", "exact_and_vllm", 1)
    bound = 2 * rounding_bound(result["exact"], Sampling(24))
    drawn = {engine: [rollout for group in groups for rollout in group.rollouts] for engine, groups in result.items()}
    assert len(drawn["exact"]) == 128
    for exact, vllm in zip(drawn["exact"], drawn["vllm"], strict=True):
        assert (exact.id, exact.tokens.tolist()) == (vllm.id, vllm.tokens.tolist())
        assert np.abs(exact.inference_logprobs - vllm.inference_logprobs).max() <= bound
