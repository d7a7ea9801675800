"""Who is asked for what, and what happens when servers die, hang, lag or come back: real pool, made-up servers."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import numpy as np
import pytest

from megatron_rl.errors import InputError
from megatron_rl.rollout import RolloutError
from megatron_rl.rollout.generator import RolloutInterrupted
from megatron_rl.rollout.servers.client import RequestRefused, ServerLost, StaleServer, Weights
from megatron_rl.rollout.servers.dispatch import Dispatch
from megatron_rl.rollout.servers.pool import PoolLimits, ServerPool
from megatron_rl.rollout.servers.rendezvous import Address
from megatron_rl.types import Rollout
from tests.support.patience import PATIENCE_S

LIMITS = PoolLimits(wait_s=PATIENCE_S, health_every_s=0.01)


@dataclass
class World:
    """Servers as the tests script them. ``answered``: (server, request, version) of every answer that was sent."""

    alive: set[str] = field(default_factory=set)
    held: dict[str, int] = field(default_factory=dict)
    hanging: set[str] = field(default_factory=set)
    misses: dict[str, list[bool]] = field(default_factory=dict)  # whether each coming look at its health is missed
    refuses: set[int] = field(default_factory=set)
    fails: dict[str, int] = field(default_factory=dict)  # how many requests a healthy server still fails
    dies_after: dict[str, int] = field(default_factory=dict)  # answers it gives before it dies
    answered: list[tuple[str, int, int]] = field(default_factory=list)
    most_in_flight: dict[str, int] = field(default_factory=dict)
    settings: dict[str, str] = field(default_factory=lambda: {"dtype": "fp32"})
    pushes: list[tuple[str, int]] = field(default_factory=list)
    looks: list[str] = field(default_factory=list)  # servers that were asked for their settings


class FakeClient:
    """A server in this process; what it does is `World`'s to say."""

    def __init__(self, name: str, world: World) -> None:
        self.name, self.world, self.in_flight, self.closed = name, world, 0, asyncio.Event()
        self.elsewhere, self.has_joined = 0, False

    def _check(self) -> None:
        if self.name not in self.world.alive:
            raise ServerLost("connection refused", is_final=True)

    async def settings(self) -> dict:
        self._check()
        self.world.looks.append(self.name)
        if self.has_joined:
            missed = self.world.misses[self.name].pop(0) if self.world.misses.get(self.name) else False
            if missed or self.name in self.world.hanging:
                raise ServerLost("no answer")
        return {"version": self.world.held.get(self.name), **self.world.settings}

    async def push(self, weights: Weights) -> None:
        self._check()
        await asyncio.sleep(0)
        self._check()
        self.world.held[self.name], self.has_joined = weights.version, True
        self.world.pushes.append((self.name, weights.version))

    async def generate(self, body: dict, version: int) -> Rollout:
        self._check()
        self.in_flight += 1
        self.world.most_in_flight[self.name] = max(self.world.most_in_flight.get(self.name, 0), self.in_flight)
        try:
            await asyncio.sleep(0.001)
            if self.name in self.world.hanging:
                await self.closed.wait()
                raise ServerLost("connection closed")
            if self.world.fails.get(self.name, 0) > 0:
                self.world.fails[self.name] -= 1
                raise ServerLost("no answer in time")
            if self.world.dies_after.get(self.name) == 0:
                self.world.alive.discard(self.name)
                raise ServerLost("connection reset")
            self._check()
        finally:
            self.in_flight -= 1
        if body["index"] in self.world.refuses:
            raise RequestRefused("status 400: too long")
        if self.world.held.get(self.name) != version:
            raise StaleServer("other weights")
        if self.name in self.world.dies_after:
            self.world.dies_after[self.name] -= 1
        self.world.answered.append((self.name, body["index"], version))
        tokens = np.array([body["index"]], np.int32)
        return Rollout("", (), tokens, np.full(1, -0.5, np.float32), np.full(1, version, np.int32), "stop")

    async def close(self) -> None:
        self.closed.set()


def play(
    world: World,
    scene,
    limits: PoolLimits = LIMITS,
    names: tuple[str, ...] = ("a", "b"),
    problems=None,
    stop=lambda: False,
    discover=None,
):
    """Run ``scene(pool)`` with servers ``names`` alive; returns its result and what the pool said."""
    said: list[str] = []

    async def run():
        pool = ServerPool(
            limits,
            discover=discover or (lambda: [Address(name, f"http://{name}") for name in names]),
            connect=lambda address: FakeClient(address.name, world),
            problems=problems or (lambda settings: []),
            say=said.append,
            stop=stop,
        )
        try:
            return await scene(pool)
        finally:
            await pool.close()

    world.alive |= set(names) if not world.alive else set()
    return asyncio.run(run()), said


def ask(pool: ServerPool, number: int, concurrency: int = 4, retries: int = 3) -> Dispatch:
    return Dispatch(
        pool, [{"index": i} for i in range(number)], [f"prompt {i}" for i in range(number)], concurrency, retries
    )


def tokens(answers: list[Rollout]) -> list[int]:
    return [int(answer.tokens[0]) for answer in answers]


