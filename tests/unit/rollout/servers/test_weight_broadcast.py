"""Weights by broadcast: what arrives is what was sent, byte for byte and once; nobody waits for one that is gone.

Members are threads here, each with a store and a gloo group of its own; servers are in tests/e2e/test_servers.py.
"""

from __future__ import annotations

import gc
import itertools
import math
import os
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from torch.distributed import HashStore

from megatron_rl.rollout.servers import weight_broadcast
from megatron_rl.rollout.servers.weight_broadcast import (
    Amount,
    GroupError,
    GroupPlace,
    Receiver,
    Sender,
    WeightGroup,
    address_for,
)
from tests.support.patience import PATIENCE_S

HOST, STALL_S = "127.0.0.1", PATIENCE_S  # a test that waits for it fails
CHUNK = 1 << 12


def tensors(seed: int) -> dict[str, torch.Tensor]:
    """Small ones of two dtypes, one larger than a buffer, one that is not contiguous, a scalar, an empty one."""
    generator = torch.Generator().manual_seed(seed)

    def some(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    small = {f"layer.{i}": some(7, 9).to(torch.bfloat16 if i % 3 else torch.float32) for i in range(60)}
    return {"large": some(64, 129), **small, "view": some(8, 16).t(), "scalar": some(), "none": some(0, 4)}


class Members:
    """A sender here and ``number`` receivers in threads, which take updates until their group ends."""

    def __init__(self, number: int, stall_s: float = STALL_S) -> None:
        self.group = WeightGroup.open(HOST, "test", number + 1, "gloo", stall_s)
        self.pool = ThreadPoolExecutor(number)
        self.joined = [self.pool.submit(WeightGroup.join, self.group.place, rank) for rank in range(1, number + 1)]

    def form(self) -> Sender:
        self.group.form()
        return Sender(self.group, CHUNK)

    def take(self) -> list:
        return [self.pool.submit(self._take, joined.result()) for joined in self.joined]

    @staticmethod
    def _take(group: WeightGroup) -> tuple[dict[str, torch.Tensor], Amount]:
        receiver = Receiver(group)
        return dict(receiver), receiver.check()

    def close(self) -> None:
        self.group.close()
        for joined in self.joined:
            if joined.exception() is None:
                joined.result().close()
        self.pool.shutdown()


@pytest.fixture
def three():
    members = Members(3)
    yield members
    members.close()


def test_every_member_gets_every_update_bit_for_bit(three, monkeypatch):
    sent: list[int] = []
    broadcast = WeightGroup.broadcast

    def counted(group, tensor):
        sent.append(tensor.nbytes * (group.rank == 0))
        return broadcast(group, tensor)

    monkeypatch.setattr(WeightGroup, "broadcast", counted)
    sender = three.form()
    for seed in (1, 2):
        sent.clear()
        given = tensors(seed)
        taken = three.take()
        amount = sender.send(iter(given.items()))
        assert amount == Amount(len(given), sum(tensor.nbytes for tensor in given.values()))
        assert sum(sent) == amount.bytes  # every byte is sent once, and no other
        for weights, received in (future.result() for future in taken):
            assert received == amount
            assert list(weights) == list(given)
            assert all(weights[name].dtype == given[name].dtype for name in given)
            assert all(torch.equal(weights[name], given[name]) for name in given)


def test_shapes_and_dtypes_of_a_chunk_come_in_any_order(three):
    """An odd number of 2-byte elements before 4-byte ones; rows of one width in tensors of other lengths between."""
    shapes = {"odd": (3,), "two": (2, 3), "four": (4, 3), "two again": (2, 3), "one": (1, 3), "three": (3,)}
    sizes = [math.prod(shape) for shape in shapes.values()]
    parts = torch.arange(float(sum(sizes))).split(sizes)
    sent = {name: part.view(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}
    sent["odd"] = sent["odd"].to(torch.bfloat16)
    sender, taken = three.form(), three.take()
    sender.send(sent.items())
    for tensors, _ in (future.result() for future in taken):
        assert list(tensors) == list(sent)
        assert all(
            tensors[name].dtype == tensor.dtype and torch.equal(tensors[name], tensor) for name, tensor in sent.items()
        )


def test_received_tensors_keep_their_values_while_later_ones_come(three):
    """A layer's first matrices wait for its last, over any number of chunks."""
    given = {f"{i}": torch.full((CHUNK // 8,), float(i)) for i in range(40)}
    sender, taken = three.form(), three.take()
    sender.send(iter(given.items()))
    for tensors, _ in (future.result() for future in taken):
        gc.collect()
        assert all(bool((tensor == float(name)).all()) for name, tensor in tensors.items())


def test_the_store_holds_one_update_at_a_time(three):
    sender = three.form()
    keys = []
    for _ in range(3):
        taken = three.take()
        sender.send(iter(tensors(0).items()))
        [future.result() for future in taken]
        keys.append(three.group.store.num_keys())
    assert keys[0] == keys[1] == keys[2]


@pytest.mark.parametrize("victim", [1, 2, 3])
def test_a_member_that_leaves_fails_all_others_at_once(three, victim):
    sender = three.form()
    groups = [joined.result() for joined in three.joined]

    def leave_in_the_middle(group):
        stream = iter(Receiver(group))
        [next(stream) for _ in range(10)]
        group.close()

    def others(group):
        try:
            return Members._take(group)
        finally:
            group.close()

    leaving = three.pool.submit(leave_in_the_middle, groups[victim - 1])
    leaving.add_done_callback(lambda _: setattr(three.group, "give_up", "its server answered that it failed"))
    futures = [three.pool.submit(others, group) for group in groups if group.rank != victim]
    start = time.monotonic()
    with pytest.raises(GroupError):
        sender.send(itertools.cycle(tensors(0).items()))
    three.group.close()
    leaving.result()
    for future in futures:
        with pytest.raises(GroupError):
            future.result()
    assert time.monotonic() - start < STALL_S  # nobody waited for the deadline


def test_a_member_that_hangs_costs_no_more_than_the_deadline():
    members = Members(1, stall_s=1.0)
    sender = members.form()
    with pytest.raises(GroupError, match="standstill in 1 s"):
        sender.send(iter([("large", torch.zeros(1 << 24))]))
    members.close()


def test_a_member_that_does_not_come_costs_no_more_than_the_deadline():
    group = WeightGroup.open(HOST, "test", 3, "gloo", 0.2)
    with pytest.raises(GroupError, match=r"0 of 2 workers came to the group in 0.2 s"):
        group.form()
    group.close()


def test_a_member_that_left_does_not_come_again(three):
    """It would meet the addresses of those who met before, and read what they were told."""
    three.form()
    three.joined[1].result().close()
    with pytest.raises(GroupError, match="has left the group"):
        WeightGroup.join(three.group.place, 2)


def test_what_another_thread_knows_ends_the_wait():
    group = WeightGroup.open(HOST, "test", 2, "gloo", STALL_S)
    start = time.monotonic()
    threading.Timer(0.05, lambda: setattr(group, "give_up", "server a is gone")).start()
    with pytest.raises(GroupError, match="server a is gone"):
        group.form()
    assert time.monotonic() - start < STALL_S
    group.close()


def test_a_trainer_that_is_gone_fails_those_who_wait_for_it():
    members = Members(1)
    members.form()
    (taken,) = members.take()
    start = time.monotonic()
    members.group.close()
    with pytest.raises(GroupError):
        taken.result()
    assert time.monotonic() - start < STALL_S
    members.close()


def test_a_set_that_is_not_whole_is_an_error(three, monkeypatch):
    sender, taken = three.form(), three.take()
    monkeypatch.setattr(Sender, "_send_chunk", lambda self, entries, pieces: None)
    sender.send(iter([("lost", torch.zeros(1)), ("lost too", torch.zeros(1))]))
    for future in taken:
        with pytest.raises(
            GroupError, match=r"received Amount\(tensors=0, bytes=0\), but Amount\(tensors=2, bytes=8\)"
        ):
            future.result()


def test_a_group_of_gpus(monkeypatch):
    """torch's watchdog may not end the process over this group, and other groups keep theirs. NCCL is replaced."""
    made = []

    class Nccl:
        Options = SimpleNamespace

        def __init__(self, store, rank, size, options) -> None:
            made.append((rank, size, os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"]))

    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", Nccl, raising=False)
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    group = WeightGroup(GroupPlace("n", HOST, 1, 1, 3, "nccl", 1.0), 2, HashStore())
    group._make()
    assert (group.device.type, made) == ("cuda", [(2, 3, "0")])
    assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "1"


def test_the_end_of_a_group_cannot_fall_into_the_end_of_the_process():
    """The lock that the process takes at its exit is held while the last references go, of calls also."""
    dropped = []

    class Held:
        def abort(self) -> None:
            pass

        def is_completed(self) -> bool:
            return True

        def __del__(self) -> None:
            dropped.append(weight_broadcast._dropping.locked())

    group = WeightGroup(GroupPlace("held", HOST, 1, 1, 3, "gloo", 0.01), 0, HashStore())
    group._group, group._works = Held(), [Held(), Held()]
    group.close()
    for thread in threading.enumerate():
        if thread.name == "end of held":
            thread.join(STALL_S)
    assert dropped == [True] * 3


def test_a_closed_group_is_dropped_at_once_and_the_store_lingers():
    """A thread of gloo whose peer is gone is busy as long as the group is there; late members look into the store."""
    gone = threading.Event()

    class Held:
        def abort(self) -> None:
            pass

        def __del__(self) -> None:
            gone.set()

    group = WeightGroup(GroupPlace("lingers", HOST, 1, 1, 3, "gloo", STALL_S), 0, HashStore())
    group._group, held = Held(), weakref.ref(group.store)
    group.close()
    assert gone.wait(STALL_S / 2)  # before the store's time is over
    assert held() is not None


def test_the_address_is_one_that_all_servers_reach():
    assert address_for(["http://127.0.0.1:80", "http://127.0.0.1:81"]) == "127.0.0.1"
    with pytest.raises(GroupError, match="cannot be reached"):
        address_for(["http://no-such-host.invalid:80"])
