"""Agents that speak to a chat endpoint, trained on a real engine: recipes/tiny/agent.yaml learns, and
recipes/tiny/agent_program.yaml trains a program of its own."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from megatron_rl.config.monitor import RHO_BOUNDS
from megatron_rl.monitor import RunDirectory
from megatron_rl.run.recorded_batches import batch_path, load_batch
from tests.support.zygote import run_command
from tools.dev.make_tiny_checkpoint import build_tokenizer

STEPS = 14
RESULT = re.compile(r"(?<=[#·])(=[0-4?]#)")  # behind a call, or the end of a turn


def trained(root: Path, recipe: str, steps: int, *more: str) -> list[dict]:
    settings = [f"name={recipe}", f"run_root={root}", f"num_steps={steps}", "validation.every=0", *more]
    settings += ["checkpoint={every: 0, keep_last: 0}", "monitor.plots=false", "recorder.record_batches=all"]
    arguments = ["train", f"recipes/tiny/{recipe}.yaml", *(x for setting in settings for x in ("--set", setting))]
    done = run_command("megatron_rl", arguments, root)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return [json.loads(line) for line in (root / recipe / "metrics.jsonl").read_text().splitlines()]


def check_masks(root: Path, recipe: str, step: int, most_calls: int) -> int:
    """Results of the calculator are out of the loss, and all else is in it. Returns how many results there are."""
    decode, count = build_tokenizer().decode, 0
    for sequence in load_batch(batch_path(RunDirectory(root / recipe).batches, step)).batch.sequences:
        text = "".join(decode([token], skip_special_tokens=True) or "·" for token in sequence.tokens)
        told = np.zeros(len(text), dtype=bool)
        for number, match in enumerate(RESULT.finditer(text)):
            told[match.start(1) : match.end(1)] = number < most_calls
        sampled = sequence.loss_mask
        assert (sequence.inference_logprobs[~sampled] == 0).all()
        assert (sequence.inference_logprobs[sampled] != 0).any()
        assert sampled.tolist() == (~told).tolist(), text
        count += int((~sampled).any())
    return count


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("agents")


def test_an_agent_of_openais_library_learns(root):
    rows = trained(root, "agent", STEPS, "learner.optimizer.lr=3e-4")
    for row in rows:
        assert row["mismatch/rho_std"] < RHO_BOUNDS["fp32"]
        assert row["router/replay_coverage"] == 1.0
        assert 1.0 < row["rollout/turns_mean"] <= 3.0
        assert row["rollout/reread_tokens"] > 0.0  # on a CPU a block of the cache is longer than these conversations
    rewards = [row["critic/rewards/mean"] for row in rows]
    assert np.mean(rewards[-4:]) > np.mean(rewards[:4]) + 0.1, rewards
    assert check_masks(root, "agent", 0, 2) > 16


def test_a_program_that_has_an_address_and_a_key_is_trained(root):
    rows = trained(root, "agent_program", 2)
    for row in rows:
        assert row["mismatch/rho_std"] < RHO_BOUNDS["fp32"]
        assert row["router/replay_coverage"] == 1.0
        assert 1.0 < row["rollout/turns_mean"] <= 2.0
    assert check_masks(root, "agent_program", 1, 1) > 16


def test_agents_speak_to_servers_whose_weights_change_meanwhile(tmp_path):
    """The next batch is sampled while the learner works: conversations go on with newer weights."""
    settings = ["rollout.engine=vllm_server", "rollout.servers={launch: 2}", "rollout.max_staleness=1"]
    settings += ["rollout.in_flight={mode: keep}", "batch.prompts=4"]
    rows = trained(tmp_path, "agent", 3, *settings)
    assert all(row["router/replay_coverage"] == 1.0 and row["rollout/turns_mean"] > 1.0 for row in rows)
    assert check_masks(tmp_path, "agent", 1, 2) > 0
