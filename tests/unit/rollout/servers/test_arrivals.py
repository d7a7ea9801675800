"""Groups of a batch as they become complete: in which order, once each, and how the one who waits hears of them."""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import Future

import pytest

from megatron_rl.rollout import LegCounts, RolloutError
from megatron_rl.rollout.requests import make_requests
from megatron_rl.rollout.servers.arrivals import Arrivals, next_arrivals
from megatron_rl.rollout.servers.generator import Ticket
from megatron_rl.types import Prompt
from tests.support.groups import any_response
from tests.support.patience import PATIENCE_S

PROMPTS = [Prompt(id=f"p{i}", tokens=[1], answer="") for i in range(5)]


def begun(num_prompts: int, num_samples: int, news: threading.Condition | None = None) -> Ticket:
    """A batch of which this process fetches everything."""
    prompts = [PROMPTS[i % 5] for i in range(num_prompts)]
    requests = make_requests(prompts, num_samples, seed=0, step=0)
    arrivals = Arrivals(requests, news or threading.Condition())
    return Ticket(
        prompts,
        num_samples,
        requests,
        [0] * len(requests),
        0,
        answers=Future(),
        arrivals=arrivals,
        num_left=num_prompts,
    )


def fetch(ticket: Ticket, number: int, length: int = 1, counts: LegCounts = LegCounts(1, 1)) -> None:  # noqa: B008
    """The answer to request ``number`` arrives."""
    request, done = ticket.requests[number], Future()
    done.set_result(any_response(request.sequence_id, length))
    ticket.arrivals.fetched(request.row, counts, done)


def test_a_group_arrives_with_its_last_answer_and_only_once():
    ticket = begun(3, 2)
    for number in (3, 0, 5, 2):
        fetch(ticket, number)
    (place,), (taken,) = zip(*ticket.arrivals.take(time.perf_counter()).items(), strict=True)
    assert (place, [rollout.sample for rollout in taken.rollouts]) == (1, [0, 1])
    assert taken.age_s >= 0
    assert not ticket.arrivals
    assert ticket.arrivals.take(time.perf_counter()) == {}
    for number in (4, 1):
        fetch(ticket, number)
    taken = ticket.arrivals.take(time.perf_counter())
    assert list(taken) == [2, 0], "the order of completion"
    assert taken[2].age_s >= taken[0].age_s >= 0


def test_groups_of_several_batches_come_in_the_order_of_completion():
    news = threading.Condition()
    tickets = [begun(2, 1, news), begun(2, 1, news)]
    for ticket, number in ((1, 1), (0, 0), (1, 0)):
        fetch(tickets[ticket], number)
    arrived = next_arrivals(tickets, news, num_fetchers=1)
    assert [(tickets.index(arrival.ticket), arrival.place) for arrival in arrived] == [(1, 1), (0, 0), (1, 0)]
    assert [arrival.group.prompt.id for arrival in arrived] == ["p1", "p0", "p0"]
    assert {rollout.owner for arrival in arrived for rollout in arrival.group.rollouts} == {0}


def test_a_group_brings_how_updates_met_its_responses():
    news = threading.Condition()
    ticket = begun(2, 2, news)
    for number, counts in enumerate([LegCounts(1, 1), LegCounts(3, 2, 9), LegCounts(1, 1), LegCounts(2, 2, 5)]):
        fetch(ticket, number, counts=counts)
    assert [arrival.counts for arrival in next_arrivals([ticket], news, num_fetchers=1)] == [
        LegCounts(4, 3, 9),
        LegCounts(3, 3, 5),
    ]
    assert LegCounts(4, 3, 9).metrics(2) == {
        "rollout/legs_mean": 2.0,
        "rollout/versions_mean": 1.5,
        "rollout/recomputed_tokens": 9.0,
    }


def test_tokens_of_complete_responses_in_groups_that_were_not_taken():
    ticket = begun(3, 2)
    for number in (0, 1, 3):
        fetch(ticket, number, length=10 + number)
    assert ticket.arrivals.num_tokens_left == 10 + 11 + 13
    assert list(ticket.arrivals.take(time.perf_counter())) == [0]
    assert ticket.arrivals.num_tokens_left == 13


@pytest.mark.parametrize("first", ["cancel", "turn"])
def test_a_batch_that_is_cancelled_asks_for_nothing_more(first):
    class Dispatch:
        num_requeued, given_up = 3, 0

        def give_up_all(self):
            self.given_up += 1

    ticket, dispatch = begun(1, 1), Dispatch()
    assert ticket.arrivals.num_requeued == 0
    if first == "cancel":
        asyncio.run(ticket.arrivals.cancel())
        ticket.arrivals.asks(dispatch)
    else:
        ticket.arrivals.asks(dispatch)
        assert dispatch.given_up == 0
        asyncio.run(ticket.arrivals.cancel())
    assert dispatch.given_up == 1
    assert ticket.arrivals.num_requeued == 3


def test_what_ended_the_fetching_is_raised_although_a_group_is_there():
    ticket = begun(2, 1)
    fetch(ticket, 0)
    ticket.answers.set_exception(RolloutError("no server is left"))
    with pytest.raises(RolloutError, match="no server is left"):
        next_arrivals([ticket], threading.Condition(), num_fetchers=1)


def test_a_response_that_is_wrong_completes_no_group():
    ticket, broken = begun(1, 1), Future()
    broken.set_exception(RolloutError("log-prob nan"))
    ticket.arrivals.fetched(0, LegCounts(), broken)
    assert not ticket.arrivals


def test_there_is_one_event_a_group():
    """Whoever waits is woken twice for two groups of 500 responses, not a thousand times."""
    news, woken, is_ready = threading.Condition(), [], threading.Event()
    ticket = begun(2, 500, news)

    def wait():
        with news:
            is_ready.set()
            while len(woken) < 2:
                assert news.wait(PATIENCE_S)
                woken.append(len(ticket.arrivals.take(time.perf_counter())))

    waiter = threading.Thread(target=wait)
    waiter.start()
    is_ready.wait(PATIENCE_S)
    for number in range(1000):
        fetch(ticket, number)
        deadline = time.monotonic() + PATIENCE_S
        while number == 499 and not woken and time.monotonic() < deadline:
            time.sleep(0.001)
    waiter.join(PATIENCE_S)
    assert woken == [1, 1]