def test_every_request_is_answered_once_in_order_and_load_is_shared():
    world = World()

    async def scene(pool):
        await pool.start(2)
        return await ask(pool, 50).run()

    answers, _ = play(world, scene)
    assert tokens(answers) == list(range(50))
    assert sorted(index for _, index, _ in world.answered) == list(range(50))
    assert world.most_in_flight == {"a": 4, "b": 4}
    by_server = [sum(name == server for name, _, _ in world.answered) for server in "ab"]
    assert min(by_server) >= 20


def test_a_death_sends_its_requests_to_the_rest():
    world = World(dies_after={"a": 3})

    async def scene(pool):
        await pool.start(2)
        dispatch = ask(pool, 40)
        return await dispatch.run(), dispatch.num_requeued

    (answers, requeued), said = play(world, scene)
    assert tokens(answers) == list(range(40))
    assert sorted(index for _, index, _ in world.answered) == list(range(40))  # none twice
    assert sum(name == "a" for name, _, _ in world.answered) == 3
    assert 1 <= requeued <= 4
    assert any("server a is lost" in line for line in said)


def test_a_hanging_server_is_found_by_its_health_and_its_requests_are_asked_elsewhere():
    world = World(hanging={"a"})

    async def scene(pool):
        await pool.start(2)
        return await ask(pool, 20).run()

    answers, said = play(world, scene)
    assert tokens(answers) == list(range(20))
    assert {name for name, _, _ in world.answered} == {"b"}
    assert any("server a is lost: no answer" in line for line in said)


@pytest.mark.parametrize(("looks", "is_lost"), [("--+--+", False), ("---+", True)])
def test_a_server_is_lost_after_three_looks_in_a_row_without_an_answer(looks, is_lost):
    world = World(misses={"a": [look == "-" for look in looks]})

    async def scene(pool):
        await pool.start(2)
        async with asyncio.timeout(PATIENCE_S):
            while world.misses["a"]:
                await asyncio.sleep(0)

    _, said = play(world, scene)
    assert any("server a is lost: no answer" in line for line in said) == is_lost


def test_with_all_servers_dead_the_call_ends_with_what_is_missing():
    world = World(dies_after={"a": 5, "b": 5})

    async def scene(pool):
        await pool.start(2)
        return await ask(pool, 40).run()

    with pytest.raises(RolloutError, match=r"waited 0.3 s .*30 of 40 responses.*a is lost \(.*b is lost \("):
        play(world, scene, PoolLimits(0.3, 0.01))


def test_a_server_that_comes_back_gets_the_newest_weights_before_it_is_asked():
    world = World()

    async def scene(pool):
        await pool.start(2)
        world.alive.discard("a")
        await pool.push(Weights(1))
        first = await ask(pool, 8).run()
        world.alive.add("a")
        await pool.push(Weights(2))
        await pool.wait_for(lambda: len(pool.ready) == 2, "both")
        return first, await ask(pool, 20).run()

    (first, second), _ = play(world, scene)
    assert (tokens(first), tokens(second)) == (list(range(8)), list(range(20)))
    assert {(name, version) for name, _, version in world.answered} == {("b", 1), ("a", 2), ("b", 2)}
    assert ("a", 1) not in world.pushes


def test_a_server_in_an_update_that_was_given_up_is_let_in_when_that_has_ended():
    """It answers, and would take no other update before."""
    world = World()

    async def scene(pool):
        await pool.start(1)
        world.settings = {"replacing": True}
        world.alive.add("b")
        looks = len(world.looks)
        await pool.until(lambda: world.looks[looks:].count("b") >= 3, "some looks")
        assert "b" not in pool.members
        world.settings = {"replacing": False}
        await pool.wait_for(lambda: len(pool.ready) == 2, "both")

    world.alive.add("a")
    play(world, scene, PATIENT)
    assert world.pushes == [("a", 0), ("b", 0)]


def test_a_server_that_lost_its_weights_is_not_used_until_it_has_them_again():
    """Restarted behind the pool's back: it holds nothing, says so, and is given the version that is due."""
    world = World()

    async def scene(pool):
        await pool.start(2)
        await pool.push(Weights(3))
        world.held["a"] = -1
        answers = await ask(pool, 30).run()
        # The other server may answer everything before the next look at this one.
        await pool.wait_for(lambda: world.pushes.count(("a", 3)) >= 2, "the weights that are due")
        return answers

    answers, _ = play(world, scene, PATIENT)
    assert tokens(answers) == list(range(30))
    assert {version for _, _, version in world.answered} == {3}
    assert world.held["a"] == 3


def test_an_update_that_is_quicker_than_a_request_is_no_failure_of_it():
    async def scene(pool):
        await pool.start(1)
        world.held["a"] = -1  # until the pool looks at it
        return await ask(pool, 6, retries=0).run()

    world = World()
    assert tokens(play(world, scene, PATIENT, names=("a",))[0]) == list(range(6))


