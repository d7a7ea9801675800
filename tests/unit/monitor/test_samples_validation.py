"""avg@n, pass@k and their interval against enumeration and simulation; the table of `eval`."""

import json
import math
from itertools import combinations

import numpy as np
import pytest

from megatron_rl.config.data import DataSourceConfig
from megatron_rl.errors import InputError
from megatron_rl.monitor.samples import (
    avg_at_n,
    check_names,
    confidence_interval,
    file_rows,
    pass_at_k,
    summarise,
    table,
)
from megatron_rl.process.host import format_table
from megatron_rl.types import Group, Prompt
from tests.support.groups import any_response
from tests.support.rounding import rounded


@pytest.mark.parametrize(("n", "c", "k"), [(1, 0, 1), (1, 1, 1), (5, 2, 1), (5, 2, 3), (6, 1, 6), (6, 0, 3), (8, 5, 4)])
def test_pass_at_k_counts_the_draws_that_hold_a_correct_one(n, c, k):
    draws = list(combinations(range(n), k))
    assert pass_at_k(n, c, k) == rounded(sum(min(draw) < c for draw in draws) / len(draws))


def test_pass_at_k_of_many_samples_does_not_overflow():
    assert pass_at_k(4096, 1, 2048) == rounded(0.5)


@pytest.mark.parametrize(("n", "c", "k"), [(4, 1, 5), (4, 5, 1), (4, -1, 1), (4, 1, 0)])
def test_pass_at_k_refuses_the_impossible(n, c, k):
    with pytest.raises(ValueError, match=f"n = {n}, c = {c}"):
        pass_at_k(n, c, k)


def test_avg_at_n_weighs_problems_equally():
    assert avg_at_n([[1.0, 0.0], [1.0, 1.0, 1.0, 0.0]]) == rounded((0.5 + 0.75) / 2)


@pytest.mark.parametrize(("low", "high"), [(0.3, 0.9), (0.02, 0.1)])
def test_the_interval_covers_the_truth_about_as_often_as_it_says(low, high):
    """Problems of uniformly drawn difficulty, 4 samples each: 95% of intervals should hold the mean difficulty."""
    rng = np.random.default_rng(0)
    covered = 0
    for _ in range(2000):
        difficulty = rng.uniform(low, high, size=60)
        means = rng.binomial(4, difficulty) / 4
        lower, upper = confidence_interval(means.tolist())
        covered += lower <= (low + high) / 2 <= upper
    # No rounding: the interval is that of single draws, which means of four are narrower than, and has no exact level.
    assert 0.93 <= covered / 2000 <= 0.985


def test_the_interval_keeps_a_width_where_all_problems_agree():
    """Wilson's bounds of 0 of 30 and 30 of 30: z² / (n + z²) away from the edge."""
    edge = 1.959964**2 / (30 + 1.959964**2)
    assert confidence_interval([0.0] * 30) == rounded((0.0, edge))
    assert confidence_interval([1.0] * 30) == rounded((1 - edge, 1.0))
    assert confidence_interval([1.0])[0] < 0.3


def group(source: str, *rewards: float, lengths: tuple[int, ...] = (), cut: int = 0) -> Group:
    rollouts = []
    for sample, reward in enumerate(rewards):
        length = lengths[sample] if lengths else 3
        reason = "length" if sample < cut else "stop"
        rollouts.append(any_response(f"p/{sample}", length, reason, raw_reward=reward))
    return Group(Prompt("p", [1], "a", data_source=source), rollouts)


