"""The processes that one broadcast of weights joins: the trainer's rank 0, and every worker of some servers.

The trainer opens a store on a port of its own and says in the update request where it is. Members meet there first, so
that a server that is gone costs no more than the answer to its request; only then the process group is made, outside
of torch's world: gloo between CPUs, NCCL between GPUs. No call waits longer than `GroupPlace.stall_s` for another
process: it raises `GroupError`. What the trainer learns of a member that failed ends its own call and, when it closes
the group, those of all others.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import torch
from torch.distributed import PrefixStore, ProcessGroupGloo, Store, TCPStore, Work
from torch.distributed.distributed_c10d import BroadcastOptions

BACKENDS = ("gloo", "nccl")
SENDER = 0  # rank of the trainer
GO, CLOSED = "go", "closed"  # keys in the store
CLOSING = b"closed"  # in place of what members wait for
LOOK_S = 0.25  # between looks of a worker whether the trainer closed the group
SHORTEST_S, LONGEST_S = 1e-4, 2e-3  # between looks at a call that is under way: the first ones, and all later ones
ON_LOOPBACK = "127."


class GroupError(RuntimeError):
    """The group cannot be formed, or a member of it is gone, hangs or gave up. The group is of no use any more."""


@dataclass(frozen=True)
class GroupPlace:
    """What a member has to know. ``rank``: the first of the members of one server. JSON values only."""

    name: str
    host: str
    port: int
    rank: int
    world_size: int
    backend: str
    stall_s: float

    def __post_init__(self) -> None:
        kinds = {"name": str, "host": str, "port": int, "rank": int, "world_size": int, "backend": str}
        for field, kind in kinds.items():
            if type(getattr(self, field)) is not kind:
                raise TypeError(f"broadcast.{field}: {getattr(self, field)!r}, expected {kind.__name__}")
        if self.backend not in BACKENDS or not 0 < self.rank < self.world_size or not self.stall_s > 0:
            raise ValueError(f"broadcast: no place in a group: {self}")


class WeightGroup:
    """One member of a group. ``give_up``, set by another thread to a reason, ends every wait."""

    def __init__(self, place: GroupPlace, rank: int, store: Store) -> None:
        self.place, self.rank, self.give_up = place, rank, ""
        self.store = PrefixStore(place.name, store)
        self.device = torch.device("cuda" if place.backend == "nccl" else "cpu")
        self.sent: Any = None  # what was sent, for who waits for the answers
        self.heard: list[Any] = []  # on workers: what each chunk of the last update held
        self._group: Any = None
        self._works: list[Work] = []  # under way
        self._number, self._update = 0, 0  # of the next entry, and of the update that it is of

    def next_update(self) -> None:
        """What is written or read from now on is of a new update; what the trainer wrote before it goes."""
        if self.rank == SENDER:
            self._write_errors(lambda: [self.store.delete_key(f"{self._update}/{n}") for n in range(self._number)])
        self._number, self._update = 0, self._update + 1

    def write(self, entry: str) -> None:
        """The trainer's next word on this update."""
        key = self._key()
        self._write_errors(lambda: self.store.set(key, entry))
        self._number += 1

    def read(self) -> bytes:
        """The trainer's next word on this update, once it has been written."""
        self._number += 1
        return self._read(self._key(-1))

    @classmethod
    def open(cls, host: str, name: str, world_size: int, backend: str, stall_s: float) -> WeightGroup:
        """The trainer's end. ``host``: its address that servers can reach; the store listens there, on a free port."""
        try:
            listener = socket.create_server((host, 0), family=_family(host))
        except OSError as error:
            raise GroupError(f"cannot listen on {host}: {error}") from error
        port = listener.getsockname()[1]
        limit = timedelta(seconds=stall_s)
        store = TCPStore(host, port, None, True, limit, False, master_listen_fd=listener.detach())
        return cls(GroupPlace(name, host, port, 1, world_size, backend, stall_s), SENDER, store)

    @classmethod
    def join(cls, place: GroupPlace, rank: int) -> WeightGroup:
        """A worker's end, complete when this returns. Raises `GroupError` for one that has left: the store still holds
        what those who met first left there."""
        try:
            limit = timedelta(seconds=place.stall_s)
            group = cls(place, rank, TCPStore(place.host, place.port, None, False, limit, False))
        except RuntimeError as error:  # names the address
            raise GroupError(_first_line(error)) from error
        try:
            if group.store.add("here", 1) >= place.world_size:
                raise GroupError("this worker has left the group, and nobody comes to a group twice")
            group._read(GO)
            group._make()
        except RuntimeError as error:
            group.close(str(error))
            raise error if isinstance(error, GroupError) else GroupError(_first_line(error)) from error
        return group

    def form(self) -> None:
        """The trainer waits for all members."""
        start = time.monotonic()
        try:
            while (here := self.store.add("here", 0)) < self.place.world_size - 1:
                self._check(start, f"{here} of {self.place.world_size - 1} workers came to the group")
                time.sleep(LONGEST_S)
            self.store.set(GO, "")
            self._make()
        except RuntimeError as error:
            raise error if isinstance(error, GroupError) else GroupError(_first_line(error)) from error

    @property
    def is_formed(self) -> bool:
        """Whether tensors can be sent."""
        return self._group is not None

    def broadcast(self, tensor: torch.Tensor) -> Work:
        """Begin to send ``tensor``, contiguous and on `device`, from the trainer to all others."""
        options = BroadcastOptions()
        options.rootRank, options.rootTensor = SENDER, 0
        try:
            work = self._group.broadcast([tensor], options)
            self._works = [*(one for one in self._works if not one.is_completed()), work]
            return work
        except RuntimeError as error:
            raise GroupError(_first_line(error)) from error

    def wait(self, work: Work) -> None:
        """Until ``work`` is done; the current CUDA stream may use its tensor then."""
        start = looked = time.monotonic()
        pause = SHORTEST_S
        try:
            while not work.is_completed():
                self._check(start, "a broadcast came to a standstill")
                if self.rank != SENDER and time.monotonic() - looked > LOOK_S:
                    looked = time.monotonic()
                    if self.store.check([CLOSED]):
                        raise GroupError("the trainer gave the group up")
                time.sleep(pause)
                pause = min(2 * pause, LONGEST_S)
            work.wait()
        except RuntimeError as error:
            raise error if isinstance(error, GroupError) else GroupError(_first_line(error)) from error

    def close(self, why: str = "the group was closed") -> None:
        """Leave; calls of other members that wait for this one fail. Safe to call twice."""
        self.give_up = self.give_up or why
        if self.rank == SENDER and self.store is not None:
            with contextlib.suppress(RuntimeError):
                for key in (CLOSED, GO, self._key(), f"{self._update + 1}/0"):  # one of them is what members wait for
                    self.store.set(key, CLOSING)
        if self._group is not None:
            with contextlib.suppress(RuntimeError):
                self._group.abort()  # does nothing under gloo, whose calls end by themselves, and whose end waits
        kept = [self._group, self.store]
        is_sender, self._group, self.store = self.rank == SENDER and self.store is not None, None, None
        works, self._works = self._works, []
        if is_sender or not all(work.is_completed() for work in works):
            linger_s = self.place.stall_s if is_sender else 0.0  # for members that come to the store only now
            name = f"end of {self.place.name}"
            threading.Thread(target=_end, args=(kept, works, linger_s), name=name, daemon=True).start()

    def _key(self, ahead: int = 0) -> str:
        return f"{self._update}/{self._number + ahead}"

    def _read(self, key: str) -> bytes:
        try:
            found = self.store.get(key)
        except RuntimeError as error:
            raise GroupError(f"nothing came from the trainer: {_first_line(error)}") from error
        if found == CLOSING:
            raise GroupError("the trainer gave the group up")
        return found

    @staticmethod
    def _write_errors(action: Callable[[], Any]) -> None:
        try:
            action()
        except RuntimeError as error:
            raise GroupError(f"the group's store failed: {_first_line(error)}") from error

    def _check(self, start: float, what: str) -> None:
        if self.give_up:
            raise GroupError(self.give_up)
        if time.monotonic() - start > self.place.stall_s:
            raise GroupError(f"{what} in {self.place.stall_s:g} s (rollout.servers.weights_stall_s)")

    def _make(self) -> None:
        store, size = PrefixStore("group", self.store), self.place.world_size
        if self.place.backend == "gloo":
            options = ProcessGroupGloo._Options()
            mine = local_address(self.place.host, self.place.port)
            options._devices = [ProcessGroupGloo.create_device(hostname=mine)]
            options._timeout = timedelta(seconds=2 * self.place.stall_s)  # `wait` is to notice first
            self._group = ProcessGroupGloo(store, self.rank, size, options)
        else:
            self._group = _nccl(store, self.rank, size)


