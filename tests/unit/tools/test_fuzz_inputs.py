"""A few hundred examples of tools.dev.fuzz: random input is accepted or refused in the user's terms, never a crash."""

from __future__ import annotations

from megatron_rl.rewards.pool import WorkerPool
from tools.dev.fuzz import examples


def test_recipes(tmp_path):
    count = [0]
    examples("recipe", tmp_path, None, 150, count)()
    assert count[0] >= 150


def test_data(tmp_path):
    count = [0]
    examples("data", tmp_path, None, 200, count)()
    assert count[0] >= 200


def test_rewards(tmp_path):
    count = [0]
    with WorkerPool(1, timeout_s=1.0, memory_limit_mib=512) as pool:
        examples("reward", tmp_path, pool, 60, count)()
    assert count[0] >= 60
