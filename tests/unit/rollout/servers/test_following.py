"""A rank that follows rank 0's servers while weights change: real pool, dispatch and exchange, made-up servers."""

from __future__ import annotations

import asyncio
from collections import Counter

import numpy as np

from megatron_rl.rollout.servers import following
from megatron_rl.rollout.servers.client import ServerLost, StaleServer, Weights
from megatron_rl.rollout.servers.dispatch import Dispatch
from megatron_rl.rollout.servers.following import Follower, Publisher
from megatron_rl.rollout.servers.pool import PoolLimits, ServerPool
from megatron_rl.rollout.servers.rendezvous import Address
from megatron_rl.types import Rollout
from tests.support.patience import PATIENCE_S

LIMITS = PoolLimits(wait_s=PATIENCE_S, health_every_s=0.01)
NAMES = [f"s{i}" for i in range(6)]


class Board:
    """A `following.StoreBoard` in this process."""

    def __init__(self) -> None:
        self.texts: dict[str, dict] = {}

    def write(self, name, content):
        self.texts[name] = content

    def read(self, names):
        return [self.texts[name] for name in names]


class Server:
    """One rank's end of a server. ``held``: the weights of all servers. ``refused``: requests, by (server, request,
    version)."""

    def __init__(self, name: str, held: dict[str, int | None], refused: Counter, dead: set[str]) -> None:
        self.name, self.held, self.refused, self.dead, self.has_begun = name, held, refused, dead, False

    async def settings(self):
        self._check()
        return {"version": self.held.get(self.name)}

    def _check(self):
        if self.name in self.dead:
            raise ServerLost("refused", is_final=True)

    async def push(self, weights):
        self.held[self.name] = None  # closed while it loads
        await asyncio.sleep(0.05)
        self.held[self.name] = weights.version
        return {"tensors": 0, "bytes": 0}

    async def generate(self, body, version):
        self.has_begun = True
        for seconds in (0.001, 0.02):  # when it comes, and when it has been sampled
            await asyncio.sleep(seconds)
            self._check()
            if self.held[self.name] != version:
                self.refused[self.name, body["index"], version] += 1
                raise StaleServer("other weights")
        return Rollout(
            "", (), np.array([body["index"]], np.int32), np.zeros(1, np.float32), np.full(1, version), "stop"
        )

    async def close(self):
        pass


def play(scene, monkeypatch):
    """``scene`` (pool, follower, names of dead servers) in one event loop; its result and the requests refused."""
    monkeypatch.setattr(following, "LOOK_S", 0.2)  # the follower hears of an update when all servers are in it
    held, refused, dead, board = {}, Counter(), set(), Board()

    def connect(address):
        return Server(address.name, held, refused, dead)

    async def run():
        pool = ServerPool(
            LIMITS,
            discover=lambda: [Address(name, f"http://{name}") for name in NAMES if name not in dead],
            connect=connect,
            problems=lambda settings: [],
            say=lambda line: None,
        )
        await pool.start(len(NAMES))
        publisher = Publisher(pool, board, [1], stop=lambda: False)
        follower = Follower(LIMITS, board, 1, connect)
        follower.start()
        await publisher.start()
        try:
            await follower.wait_for(lambda: len(follower.ready) == len(NAMES), "all servers")
            async with asyncio.timeout(PATIENCE_S):
                return await scene(pool, follower, dead)
        finally:
            await follower.close()
            await publisher.close()
            await pool.close()

    return asyncio.run(run()), refused


def ask(follower, number, retries):
    return Dispatch(follower, [{"index": i} for i in range(number)], [str(i) for i in range(number)], number, retries)


async def begun(follower):
    """A request is under way."""
    while not any(member.client.has_begun for member in follower.ready):
        await asyncio.sleep(0)


def test_a_request_that_finds_every_server_in_an_update_has_not_failed(monkeypatch):
    """As it is where an update comes while a follower asks: it hears of it a look later than the servers."""

    async def scene(pool, follower, dead):
        asked = asyncio.create_task(ask(follower, 30, retries=0).run())
        await begun(follower)
        await pool.push(Weights(1))
        return [int(answer.tokens[0]) for answer in await asked]

    outcome, refused = play(scene, monkeypatch)
    assert outcome == list(range(30))
    assert refused, "the update came while requests were under way"
    assert max(refused.values()) == 1, "a server that was found to be in an update is asked again after it"


def test_a_request_that_servers_refuse_and_then_a_dying_one_fails_has_failed_once(monkeypatch):
    async def scene(pool, follower, dead):
        asked = asyncio.create_task(ask(follower, 30, retries=1).run())
        await begun(follower)
        push = asyncio.create_task(pool.push(Weights(1)))
        await follower.wait_for(lambda: bool(follower.ready) and follower.due == 1, "the update")
        dead.add(follower.ready[0].address.name)
        await push
        return [int(answer.tokens[0]) for answer in await asked]

    outcome, refused = play(scene, monkeypatch)
    assert outcome == list(range(30))
    assert refused


def test_a_server_that_was_started_anew_is_not_used_until_it_has_its_weights(monkeypatch):
    """Rank 0 sees it when it looks."""

    async def scene(pool, follower, dead):
        member = follower.ready[0]
        member.client.held[member.address.name] = None
        follower.mark_stale(member, member.version)
        assert member not in follower.ready
        while pool.members[member.address.name].updates < 2:
            await asyncio.sleep(0.005)
            assert member not in follower.ready or pool.members[member.address.name].updates == 2
        await follower.wait_for(lambda: member in follower.ready, "the weights, again")

    play(scene, monkeypatch)


def test_a_doubt_of_a_server_that_is_well_costs_nothing_but_rank_0s_look(monkeypatch):
    async def scene(pool, follower, dead):
        member = follower.ready[0]
        await follower.suspect(member, ServerLost("no answer in time"))
        assert member not in follower.ready
        await follower.wait_for(lambda: member in follower.ready, "rank 0's look")
        return [m.updates for m in pool.members.values()]

    assert play(scene, monkeypatch)[0] == [1] * len(NAMES)