END_S = 10.0
# A destructor in C++ that takes the lock of an interpreter which ends meanwhile would abort the process.
_dropping = threading.Lock()
atexit.register(_dropping.acquire, timeout=END_S)


def _end(kept: list, works: list[Work], linger_s: float) -> None:
    """Drop what ``kept`` and ``works`` hold alone, after ``linger_s`` and when ``works`` are done: the group's
    destructor waits for them, and may not be on its way when the process ends."""
    time.sleep(linger_s)
    while not all(work.is_completed() for work in works):
        time.sleep(LOOK_S)
    with _dropping:
        works.clear()
        kept.clear()


def _nccl(store: Store, rank: int, size: int) -> Any:
    """NCCL's group, whose own watchdog must not end this process: `WeightGroup.wait` has the time limit."""
    from torch.distributed import ProcessGroupNCCL

    name, number = "TORCH_NCCL_ASYNC_ERROR_HANDLING", "0"
    before = os.environ.get(name)
    os.environ[name] = number  # torch reads it when a group is made
    try:
        options = ProcessGroupNCCL.Options()
        options._timeout = timedelta(days=1)
        return ProcessGroupNCCL(store, rank, size, options)
    finally:
        os.environ.pop(name) if before is None else os.environ.__setitem__(name, before)


def local_address(host: str, port: int) -> str:
    """The address of this machine from which ``host`` is reached. No packet is sent."""
    with socket.socket(_family(host), socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        return probe.getsockname()[0]


def address_for(urls: list[str]) -> str:
    """The address of this machine at which servers at ``urls`` reach it. Raises `GroupError` where they differ."""
    found = set()
    for url in urls:
        parts = urlsplit(url)
        try:
            found.add(local_address(parts.hostname or "", parts.port or 80))
        except OSError as error:
            raise GroupError(f"{url} cannot be reached: {error}") from error
    if len(found) > 1:  # servers on this machine reach its other addresses as well
        found = {address for address in found if not address.startswith(ON_LOOPBACK)}
    if len(found) > 1:
        raise GroupError(f"servers reach this machine at different addresses: {', '.join(sorted(found))}")
    return found.pop()


def _family(host: str) -> socket.AddressFamily:
    return socket.getaddrinfo(host, None)[0][0]


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:200]
