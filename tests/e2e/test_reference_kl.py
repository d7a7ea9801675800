"""recipes/tiny/reference_kl.yaml on real engines: from 0, through the reward to advantages, recorded, and resumed."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_rl.run.recorded_batches import batch_path, load_batch
from tests.support.rounding import rounded
from tests.support.written_run import without_times
from tests.support.zygote import run_command

COEF, STEPS, SAMPLES = 0.05, 3, 8


def run(folder: Path, name: str, steps: int) -> list[dict]:
    values = [f"run_root={folder}", f"name={name}", f"num_steps={steps}", "validation.every=0", "batch.prompts=4"]
    values += [f"objective.kl_in_reward.coef={COEF}", "learner.optimizer.lr=1e-3", "monitor.plots=false"]
    values += ["recorder.record_batches=all", "checkpoint.every=1", "batch.minibatches=2"]
    arguments = [argument for value in values for argument in ("--set", value)]
    done = run_command("megatron_rl", ["train", "recipes/tiny/reference_kl.yaml", *arguments], folder)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def rows(folder) -> list[dict]:
    return run(folder, "whole", STEPS)


def test_the_policy_leaves_the_reference_that_it_started_at(rows):
    assert rows[0]["reference/kl_in_reward"] == 0.0
    assert all(row["reference/k3_kl"] > 0 for row in rows)
    assert all(row["reference/kl_in_reward"] != 0 for row in rows[1:])
    assert all(row["perf/time/reference"] > 0 for row in rows)


def test_advantages_are_those_of_the_rewards_less_the_divergence(rows, folder):
    batch = load_batch(batch_path(folder / "whole" / "batches", STEPS - 1)).batch
    sums = np.array([(s.old_logprobs.astype(float) - s.reference_logprobs).sum() for s in batch.sequences])
    rewards = np.array([s.reward for s in batch.sequences]) - COEF * sums
    groups = rewards.reshape(-1, SAMPLES)
    std = groups.std(axis=1, ddof=1, keepdims=True) + 1e-6
    wanted = (groups - groups.mean(axis=1, keepdims=True)) / std
    largest = 2 + np.abs(sums).max()  # rewards are float32, and a group may differ by the divergence alone
    for sequence, advantage, spread in zip(batch.sequences, wanted.ravel(), np.repeat(std, SAMPLES), strict=True):
        assert sequence.advantage == rounded(advantage, scale=largest / spread, dtype=torch.float32)
    of_tokens = max(float(np.abs(s.old_logprobs).sum()) for s in batch.sequences)
    assert rows[-1]["reference/kl_in_reward"] == rounded(sums.mean(), scale=of_tokens, dtype=torch.float32)


def test_a_run_that_was_resumed_goes_on_alike(rows, folder):
    run(folder, "parts", STEPS - 1)
    again = run(folder, "parts", STEPS)
    assert without_times(again) == without_times(rows)


def test_a_recorded_batch_is_learned_from_again(rows, folder):
    told = folder / "told.json"
    done = run_command("megatron_rl", ["replay", str(folder / "whole"), "--step", "1", "--json", str(told)], folder)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    now = json.loads(told.read_text())["replayed"]
    names = ("actor/pg_loss", "actor/regularizer_loss", "reference/kl", "reference/k3_kl", "reference/kl_in_reward")
    assert [now[name] for name in names] == [rows[1][name] for name in names]