def test_the_summary_by_source():
    groups = [
        group("aime", 1, 0, 0, 0, lengths=(1, 2, 3, 10), cut=1),
        group("aime", 1, 1, 0, 0),
        group("toy", 1, 1),
        group("toy", 1, 1),
        group("aime", 0, 0, 0, 0),
    ]
    metrics = summarise(groups)
    assert metrics["val/aime/avg@4"] == rounded(0.25)
    assert metrics["val/aime/avg@4_ci95_low"] < 0.25 < metrics["val/aime/avg@4_ci95_high"]
    assert metrics["val/aime/pass@1"] == rounded(0.25)
    assert metrics["val/aime/pass@2"] == rounded((0.5 + 5 / 6 + 0) / 3)
    assert metrics["val/aime/pass@4"] == rounded(2 / 3)
    assert metrics["val/aime/response_length/mean"] == rounded((16 + 24) / 12)
    assert metrics["val/aime/response_length/max"] == 10
    assert metrics["val/aime/response_length/clip_ratio"] == rounded(1 / 12)
    assert metrics["val/aime/num_problems"] == 3
    assert metrics["val/toy/avg@2"] == metrics["val/toy/pass@2"] == 1.0
    assert "val/toy/pass@4" not in metrics


def test_unequal_sample_counts_use_the_smallest_for_names_and_all_for_means():
    metrics = summarise([group("x", 1, 0, 1), group("x", 0, 0)])
    assert metrics["val/x/avg@2"] == rounded(1 / 3)
    assert metrics["val/x/pass@2"] == rounded((1 + 0) / 2)


def test_rewards_outside_the_unit_interval_get_no_interval():
    metrics = summarise([group("x", -1.0, 1.0)])
    assert metrics["val/x/avg@2"] == 0.0
    assert metrics["val/x/pass@2"] == 1.0
    assert not [name for name in metrics if "ci95" in name]


def test_nothing_to_summarise():
    assert summarise([]) == {}
    assert summarise([group("x")]) == {}


def of_file(name: str, rewards: list[float], source: str = "", cut: int = 0) -> Group:
    rollouts = [
        any_response(f"{name}/{i}", i + 1, "length" if i < cut else "stop", raw_reward=reward)
        for i, reward in enumerate(rewards)
    ]
    return Group(Prompt(name, [1], "0", data_source=source), rollouts)


SOURCES = [DataSourceConfig(path="sets/a.jsonl"), DataSourceConfig(path="sets/long.jsonl", name="a:b")]


def test_a_row_for_each_file_and_one_of_all():
    groups = [
        of_file("a:0", [1, 0]),
        of_file("a:b:0", [1, 1], cut=1),
        of_file("a:1", [0, 0]),
        of_file("a:b:1", [0, 1]),
    ]
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
    groups = [of_file(f"a:{i}", [float(i % 2), 1.0, 0.0], source="src", cut=i) for i in range(3)]
    metrics, (row,) = summarise(groups), file_rows(groups, SOURCES[:1])
    assert metrics["val/src/avg@3"] == row.reward
    assert row.reward_ci95 is not None
    assert (metrics["val/src/avg@3_ci95_low"], metrics["val/src/avg@3_ci95_high"]) == row.reward_ci95
    assert {k: metrics[f"val/src/pass@{k}"] for k in (1, 2, 3)} == row.pass_at
    assert metrics["val/src/response_length/mean"] == row.length
    assert metrics["val/src/response_length/clip_ratio"] == row.truncated


def test_a_file_without_problems_has_a_row_without_figures():
    first, second, _ = file_rows([of_file("a:0", [1.0])], SOURCES)
    assert second.problems == 0
    assert math.isnan(second.reward)
    told = json.loads(json.dumps(second.to_json(), allow_nan=False))
    assert (told["reward"], told["pass_at"]) == (None, {})
    shown = format_table(*table([first, second])).splitlines()
    assert shown[0].split() == ["file", "problems", "n", "reward", "pass@1", "length", "truncated"]
    assert shown[3].split() == ["sets/long.jsonl", "0", "0", "–", "–", "–", "–"]


def test_rewards_outside_the_unit_interval_have_no_interval():
    (row,) = file_rows([of_file("a:0", [-1.0, 1.0])], SOURCES[:1])
    assert (row.reward, row.reward_ci95) == (0.0, None)
    assert table([row])[1][0][3] == "0.0000"


def test_two_files_of_one_name_are_refused():
    check_names(SOURCES)
    with pytest.raises(InputError, match="two files are named 'a'; give each a `name`"):
        check_names([SOURCES[0], DataSourceConfig(path="other/a.jsonl")])
