"""A broadcast of weights: the group of processes that takes part, and the stream of tensors in chunks.

Members are the trainer's rank 0 and every worker of some servers. The trainer opens a store on a port of its own and
says in the update request where it is. Members meet there first, so a server that is gone costs no more than the answer
to its request. The process group is made after that, outside of torch's world: gloo between CPUs, NCCL between GPUs. No
call waits longer than `GroupPlace.stall_s` for another process: it raises `GroupError`. When a member fails, the
trainer's own call ends; when the trainer then closes the group, those of all others end too.

Tensors are packed into one of two buffers; while one is sent, the other is filled. A tensor that fills a chunk alone is
sent from where it lies. The contents of a chunk are written to the group's store, so nothing has to be agreed on before
the first chunk. Workers wait for the next chunk before they load one. The last entry has the number of tensors and
bytes that were sent: a worker that has other numbers, or does not reach it, has no complete set.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import math
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import torch
from torch.distributed import PrefixStore, ProcessGroupGloo, Store, TCPStore, Work
from torch.distributed.distributed_c10d import BroadcastOptions

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


class WeightGroup:
    """One member of a group. ``give_up``, set by another thread to a reason, ends every wait."""

    def __init__(self, place: GroupPlace, rank: int, store: Store) -> None:
        self.place, self.rank, self.give_up = place, rank, ""
        self.store = PrefixStore(place.name, store)
        self.device = torch.device("cuda" if place.backend == "nccl" else "cpu")
        self.sent: Any = None  # what was sent, for who waits for the answers
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
        group, store = [self._group], [self.store]
        is_sender, self._group, self.store = self.rank == SENDER and self.store is not None, None, None
        works, self._works = self._works, []
        if is_sender or not all(work.is_completed() for work in works):
            linger_s = self.place.stall_s if is_sender else 0.0  # for members that come to the store only now
            name = f"end of {self.place.name}"
            threading.Thread(target=_end, args=(group, works, store, linger_s), name=name, daemon=True).start()

    def _key(self, ahead: int = 0) -> str:
        return f"{self._update}/{self._number + ahead}"

    def _read(self, key: str) -> bytes:
        try:
            value = self.store.get(key)
        except RuntimeError as error:
            raise GroupError(f"nothing came from the trainer: {_first_line(error)}") from error
        if value == CLOSING:
            raise GroupError("the trainer gave the group up")
        return value

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
            raise GroupError(f"{what} in {self.place.stall_s:g} s")

    def _make(self) -> None:
        store, size = PrefixStore("group", self.store), self.place.world_size
        if self.place.backend == "gloo":
            options = ProcessGroupGloo._Options()
            host_address = local_address(self.place.host, self.place.port)
            options._devices = [ProcessGroupGloo.create_device(hostname=host_address)]
            options._timeout = timedelta(seconds=2 * self.place.stall_s)  # `wait` is to notice first
            self._group = ProcessGroupGloo(store, self.rank, size, options)
        else:
            self._group = _nccl(store, self.rank, size)


END_S = 10.0
# A destructor in C++ that takes the lock of an interpreter which ends meanwhile would abort the process.
_dropping = threading.Lock()
atexit.register(_dropping.acquire, timeout=END_S)


def _end(group: list, works: list[Work], store: list, linger_s: float) -> None:
    """Drop the group when ``works`` are done, and the store ``linger_s`` later.

    The group's destructor waits for works, and may not be on its way when the process ends. The group does not linger:
    a thread of gloo whose peer is gone may be busy until then.
    """
    while not all(work.is_completed() for work in works):
        time.sleep(LOOK_S)
    with _dropping:
        works.clear()
        group.clear()
    time.sleep(linger_s)
    with _dropping:
        store.clear()


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
    addresses = set()
    for url in urls:
        parts = urlsplit(url)
        try:
            addresses.add(local_address(parts.hostname or "", parts.port or 80))
        except OSError as error:
            raise GroupError(f"{url} cannot be reached: {error}") from error
    if len(addresses) > 1:  # servers on this machine reach its other addresses as well
        addresses = {address for address in addresses if not address.startswith(ON_LOOPBACK)}
    if len(addresses) > 1:
        raise GroupError(f"servers reach this machine at different addresses: {', '.join(sorted(addresses))}")
    return addresses.pop()


def _family(host: str) -> socket.AddressFamily:
    return socket.getaddrinfo(host, None)[0][0]


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:200]


CHUNK_BYTES = {"cuda": 64 << 20, "cpu": 8 << 20}  # of a buffer; a processor sends what its cache still holds
NUM_BUFFERS = 2
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (torch.float32, torch.bfloat16, torch.float16)}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Amount:
    """How much was sent or received."""

    tensors: int
    bytes: int


class Sender:
    """Rank 0's end of a group, for any number of updates. ``chunk_bytes``: of each of its two buffers, which are on the
    group's device; 0: `CHUNK_BYTES` of that device."""

    def __init__(self, group: WeightGroup, chunk_bytes: int = 0) -> None:
        self._group, self._chunk_bytes = group, chunk_bytes or CHUNK_BYTES[group.device.type]
        self._buffers = [torch.empty(self._chunk_bytes, dtype=torch.uint8, device=group.device) for _ in range(2)]
        self._under_way: deque[tuple[Work, torch.Tensor]] = deque()

    @torch.no_grad()
    def send(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Amount:
        """All of ``tensors``; returns when the memory that they lie in may change. Raises `GroupError`."""
        self._group.next_update()
        self._under_way.clear()
        entries, pieces, size, num_tensors, num_bytes = [], [], 0, 0, 0
        for name, tensor in tensors:
            if pieces and size + tensor.nbytes > self._chunk_bytes:
                self._send_chunk(entries, pieces)
                entries, pieces, size = [], [], 0
            entries.append((name, NAMES[tensor.dtype], tensor.shape))
            pieces.append(tensor.to(self._group.device).contiguous().view(-1).view(torch.uint8))
            size, num_tensors, num_bytes = size + tensor.nbytes, num_tensors + 1, num_bytes + tensor.nbytes
        if pieces:
            self._send_chunk(entries, pieces)
        self._let_go(0)
        self._group.write(json.dumps({"sent": [num_tensors, num_bytes]}))
        return Amount(num_tensors, num_bytes)

    def _send_chunk(self, entries: list[tuple[str, str, torch.Size]], pieces: list[torch.Tensor]) -> None:
        self._let_go(NUM_BUFFERS - 1)
        content = pieces[0]
        if len(pieces) > 1:
            content = self._buffers[0][: sum(len(piece) for piece in pieces)]
            torch.cat(pieces, out=content)
            self._buffers.reverse()
        self._group.write(json.dumps({"tensors": entries}))
        self._under_way.append((self._group.broadcast(content), content))

    def _let_go(self, most: int) -> None:
        """Wait until at most ``most`` chunks are under way."""
        while len(self._under_way) > most:
            self._group.wait(self._under_way[0][0])
            self._under_way.popleft()


class Receiver:
    """A worker's end of one update: iterate over it. `received` is complete when the iteration has ended by itself."""

    def __init__(self, group: WeightGroup) -> None:
        self._group = group
        group.next_update()
        self.received = Amount(0, 0)

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Name and tensor, on the group's device. A tensor's memory is its chunk's, which nothing is written to again.
        Raises `GroupError` unless all that was sent has come."""
        coming = self._begin()
        while coming is not None:
            buffer, entries, work = coming
            self._group.wait(work)
            coming, place = self._begin(), 0
            for name, dtype, shape in entries:
                end = place + DTYPES[dtype].itemsize * math.prod(shape)
                content = buffer[place:end]
                if place % DTYPES[dtype].itemsize:  # behind a tensor of narrower elements
                    content = content.clone()
                self.received = Amount(self.received.tensors + 1, self.received.bytes + end - place)
                yield name, content.view(DTYPES[dtype]).view(shape)
                place = end

    def _begin(self) -> tuple[torch.Tensor, list, Work] | None:
        """The next chunk, on its way; None after the last."""
        content = json.loads(self._group.read())
        if "sent" in content:
            self._due = Amount(*content["sent"])
            return None
        size = sum(DTYPES[dtype].itemsize * math.prod(shape) for _, dtype, shape in content["tensors"])
        buffer = torch.empty(size, dtype=torch.uint8, device=self._group.device)
        return buffer, content["tensors"], self._group.broadcast(buffer)

    def check(self) -> Amount:
        """What was received. Raises `GroupError` unless it is what was sent."""
        if self.received != self._due:
            raise GroupError(f"received {self.received}, but {self._due} were sent")
        return self.received
