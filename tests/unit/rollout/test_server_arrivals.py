"""Groups of a call as they become complete: in which order, once each, and how the one who waits hears of them."""

from __future__ import annotations

import threading
import time

from megatron_rl.rollout.servers.arrivals import Arrivals


def test_a_group_arrives_with_its_last_answer_and_only_once():
    arrivals = Arrivals([0, 0, 1, 1, 4, 4], threading.Condition())
    for number in (2, 0, 5, 3):
        arrivals.answered(number, f"answer {number}")
    assert [(place, answers) for place, answers, _ in arrivals.take()] == [(1, ["answer 2", "answer 3"])]
    assert not arrivals
    assert arrivals.take() == []
    for number in (4, 1):
        arrivals.answered(number, f"answer {number}")
    taken = arrivals.take()
    assert [place for place, _, _ in taken] == [4, 0], "the order of completion"
    assert taken[1][1] == ["answer 0", "answer 1"]
    assert taken[0][2] >= taken[1][2] >= 0, "older first"
    assert arrivals.left() == []


def test_answers_of_incomplete_groups_are_left():
    arrivals = Arrivals([0, 0, 1, 1], threading.Condition())
    for number in (0, 1, 3):
        arrivals.answered(number, number)
    assert [place for place, _, _ in arrivals.take()] == [0]
    assert arrivals.left() == [3]


def test_there_is_one_event_a_group():
    """Whoever waits is woken twice for two groups of 500 answers, not a thousand times."""
    news, woken = threading.Condition(), []
    arrivals = Arrivals([number // 500 for number in range(1000)], news)
    ready = threading.Event()

    def wait():
        with news:
            ready.set()
            while len(woken) < 2:
                assert news.wait(60)
                woken.append(len(arrivals.take()))

    waiter = threading.Thread(target=wait)
    waiter.start()
    ready.wait(60)
    for number in range(1000):
        arrivals.answered(number, None)
        if number == 499:
            deadline = time.monotonic() + 60
            while not woken and time.monotonic() < deadline:
                time.sleep(0.001)
    waiter.join(60)
    assert woken == [1, 1]
