"""Between ranks: which pairs are measured, what counts as bad, and that wrong values are seen."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist

from megatron_rl.doctor import rates
from megatron_rl.doctor.rates import bad_links, ring

CPU = torch.device("cpu")


@pytest.mark.parametrize("size", [2, 3, 4, 5, 8])
def test_every_pair_of_neighbours_once_and_nobody_twice_in_a_round(size):
    rounds = ring(size)
    pairs = [frozenset(pair) for one_round in rounds for pair in one_round]
    assert set(pairs) == {frozenset((i, (i + 1) % size)) for i in range(size)}
    assert len(pairs) == len(set(pairs))
    assert all(len({i for pair in one_round for i in pair}) == 2 * len(one_round) for one_round in rounds)


def made_up(*speeds: float, kind: str = "in a node") -> list[dict]:
    named = [{"ranks": f"ranks {i}", "kind": kind, "problem": ""} for i in range(len(speeds))]
    return [link | {"all_reduce": speed, "all_to_all": 1.0} for link, speed in zip(named, speeds)]


def test_a_link_far_slower_than_its_kind_is_bad():
    assert bad_links(made_up(100, 90, 110, 95), True) == []
    (told,) = bad_links(made_up(100, 90, 20, 95), True)
    assert told == "ranks 2: all_reduce 20.00 GiB/s, the median in a node is 92.50"
    assert bad_links(made_up(100, 90, 20, 95), False) == []  # on one machine's loopback
    # Links between nodes are held to their own kind.
    assert bad_links(made_up(100, 90, 110) + made_up(10, 11, 12, kind="between nodes"), True) == []


def test_a_link_with_a_problem_is_bad_and_no_measure_for_others():
    speeds_of_links = made_up(100, 90, 0, 95)
    speeds_of_links[2]["problem"] = "all_reduce gave wrong values"
    assert bad_links(speeds_of_links, True) == ["ranks 2: all_reduce gave wrong values"]


def outcome(device: str, *problems: str):
    whole = {"ranks": "all", "kind": "all", "problem": "", "all_reduce": 2.0, "all_to_all": 3.0}
    speeds_of_links = [*made_up(*[1.0] * len(problems)), whole]
    for link, problem in zip(speeds_of_links, problems):
        link["problem"] = problem
    return rates.judge_links(speeds_of_links, len(problems), device)


def test_the_outcome_names_links_and_a_fix():
    good = outcome("cpu", "", "")
    assert (good.status, good.figures["GiB/s"]["all"]["all_reduce"]) == ("pass", 2.0)
    assert good.reason.startswith("gloo, 2 ranks: sums and exchanges are exact")
    bad = outcome("cuda", *["no answer of rank 1"] * 6)
    assert bad.status == "fail"
    assert bad.reason.endswith("and 2 more")
    assert "NCCL_SOCKET_IFNAME" in bad.fix


@pytest.fixture
def alone(monkeypatch):
    """Collectives of a job of four ranks, seen from rank 1, computed here; ``spoil`` changes what arrives."""
    state = {"spoil": lambda values: values}

    def all_reduce(values):
        values.copy_(state["spoil"](4 * (values - 1) + 6))

    def all_to_all_single(received, sent):
        part = len(sent) // 4
        base = (sent[:part] - 4).clone()  # of rank 1 for rank 0
        received.copy_(state["spoil"](torch.cat([base + 4 * i + 1 for i in range(4)])))

    monkeypatch.setattr(dist, "barrier", lambda **_: None)
    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    monkeypatch.setattr(dist, "all_to_all_single", all_to_all_single)
    return state


@pytest.mark.parametrize("call", [rates.all_reduce, rates.all_to_all])
def test_a_value_that_is_wrong_is_seen(alone, call):
    right, seconds = call(4096, 1, 4, CPU)
    assert right
    assert 0 <= seconds < math.inf

    def spoil(values):
        values = values.clone()
        values[2047] += 1
        return values

    alone["spoil"] = spoil
    assert not call(4096, 1, 4, CPU)[0]


def test_sums_of_the_largest_job_are_exact():
    """Values and sums of 256 ranks are integers that fp32 holds."""
    assert 256 * (rates._EXACT - 1) + 256 * 255 // 2 < 2**24
    assert rates._EXACT - 1 + 256 * 256 < 2**24


def test_links_are_those_of_their_worst_end_and_absent_ranks_are_named():
    answers = [
        ["a", [[9.0, 9.0, ""], None, [3.0, 3.0, ""]]],
        ["b", [[8.0, 9.0, ""], [5.0, 5.0, "x"], [2.0, 3.0, ""]]],
        None,
    ]
    links = [rates._link(answers, i, ranks, "") for i, ranks in enumerate([(0, 1), (1, 2)])]
    assert links[0] == {"ranks": "ranks 0-1 (a, b)", "kind": "between nodes", "problem": ""} | {
        "all_reduce": 8.0,
        "all_to_all": 9.0,
    }
    assert (links[1]["kind"], links[1]["problem"]) == ("in a node", "no answer of rank 2")
    assert rates._link(answers[:2], 2, (0, 1), "all")["ranks"] == "all"
