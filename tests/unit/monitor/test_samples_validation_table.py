"""The table of `eval`: rows of files and intervals."""

from __future__ import annotations

import json
import math

import pytest

from megatron_rl.config.data import DataSourceConfig
from megatron_rl.errors import InputError
from megatron_rl.monitor.samples import check_names, confidence_interval, file_rows, summarise, table
from megatron_rl.process.host import format_table
from megatron_rl.types import Group, Prompt
from tests.support.groups import any_response


def group(name: str, rewards: list[float], source: str = "", cut: int = 0) -> Group:
    rollouts = [
        any_response(f"{name}/{i}", i + 1, "length" if i < cut else "stop", raw_reward=reward)
        for i, reward in enumerate(rewards)
    ]
    return Group(Prompt(name, [1], "0", data_source=source), rollouts)


SOURCES = [DataSourceConfig(path="sets/a.jsonl"), DataSourceConfig(path="sets/long.jsonl", name="a:b")]


def test_a_row_for_each_file_and_one_of_all():
    groups = [group("a:0", [1, 0]), group("a:b:0", [1, 1], cut=1), group("a:1", [0, 0]), group("a:b:1", [0, 1])]
    first, second, whole = file_rows(groups, SOURCES)
    assert [row.file for row in (first, second, whole)] == ["sets/a.jsonl", "sets/long.jsonl", "all"]
    assert [(row.problems, row.samples, row.reward) for row in (first, second, whole)] == [
        (2, 2, 0.25),
        (2, 2, 0.75),
        (4, 2, 0.5),
    ]
    assert (first.pass_at, second.pass_at) == ({1: 0.25, 2: 0.5}, {1: 0.75, 2: 1.0})
    assert first.reward_ci95 == confidence_interval([0.5, 0.0])
    assert first.pass_at_ci95[2] == confidence_interval([1.0, 0.0])
    assert (first.truncated, second.truncated, second.length) == (0.0, 0.25, 1.5)


def test_a_row_agrees_with_the_metrics_of_a_run():
    groups = [group(f"a:{i}", [float(i % 2), 1.0, 0.0], source="src", cut=i) for i in range(3)]
    metrics, (row,) = summarise(groups), file_rows(groups, SOURCES[:1])
    assert metrics["val/src/avg@3"] == row.reward
    assert row.reward_ci95 is not None
    assert (metrics["val/src/avg@3_ci95_low"], metrics["val/src/avg@3_ci95_high"]) == row.reward_ci95
    assert {k: metrics[f"val/src/pass@{k}"] for k in (1, 2, 3)} == row.pass_at
    assert metrics["val/src/response_length/mean"] == row.length
    assert metrics["val/src/response_length/clip_ratio"] == row.truncated


def test_a_file_without_problems_has_a_row_without_figures():
    first, second, _ = file_rows([group("a:0", [1.0])], SOURCES)
    assert second.problems == 0
    assert math.isnan(second.reward)
    told = json.loads(json.dumps(second.to_json(), allow_nan=False))
    assert (told["reward"], told["pass_at"]) == (None, {})
    shown = format_table(*table([first, second])).splitlines()
    assert shown[0].split() == ["file", "problems", "n", "reward", "pass@1", "length", "truncated"]
    assert shown[3].split() == ["sets/long.jsonl", "0", "0", "–", "–", "–", "–"]


def test_rewards_outside_the_unit_interval_have_no_interval():
    (row,) = file_rows([group("a:0", [-1.0, 1.0])], SOURCES[:1])
    assert (row.reward, row.reward_ci95) == (0.0, None)
    assert table([row])[1][0][3] == "0.0000"


def test_two_files_of_one_name_are_refused():
    check_names(SOURCES)
    with pytest.raises(InputError, match="two files are named 'a'; give each a `name`"):
        check_names([SOURCES[0], DataSourceConfig(path="other/a.jsonl")])
