"""A teacher on real engines: its log-probs are its model's, and recipes/tiny/distillation.yaml runs on them."""

import json
import shutil
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from megatron_rl.config.rollout import RolloutConfig
from megatron_rl.rollout import Sampling
from megatron_rl.rollout.scoring import engine_config
from megatron_rl.rollout.vllm_engine import VllmGenerator
from megatron_rl.run.recorded_batches import batch_path, load_batch
from tests.e2e import hf_reference
from tests.support.tiny import MODEL
from tests.support.written_run import without_times
from tests.support.zygote import run_command

SAMPLING, STEPS = Sampling(24), 3


@pytest.fixture(scope="module")
def teacher(tmp_path_factory) -> Path:
    """Another policy, with the tokenizer of the tiny model."""
    folder = tmp_path_factory.mktemp("teacher") / "hf"
    shutil.copytree(MODEL, folder)
    save_file(hf_reference.perturbed(2), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def run(folder: Path, name: str, *changes: str, steps: int = STEPS) -> list[dict]:
    values = [f"run_root={folder}", f"name={name}", f"num_steps={steps}", "validation.every=0", "batch.prompts=4"]
    values += ["learner.optimizer.lr=1e-3", "monitor.plots=false", "batch.minibatches=2", "checkpoint.every=1"]
    values += ["recorder.record_batches=all", *changes]
    arguments = [argument for value in values for argument in ("--set", value)]
    done = run_command("megatron_rl", ["train", "recipes/tiny/distillation.yaml", *arguments], folder)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]


def test_a_second_engine_of_the_process_scores_what_the_first_sampled(teacher):
    config = RolloutConfig(dtype="fp32", max_response_length=24, kv_cache_gib=0.0625, verify_refit=False)
    with (
        closing(VllmGenerator(config, MODEL, max_prompt_length=12)) as student,
        closing(VllmGenerator(engine_config(config, 6), teacher, max_prompt_length=12, sleeps=False)) as other,
    ):
        groups = student.rollout(hf_reference.prompts(16), 4, policy_version=0, step=0)
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        got, with_sets = ([*zip(*other.score(rollouts, k), strict=True)] for k in (0, 6))
        again = student.rollout(hf_reference.prompts(16), 4, policy_version=0, step=0)
    wanted, _ = hf_reference.score(hf_reference.load(teacher, torch.float64), groups, SAMPLING)
    assert [len(x) for x in got[0]] == [len(x) for x in wanted]
    bound = hf_reference.rounding_bound(groups, SAMPLING, teacher)
    assert np.abs(np.concatenate(got[0]) - np.concatenate(wanted)).max() <= bound
    logprobs, tokens, of_tokens = (np.concatenate(x) for x in with_sets)
    assert np.abs(logprobs - np.concatenate(wanted)).max() <= bound
    sampled = tokens == np.concatenate([rollout.tokens for rollout in rollouts])[:, None]
    assert sampled.any()
    assert (np.abs(of_tokens - logprobs[:, None])[sampled] == 0).all()
    assert (np.diff(of_tokens, axis=1) <= 0).all()
    assert (logprobs[~sampled.any(axis=1)] <= of_tokens[~sampled.any(axis=1), -1]).all()
    assert hf_reference.flat(groups, "tokens") == hf_reference.flat(again, "tokens")


class TestRuns:
    @pytest.fixture(scope="class")
    def folder(self, tmp_path_factory) -> Path:
        return tmp_path_factory.mktemp("runs")

    @pytest.fixture(scope="class")
    def rows(self, folder, teacher) -> list[dict]:
        return run(folder, "whole", f"teacher.path={teacher}")

    def test_the_teacher_is_asked_in_every_step(self, rows):
        assert all(row["teacher/kl_max"] > row["teacher/kl"] for row in rows)
        assert all(row["perf/time/teacher"] > 0 and row["teacher/share_floor"] == 0 for row in rows)
        assert all(row["perf/time/old_logprobs"] > 0 for row in rows), "po is what the teacher is compared with"

    def test_metrics_are_those_of_the_recorded_log_probs(self, rows, folder):
        batch = load_batch(batch_path(folder / "whole" / "batches", 0)).batch
        gap = np.concatenate([s.old_logprobs.astype(float) - s.teacher_logprobs for s in batch.sequences])
        # Two means of float32 numbers of about 1, in another order.
        assert abs(rows[0]["teacher/kl"] - gap.mean()) < len(gap) * np.finfo(np.float32).eps
        assert all(s.advantage == 0 for s in batch.sequences)

    def test_a_run_that_was_resumed_goes_on_alike(self, rows, folder, teacher):
        run(folder, "parts", f"teacher.path={teacher}", steps=STEPS - 1)
        again = run(folder, "parts", f"teacher.path={teacher}")
        assert without_times(again) == without_times(rows)

    def test_a_recorded_batch_is_learned_from_again(self, rows, folder):
        told = folder / "told.json"
        done = run_command("megatron_rl", ["replay", str(folder / "whole"), "--step", "1", "--json", str(told)], folder)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        now = json.loads(told.read_text())["replayed"]
        assert [now[name] for name in ("actor/pg_loss", "teacher/kl")] == [
            rows[1][name] for name in ("actor/pg_loss", "teacher/kl")
        ]

    def test_sets_of_the_teacher_are_the_same_on_both_engines(self, folder, teacher):
        """And those of the sampler, which the learner's ranks alone can score; both runs learn."""
        sets = {
            "sets": ["teacher.top_k=8"],
            "sets-learner": ["teacher.top_k=8", "teacher.engine=learner", "teacher.forward=0.5"],
            "sets-student": ["teacher.top_k=8", "teacher.engine=learner", "teacher.tokens=student"],
        }
        sets["sets-student"].append("rollout.sampled_head=8")
        rows = {name: run(folder, name, f"teacher.path={teacher}", *keys, steps=1)[0] for name, keys in sets.items()}
        batches = {name: load_batch(batch_path(folder / name / "batches", 0)).batch.sequences for name in sets}
        ours, other = batches["sets"], batches["sets-learner"]
        bound = 64 * 32 * np.finfo(np.float32).eps  # as below
        for one, two in zip(ours, other, strict=True):
            same = one.teacher_tokens == two.teacher_tokens  # but for neighbours that rounding has swapped
            assert same.mean() > 0.9
            assert np.abs(one.teacher_set_logprobs - two.teacher_set_logprobs).max() < bound
        assert all(
            s.teacher_tokens is None and s.teacher_set_logprobs.shape == (s.length, 8) for s in batches["sets-student"]
        )
        assert all(row["teacher/divergence"] > 0 and row["actor/grad_norm"] > 0 for row in rows.values())
        assert all(0 < row["teacher/set_mass_pi"] <= 1.0001 for row in rows.values())

    def test_a_teacher_on_the_learners_ranks_says_the_same(self, rows, folder, teacher):
        own = run(folder, "learner", f"teacher.path={teacher}", "teacher.engine=learner", steps=1)
        first, second = (
            [s.teacher_logprobs for s in load_batch(batch_path(folder / name / "batches", 0)).batch.sequences]
            for name in ("whole", "learner")
        )
        assert [len(x) for x in first] == [len(x) for x in second]
        # Two engines in float32; log-probs are of logits up to 32, whose products add up 64 numbers.
        bound = 64 * 32 * np.finfo(np.float32).eps
        assert np.abs(np.concatenate(first) - np.concatenate(second)).max() < bound
        assert abs(own[0]["teacher/kl"] - rows[0]["teacher/kl"]) < bound
