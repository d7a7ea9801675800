"""Which server a request goes to, and that each is answered exactly once whatever servers do; made-up servers."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.rollout.servers.client import ServerLost, StaleServer, Weights
from megatron_rl.rollout.servers.dispatch import Balance, Dispatch
from megatron_rl.rollout.servers.pool import Member, Members, PoolLimits, ServerPool
from megatron_rl.rollout.servers.rendezvous import Address
from megatron_rl.rollout.servers.wire import Load, Meter
from megatron_rl.types import Rollout


def member(number: int, in_flight: int = 0, elsewhere: int = 0) -> Member:
    address = Address(f"s{number}", f"http://s{number}")
    return Member(address, SimpleNamespace(elsewhere=elsewhere), number, in_flight=in_flight)


def chosen(balance: Balance, members: list[Member], num_requests: int) -> list[int]:
    """Numbers of the servers that are asked, when none of them answers."""
    numbers = []
    for index in range(num_requests):
        one = balance.choose(members, index)
        one.in_flight += 1
        numbers.append(one.number)
    return numbers


def test_samples_of_a_prompt_go_to_one_server_until_its_queue_is_much_longer():
    first, second = member(1), member(2)
    balance = Balance(["p"] * 9, slack=3)
    # four on the first, where the fifth would find a queue longer by 4; then the second is the prompt's server
    assert chosen(balance, [first, second], 9) == [1, 1, 1, 1, 2, 2, 2, 2, 2]
    assert [Balance(["p", "q"], 3).choose([first, second], i).number for i in range(2)] == [1, 1]


def test_requests_that_are_added_go_to_the_server_of_their_prompt():
    balance = Balance([], slack=3)
    dispatch = Dispatch(SimpleNamespace(), [], [], concurrency=4, retries=0, balance=balance, is_open=True)
    assert [dispatch.add({}, f"turn {number}", "p") for number in range(4)] == [0, 1, 2, 3]
    assert chosen(balance, [member(1), member(2)], 4) == [1, 1, 1, 1]


def test_without_a_cache_the_shortest_queue_is_asked():
    assert sorted(chosen(Balance(["p"] * 6, slack=0), [member(1), member(2)], 6)) == [1, 1, 1, 2, 2, 2]


def test_requests_of_other_ranks_count():
    busy, idle = member(1, in_flight=0, elsewhere=40), member(2, in_flight=9)
    assert Balance(["p"], 3).choose([busy, idle], 0) is idle
    full = Balance(["p"] * 2, 3)
    assert full.choose([busy], 0) is busy
    assert full.choose([idle], 1) is idle, "a server without room is not among those to choose from"


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9)), min_size=1, max_size=60), st.integers(0, 4))
def test_no_queue_is_longer_than_the_shortest_by_more_than_the_slack_and_one(requests, slack):
    servers = [member(number) for number in (1, 2, 3)]
    balance = Balance([prompt for _, prompt in requests], slack)
    for index in range(len(requests)):
        balance.choose(servers, index).in_flight += 1
        queues = [server.queue for server in servers]
        assert max(queues) - min(queues) <= slack + 1


def test_a_server_says_how_busy_it_is():
    meter = Meter()
    assert meter.load() == Load()
    meter.under_way = 2
    assert Load.of(meter.header()) == Load(running=2)
    assert Load.of(None) == Load()
    assert Load.of({"running": 2, "waiting": 3, "of a later version": 1}).queue == 5


class Chaos:
    """A server that does what a list says, request by request; after it, it answers."""

    def __init__(self, name: str, world: dict) -> None:
        self.name, self.world, self.version, self.is_closed = name, world, 0, False
        self.elsewhere = 0

    async def settings(self) -> dict:
        self._check()
        return {"version": self.version}

    def _check(self) -> None:
        if self.name in self.world["dead"]:
            raise ServerLost("refused", is_final=True)

    async def push(self, weights: Weights) -> dict:
        self._check()
        self.version = weights.version
        return {"tensors": 0, "bytes": 0}

    async def generate(self, body: dict, version: int) -> Rollout:
        world, plan = self.world, self.world["plans"][self.name]
        world["now"][self.name] = world["now"].get(self.name, 0) + 1
        world["most"] = max(world["most"], world["now"][self.name])
        try:
            self._check()
            what = plan.pop(0) if plan else "answer"
            await asyncio.sleep(0.001 * body["delay"])
            if what == "die":
                world["dead"].add(self.name)
                asyncio.get_running_loop().call_later(0.02, world["dead"].discard, self.name)
                raise ServerLost("reset")
            if what == "fail":
                raise ServerLost("no answer in time")
            if what == "stale" or self.version != version:
                raise StaleServer("other weights")
            world["answered"].append(body["index"])
            return Rollout(
                "", (), np.array([body["index"]], np.int32), np.zeros(1, np.float32), np.full(1, version), "stop"
            )
        finally:
            world["now"][self.name] -= 1

    async def close(self) -> None:
        self.is_closed = True


def chaotic(world: dict, names: list[str]) -> ServerPool:
    return ServerPool(
        PoolLimits(20.0, 0.005),
        discover=lambda: [Address(name, f"http://{name}") for name in names],
        connect=lambda address: Chaos(address.name, world),
        problems=lambda settings: [],
        say=lambda line: None,
    )


EVENTS = st.lists(st.sampled_from(["answer", "answer", "answer", "die", "fail", "stale"]), max_size=12)


@settings(max_examples=25)
@given(
    st.lists(EVENTS, min_size=1, max_size=3),
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4)), min_size=1, max_size=25),
    st.integers(2, 4),
    st.integers(0, 3),
)
def test_each_request_is_answered_exactly_once_whatever_servers_do(plans, requests, concurrency, num_given_up):
    """Two ranks ask the same servers. Some requests are given up; the rest have one answer each."""
    names = [f"s{i}" for i in range(len(plans))]
    world = {"plans": dict(zip(names, map(list, plans))), "dead": set(), "answered": [], "now": {}, "most": 0}
    bodies = [{"index": i, "delay": delay} for i, (delay, _) in enumerate(requests)]

    async def scene():
        pools = [chaotic(world, names) for _ in range(2)]  # each rank has its own view of the servers
        try:
            ranks = []
            for rank, pool in enumerate(pools):
                await pool.start(len(names))
                mine = bodies[rank::2]
                balance = Balance([requests[body["index"]][1] for body in mine], slack=1)
                labels = [str(body["index"]) for body in mine]
                ranks.append(Dispatch(pool, mine, labels, concurrency, retries=99, share=(rank, 2), balance=balance))
            work = [asyncio.create_task(collect(dispatch)) for dispatch in ranks]
            await asyncio.sleep(0.002)
            for dispatch in ranks:
                dispatch.give_up(range(num_given_up))
            async with asyncio.timeout(30):
                answers = await asyncio.gather(*work)
            assert all(m.in_flight == 0 for pool in pools for m in pool.members.values() if not m.lost)
            return answers
        finally:
            for pool in pools:
                await pool.close()

    for rank, answered in enumerate(asyncio.run(scene())):
        mine = bodies[rank::2]
        indices = [index for index, _ in answered]
        assert len(indices) == len(set(indices)), "none twice"
        assert set(range(num_given_up, len(mine))) <= set(indices) <= set(range(len(mine)))
        assert all(int(answer.tokens[0]) == mine[index]["index"] for index, answer in answered)
    assert len(world["answered"]) == len(set(world["answered"])), "no server answered what another had"
    if concurrency % 2 == 0 and not any("die" in plan for plan in plans):  # a pool of its own numbers servers anew
        assert world["most"] <= concurrency, "both ranks together"


async def collect(dispatch: Dispatch) -> list[tuple[int, Rollout]]:
    return [item async for item in dispatch.completions()]


def test_a_call_that_ends_early_takes_its_requests_back():
    world = {"plans": {"s0": []}, "dead": set(), "answered": [], "now": {}, "most": 0}

    async def scene():
        pool = chaotic(world, ["s0"])
        try:
            await pool.start(1)
            dispatch = Dispatch(pool, [{"index": i, "delay": 50 * i} for i in range(4)], list("abcd"), 4, 0)
            completions = dispatch.completions()
            first = await anext(completions)
            await completions.aclose()
            await asyncio.sleep(0.01)
            return first[0], world["now"]["s0"], pool.members["s0"].in_flight
        finally:
            await pool.close()

    assert asyncio.run(scene()) == (0, 0, 0)
    assert world["answered"] == [0]


@pytest.mark.parametrize(("concurrency", "ranks"), [(7, 3), (5, 4), (8, 4), (9, 2)])
def test_what_of_a_servers_room_does_not_divide_evenly_goes_to_each_rank_in_turn(concurrency, ranks):
    shares = [
        Dispatch(Members(PoolLimits(1.0, 1.0), lambda: False), [], [], concurrency, 0, (rank, ranks))
        for rank in range(ranks)
    ]
    servers = [member(number) for number in range(ranks)]
    for server in servers:
        assert sum(share._room(server) for share in shares) == concurrency
    for share in shares:
        assert sum(share._room(server) for server in servers) == concurrency, "over as many servers as ranks"


def test_a_rank_without_room_is_a_mistake_of_the_caller():
    with pytest.raises(AssertionError, match="would wait for ever"):
        Dispatch(None, [], [], concurrency=2, retries=0, share=(2, 3))
