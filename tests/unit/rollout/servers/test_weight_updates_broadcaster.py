"""Broadcasts to servers that die, hang, lag or come back: real pool, groups and bytes, made-up servers in threads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

import pytest
import torch

from megatron_rl.rollout import RolloutError
from megatron_rl.rollout.servers import weight_updates
from megatron_rl.rollout.servers.client import ServerLost, UpdateInterrupted, Weights
from megatron_rl.rollout.servers.pool import PoolLimits, ServerPool
from megatron_rl.rollout.servers.rendezvous import Address
from megatron_rl.rollout.servers.run_servers import MainRank
from megatron_rl.rollout.servers.weight_broadcast import Amount, GroupError, Receiver, WeightGroup
from megatron_rl.rollout.servers.weight_updates import Broadcaster
from megatron_rl.rollout.weights import checked
from tests.support.patience import PATIENCE_S

TENSORS = {f"layer.{i}": torch.full((3, 5), float(i)) for i in range(20)}
STALL_S = 5.0


class Server:
    """Takes weights as a server does. ``fault``: what it does in its next update, and after how many tensors."""

    def __init__(self, name: str) -> None:
        self.name, self.group, self.fault, self.after = name, None, "", 0
        self.held: dict[str, torch.Tensor] = {}
        self.version: int | None = None
        self.alive = asyncio.Event()
        self.alive.set()
        self.closed = asyncio.Event()

    async def settings(self) -> dict:
        self._check()
        return {"version": self.version}

    def _check(self) -> None:
        if not self.alive.is_set():
            raise ServerLost("connection refused", is_final=True)

    async def push(self, weights: Weights) -> Amount:
        self._check()
        self.version = None
        if weights.broadcast is None:
            self.version, self.held = weights.version, {}
            return Amount(0, 0)
        if self.fault == "refuses":
            raise ServerLost("status 500: no such layer", is_final=True)
        try:
            amount = await asyncio.to_thread(self._take, weights.broadcast)
        except GroupError as error:
            self.leave()
            if self.fault == "dies":
                self.alive.clear()
                raise ServerLost("connection reset") from error
            if self.fault == "hangs":
                self.alive.clear()  # the pool notices, and hangs up
                await self.closed.wait()
                raise ServerLost("connection closed") from error
            raise UpdateInterrupted(str(error), is_final=True) from error
        self.version = weights.version
        return amount

    def _take(self, place) -> Amount:
        if self.group is None or self.group.place.name != place.name:
            self.leave()
            self.group = WeightGroup.join(place, place.rank)
        receiver = Receiver(self.group)
        taken = {}
        for name, tensor in receiver:
            if self.fault in ("dies", "hangs") and len(taken) == self.after:
                raise GroupError(self.fault)
            taken[name] = tensor
        amount = receiver.check()
        self.held = taken
        return Amount(amount.tensors, amount.bytes - (self.fault == "loses a byte"))

    def leave(self) -> None:
        group, self.group = self.group, None
        if group is not None:
            group.close()

    async def close(self) -> None:
        self.closed.set()


class World:
    """A broadcaster and the servers a, b and c; ``there``: those that are found."""

    def __init__(self) -> None:
        self.servers = {name: Server(name) for name in "abc"}
        self.there, self.said = ["a", "b"], []
        self.main = MainRank()
        self.pool = self.do(self._start())
        self.broadcaster = Broadcaster(
            self.main,
            lambda weights: checked(weights, {name: tuple(tensor.shape) for name, tensor in TENSORS.items()}),
            stall_s=STALL_S,
        )
        self.broadcaster.use(self.pool)

    async def _start(self) -> ServerPool:
        pool = ServerPool(
            PoolLimits(wait_s=PATIENCE_S, health_every_s=0.02),
            discover=lambda: [Address(name, "http://127.0.0.1:80") for name in self.there],
            connect=lambda address: self.servers[address.name],
            problems=lambda settings: [],
            say=self.said.append,
        )
        await pool.start(2)
        return pool

    def do(self, work):
        return self.main.submit(work).result(30)

    def until(self, condition: Callable[[], bool]) -> None:
        async def wait() -> None:
            while not condition():
                await asyncio.sleep(0.01)

        self.do(wait())

    @property
    def ready(self) -> list[str]:
        return sorted(member.address.name for member in self.pool.ready)

    def close(self) -> None:
        self.broadcaster.close()
        for server in self.servers.values():
            server.leave()
        self.main.close(self.pool.close())


@pytest.fixture
def world(monkeypatch):
    monkeypatch.setattr(weight_updates, "GRACE_S", 0.5)
    world = World()
    yield world
    world.close()


class Source:
    """``TENSORS``, as often as they are asked for. ``happens``: in the middle of the first time."""

    def __init__(self, happens: Callable[[], None] = lambda: None) -> None:
        self.passes, self._happens = 0, happens

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        self.passes += 1
        for number, item in enumerate(TENSORS.items()):
            if self.passes == 1 and number == 10:
                self._happens()
            yield item


def holds_all(server: Server) -> bool:
    return all(torch.equal(server.held[name], tensor) for name, tensor in TENSORS.items())


def test_one_group_serves_all_updates_while_the_servers_stay(world):
    groups = []
    for version in (1, 2, 3):
        assert world.broadcaster.push(Source(), version)
        groups.append(world.broadcaster._group)
        assert world.ready == ["a", "b"]
        assert [world.servers[name].version for name in "ab"] == [version] * 2
    assert groups[0] is groups[1] is groups[2]
    assert all(holds_all(world.servers[name]) for name in "ab")


@pytest.mark.parametrize("fault", ["refuses", "dies", "hangs"])
def test_a_server_that_fails_is_lost_and_the_others_get_the_whole_set(world, fault):
    world.servers["a"].fault = fault
    world.there = ["b"]
    source = Source()
    assert world.broadcaster.push(source, 1)
    assert world.ready == ["b"]
    assert holds_all(world.servers["b"])
    assert world.pool.members["a"].lost
    assert source.passes <= 2
    assert not world.broadcaster.refused


def test_a_server_that_says_it_got_less_is_not_used(world):
    world.servers["a"].fault = "loses a byte"
    world.there = ["b"]
    assert world.broadcaster.push(Source(), 1)
    assert world.ready == ["b"]
    assert "arrived" in world.pool.members["a"].lost


def test_a_server_that_was_dead_before_the_update_costs_no_deadline(world):
    world.servers["a"].alive.clear()
    assert world.broadcaster.push(Source(), 1)
    assert world.ready == ["b"]


def test_with_none_left_it_waits_for_one_to_come(world):
    for name in "ab":
        world.servers[name].fault = "refuses"
    world.there = ["c"]
    assert world.broadcaster.push(Source(), 1)
    assert world.ready == ["c"]
    assert holds_all(world.servers["c"])


def test_where_nobody_is_lost_by_it_the_group_is_at_fault_and_files_are_wanted(world, monkeypatch):
    def cannot(group):
        raise GroupError("no route to host")

    monkeypatch.setattr(WeightGroup, "form", cannot)
    source = Source()
    assert not world.broadcaster.push(source, 1)
    assert world.broadcaster.refused == "no route to host"
    assert source.passes == 1
    assert not world.pool.ready
    assert not any(member.lost for member in world.pool.members.values())


def breaks() -> None:
    raise GroupError("connection reset")


def test_a_new_group_that_breaks_without_a_loss_is_at_fault(world):
    source = Source(breaks)
    assert not world.broadcaster.push(source, 1)
    assert (world.broadcaster.refused, source.passes) == ("connection reset", 1)


def test_a_kept_group_that_breaks_without_a_loss_is_made_anew(world):
    assert world.broadcaster.push(Source(), 1)
    kept, source = world.broadcaster._group, Source(breaks)
    assert world.broadcaster.push(source, 2)
    assert (world.broadcaster.refused, source.passes) == ("", 2)
    assert world.broadcaster._group is not kept
    assert world.ready == ["a", "b"]
    assert all(holds_all(world.servers[name]) for name in "ab")


def test_an_error_of_the_learner_is_its_own_and_the_next_update_is_whole(world):
    def fails() -> None:
        raise ValueError("NaN")

    with pytest.raises(ValueError, match="NaN"):
        world.broadcaster.push(Source(fails), 1)
    assert not world.pool.ready
    assert world.broadcaster.push(Source(), 1)
    assert world.ready == ["a", "b"]


def test_a_tensor_that_is_missing_fails_the_update(world):
    with pytest.raises(RolloutError, match="1 of 20 tensors were not sent"):
        world.broadcaster.push([item for item in TENSORS.items() if item[0] != "layer.7"], 1)
    assert not world.pool.ready


def test_a_server_that_comes_late_gets_the_next_weights(world):
    source = Source()
    assert world.broadcaster.push(source, 1)
    world.there.append("c")
    world.until(lambda: len(world.pool.lacking) == 1)
    assert world.said[-1] == "server c (http://127.0.0.1:80) joined and waits for policy version 1"
    assert world.ready == ["a", "b"]
    assert world.broadcaster.push(source, 2)
    assert world.ready == ["a", "b", "c"]
    assert holds_all(world.servers["c"])


def test_servers_of_several_workers_have_a_rank_for_each(world):
    """A worker of c is in a thread of its own."""
    places = []

    async def push(weights: Weights) -> dict[str, int]:
        places.append(weights.broadcast)
        raise ServerLost("that is all", is_final=True)

    members = list(world.pool.members.values())
    members[0].workers, members[1].workers = 4, 2
    for server in world.servers.values():
        server.push = push
    world.there = []
    world.pool._limits.wait_s = 0.1
    with pytest.raises(RolloutError, match=r"waited 0.1 s \(rollout.servers.wait_s\) for a server to take"):
        world.broadcaster.push(Source(), 1)
    assert sorted((place.rank, place.world_size) for place in places) == [(1, 7), (5, 7)]
