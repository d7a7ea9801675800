"""Between ranks: which pairs are measured, what counts as bad, and that wrong values are seen."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist

from megatron_rl.doctor import machine, rates
from megatron_rl.doctor.rates import judge_links, ring

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
    assert judge_links(made_up(100, 90, 110, 95), True) == []
    (told,) = judge_links(made_up(100, 90, 20, 95), True)
    assert told == "ranks 2: all_reduce 20.00 GiB/s, the median in a node is 92.50"
    assert judge_links(made_up(100, 90, 20, 95), False) == []  # on one machine's loopback
    # Links between nodes are held to their own kind.
    assert judge_links(made_up(100, 90, 110) + made_up(10, 11, 12, kind="between nodes"), True) == []


def test_a_link_with_a_problem_is_bad_and_no_measure_for_others():
    speeds_of_links = made_up(100, 90, 0, 95)
    speeds_of_links[2]["problem"] = "all_reduce gave wrong values"
    assert judge_links(speeds_of_links, True) == ["ranks 2: all_reduce gave wrong values"]


def outcome(device: str, *problems: str):
    whole = {"ranks": "all", "kind": "all", "problem": "", "all_reduce": 2.0, "all_to_all": 3.0}
    speeds_of_links = [*made_up(*[1.0] * len(problems)), whole]
    for link, problem in zip(speeds_of_links, problems):
        link["problem"] = problem
    return rates._outcome(speeds_of_links, len(problems), device)


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


# -- nodes


def test_nodes_that_see_each_other(tmp_path):
    good = machine.judge_nodes(tmp_path, {0: "a", 1: "b"}, {}, {"b": 0.5})
    assert (good.status, good.figures["clock_skew_s"]) == ("pass", {"b": 0.5})
    assert "seen by 2 of 2 nodes" in good.reason


def test_a_folder_that_is_not_shared(tmp_path):
    bad = machine.judge_nodes(tmp_path, {0: "a", 1: "b", 2: "c"}, {"a": "1,2"}, {})
    assert bad.status == "fail"
    assert bad.reason.endswith("a does not see files of b, c")
    assert "--shared" in bad.fix


@pytest.mark.parametrize("skew", [-60.0, 5.1])
def test_clocks_that_differ(tmp_path, skew):
    bad = machine.judge_nodes(tmp_path, {0: "a", 1: "b"}, {}, {"b": skew})
    assert (bad.status, f"b {skew:+.1f} s" in bad.reason) == ("fail", True)


def test_files_that_are_not_there_or_say_something_else_are_unseen(tmp_path):
    folder = tmp_path / ".doctor-x"
    folder.mkdir()
    (folder / "0").write_text(".doctor-x 0")
    (folder / "2").write_text("of an earlier call")
    assert machine._unseen(folder, 3) == [1, 2]


class Store:
    """A peer whose clock is ``ahead`` seconds ahead."""

    def __init__(self, ahead: float) -> None:
        self.ahead = ahead

    def set(self, key, value):
        self.at = machine.time.time() + self.ahead

    def get(self, key):
        return repr(self.at).encode()


@pytest.mark.parametrize("ahead", [0.0, 30.0, -30.0])
def test_skew_leaves_out_what_the_way_explains(ahead):
    assert machine._skew(Store(ahead), 1) == pytest.approx(ahead, abs=1.0)