def test_a_server_that_never_holds_what_it_was_given_ends_the_call(monkeypatch):
    async def forgets(client, weights):
        world.pushes.append((client.name, weights.version))

    async def scene(pool):
        await pool.start(1)
        await ask(pool, 1).run()

    world = World(held={"a": -1})
    monkeypatch.setattr(FakeClient, "push", forgets)
    with pytest.raises(RolloutError, match=r"prompt 0: failed 4 times, last on a: other weights"):
        play(world, scene, PATIENT, names=("a",))
    # The first time may be an update that was quicker than the request; a look between two requests gives them again.
    assert len(world.pushes) >= 5


def test_a_request_that_always_fails_ends_the_call_with_its_name():
    world = World(fails={"a": 1000, "b": 1000})

    async def scene(pool):
        await pool.start(2)
        return await ask(pool, 1, retries=2).run()

    with pytest.raises(RolloutError, match=r"prompt 0: failed 3 times, last on .: no answer"):
        play(world, scene)


def test_a_refused_request_is_not_asked_again():
    world = World(refuses={5})

    async def scene(pool):
        await pool.start(2)
        return await ask(pool, 10).run()

    with pytest.raises(RolloutError, match=r"prompt 5: . refused it: status 400"):
        play(world, scene)


def test_a_server_that_does_not_fit_the_recipe_ends_the_start():
    async def scene(pool):
        await pool.start(2)

    with pytest.raises(InputError, match="server a: dtype: the server has bf16"):
        play(World(), scene, problems=lambda settings: ["dtype: the server has bf16, the recipe says fp32"])


def test_too_few_servers_end_the_start():
    async def scene(pool):
        await pool.start(2)

    with pytest.raises(RolloutError, match=r"waited 0.2 s .* for 2 servers: 1 can be used"):
        play(World(alive={"b"}), scene, PoolLimits(0.2, 0.01))


PATIENT = PoolLimits(wait_s=600.0, health_every_s=0.01)  # a test that waits for it fails


def test_waiting_for_servers_ends_when_a_stop_is_asked_for():
    """At the start, and in the middle when the last server has died."""
    world, asked = World(), []

    async def start(pool):
        asyncio.get_running_loop().call_later(0.05, asked.append, True)
        with pytest.raises(RolloutInterrupted, match="a stop was asked for while waiting for 3 servers"):
            await pool.start(3)

    play(world, start, PATIENT, stop=lambda: bool(asked))
    asked.clear()
    world = World(dies_after={"a": 3, "b": 3})

    async def sample(pool):
        await pool.start(2)
        asyncio.get_running_loop().call_later(0.05, asked.append, True)
        with pytest.raises(RolloutInterrupted, match=r"while waiting for a server to sample from \(4[0-9] of 50"):
            await ask(pool, 50).run()

    play(world, sample, PATIENT, stop=lambda: bool(asked))


def test_a_stop_does_not_keep_servers_that_answer_from_finishing_the_batch():
    world, asked = World(), []

    async def scene(pool):
        await pool.start(2)
        asked.append(True)
        return await ask(pool, 50).run()

    assert tokens(play(world, scene, PATIENT, stop=lambda: bool(asked))[0]) == list(range(50))


def test_what_ends_the_search_for_servers_ends_the_waiting():
    """Launched servers that cannot be started again are such a reason."""
    world, gone = World(dies_after={"a": 3, "b": 3}), []

    def discover():
        if not gone and not world.alive:
            gone.append(True)
        if gone:
            raise RolloutError("no server can be started")
        return [Address(name, f"http://{name}") for name in "ab"]

    async def scene(pool):
        await pool.start(2)
        with pytest.raises(RolloutError, match="no server can be started"):
            await ask(pool, 50).run()
        return True

    assert play(world, scene, PATIENT, discover=discover)[0]


@pytest.mark.parametrize(
    ("updates", "looks", "is_used"), [(0, 0, False), (0, 1, False), (0, 2, True), (1, 0, True)], ids=str
)
def test_a_server_that_failed_a_request_is_used_after_an_update_or_a_look_that_began_since(updates, looks, is_used):
    """The first look that ends may have begun before the request failed."""

    async def scene(pool):
        await pool.start(1)
        member = pool.members["a"]
        pool.keeper.cancel()
        await pool.suspect(member, ServerLost("no answer in time"))
        member.updates, member.looks = member.updates + updates, member.looks + looks
        pool.reconsider(member)
        return member in pool.ready

    assert play(World(), scene, names=("a",))[0] is is_used


def test_a_look_tells_of_a_server_that_failed_a_request_at_once_and_nothing_of_one_that_was_updated_meanwhile():
    world = World()

    async def scene(pool):
        await pool.start(2)
        pool.keeper.cancel()
        a, b = pool.members["a"], pool.members["b"]
        await pool.suspect(a, ServerLost("no answer in time"))
        world.hanging.add("a")
        await pool._look_after(a)
        settings = b.client.settings

        async def meanwhile():
            pool.weights = Weights(1)
            await b.client.push(Weights(1))
            pool.took(b, 1)
            assert b in pool.ready
            return await settings()

        b.client.settings, b.doubt = meanwhile, (b.updates, b.looks)
        await pool._look_after(b)
        return a.lost, (b.version, b.updates, b.doubt)

    assert play(world, scene)[0] == ("no answer", (1, 2, None))
