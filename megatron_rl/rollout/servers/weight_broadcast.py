"""A broadcast of weights: the group of processes that takes part, and the stream of tensors in chunks.

Members are the trainer's rank 0 and every worker of some servers. The trainer opens a store on a port of its own and
says in the update request where it is. Members meet there first, so a server that is gone costs no more than the answer
to its request. The process group is made after that, outside of torch's world: gloo between CPUs, NCCL between GPUs. No
call waits longer than `GroupPlace.stall_s` for another process: it raises `GroupError`. When a member fails, the
trainer's own call ends; when the trainer then closes the group, those of all others end too.

Small tensors are packed into one of two buffers; while one is sent, the other is filled. A large tensor is sent from
where it lies. The contents of a chunk are written to the group's store, so nothing has to be agreed on before the first
chunk. Workers wait for the next chunk before they load one. The last entry has the number of tensors and bytes that
were sent: a worker that has other numbers, or does not reach it, has no complete set.
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
from dataclasses import dataclass, field
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
        for name, kind in kinds.items():
            if type(getattr(self, name)) is not kind:
                raise TypeError(f"broadcast.{name}: {getattr(self, name)!r}, expected {kind.__name__}")
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
            raise GroupError(f"{what} in {self.place.stall_s:g} s (rollout.servers.weights_stall_s)")

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
WHOLE_BYTES = 16 << 20  # a tensor from this size on is sent as it is
NUM_BUFFERS = 2
SAME = json.dumps({"tensors": None})  # a chunk holds what the one of its number held in the group's last update
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (torch.float32, torch.bfloat16, torch.float16)}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Amount:
    """How much was sent or received."""

    tensors: int
    bytes: int


Entry = tuple[str, str, torch.Size]  # name, dtype, shape
Kind = tuple[str, tuple[int, ...]]  # dtype and shape


@dataclass
class _Chunk:
    """A buffer, what it is to hold, and the call that sends it.

    Tensors of one kind lie one after another, so that one call copies them as they are. `_places` says where.
    """

    buffer: torch.Tensor  # uint8 [chunk_bytes]
    size: int = 0  # bytes of all tensors
    entries: list[Entry] = field(default_factory=list)
    kinds: dict[Kind, list[torch.Tensor]] = field(default_factory=dict)
    work: Work | None = None

    def add(self, name: str, tensor: torch.Tensor, size: int) -> None:
        shape, dtype = tensor.shape, NAMES[tensor.dtype]
        self.entries.append((name, dtype, shape))
        if (alike := self.kinds.get((dtype, shape))) is None:
            alike = self.kinds[dtype, shape] = []
        alike.append(tensor if shape else tensor.reshape(1))
        self.size += size

    def pack(self) -> tuple[list[Entry], torch.Tensor]:
        """Copy all tensors into the buffer, in one pass, and forget them: what it holds, and uint8 [size]."""
        place = 0
        for kind in sorted(self.kinds, key=_wider_first):
            tensors = self.kinds[kind]
            if tensors[0].device != self.buffer.device:
                tensors = [tensor.to(self.buffer.device) for tensor in tensors]
            rows, *rest = tensors[0].shape
            end = place + len(tensors) * tensors[0].nbytes
            torch.cat(tensors, out=self.buffer[place:end].view(DTYPES[kind[0]]).view(len(tensors) * rows, *rest))
            place = end
        entries, packed = self.entries, self.buffer[: self.size]
        self.size, self.entries, self.kinds = 0, [], {}
        return entries, packed


def _wider_first(kind: Kind) -> int:
    """Tensors with wider elements come first, so that every one begins where it can be viewed."""
    return -DTYPES[kind[0]].itemsize


def _places(entries: list[Entry]) -> list[tuple[int, int]]:
    """Return where each entry's bytes begin in a chunk, and how many they are."""
    kinds: dict[Kind, list[int]] = {}
    for number, (_, dtype, shape) in enumerate(entries):
        kinds.setdefault((dtype, tuple(shape)), []).append(number)
    places, place = [(0, 0)] * len(entries), 0
    for kind in sorted(kinds, key=_wider_first):
        for number in kinds[kind]:
            size = DTYPES[kind[0]].itemsize * math.prod(entries[number][2])
            places[number] = place, size
            place += size
    return places


class Sender:
    """Rank 0's end of a group, for any number of updates. ``chunk_bytes``: of each of its two buffers, which are on the
    group's device; 0: `CHUNK_BYTES` of that device."""

    def __init__(self, group: WeightGroup, chunk_bytes: int = 0) -> None:
        self._group, self._chunk_bytes = group, chunk_bytes = group, chunk_bytes or CHUNK_BYTES[group.device.type]
        self._chunks = [
            _Chunk(torch.empty(chunk_bytes, dtype=torch.uint8, device=group.device)) for _ in range(NUM_BUFFERS)
        ]
        self._filling = 0
        self._whole: deque[tuple[Work, torch.Tensor]] = deque()  # on their way from where they lie
        self._said: list[list[Entry]] = []  # entries, by chunk
        self._num_said = 0
        self._whole_bytes = min(WHOLE_BYTES, self._chunk_bytes)

    @torch.no_grad()
    def send(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Amount:
        """All of ``tensors``; returns when the memory that they lie in may change. Raises `GroupError`."""
        self._group.next_update()
        self._num_said = num_tensors = num_bytes = 0
        chunk = self._chunks[self._filling]
        for name, tensor in tensors:
            size = tensor.nbytes
            num_tensors += 1
            num_bytes += size
            if size >= self._whole_bytes:
                chunk = self._send_filled()
                self._send_whole(name, tensor)
                continue
            if chunk.size + size > self._chunk_bytes:
                chunk = self._send_filled()
            chunk.add(name, tensor, size)
        self._send_filled()
        for chunk in self._chunks:
            self._finish(chunk)
        self._let_go(0)
        self._group.write(json.dumps({"sent": [num_tensors, num_bytes]}))
        return Amount(num_tensors, num_bytes)

    def _send_whole(self, name: str, tensor: torch.Tensor) -> None:
        whole = tensor.to(self._group.device).contiguous()
        self._say([(name, NAMES[tensor.dtype], tensor.shape)])
        self._whole.append((self._group.broadcast(whole.view(-1).view(torch.uint8)), whole))
        self._let_go(NUM_BUFFERS)

    def _send_filled(self) -> _Chunk:
        """The chunk to fill next, while this one is on its way."""
        chunk = self._chunks[self._filling]
        if chunk.entries:
            self._finish(chunk)
            entries, packed = chunk.pack()
            self._say(entries)
            chunk.work = self._group.broadcast(packed)
            self._filling = (self._filling + 1) % NUM_BUFFERS
        return self._chunks[self._filling]

    def _finish(self, chunk: _Chunk) -> None:
        if chunk.work is not None:
            self._group.wait(chunk.work)
            chunk.work = None

    def _let_go(self, most: int) -> None:
        while len(self._whole) > most:
            self._group.wait(self._whole[0][0])
            self._whole.popleft()

    def _say(self, entries: list[Entry]) -> None:
        """What the next chunk holds, or that it holds the same as in the update before."""
        text, number = self._said, self._num_said
        if number < len(text) and text[number] == entries:
            self._group.write(SAME)
        else:
            text[number:] = [entries]
            self._group.write(json.dumps({"tensors": entries}))
        self._num_said += 1


class Receiver:
    """A worker's end of one update: iterate over it. `received` is complete when the iteration has ended by itself."""

    def __init__(self, group: WeightGroup) -> None:
        self._group = group
        group.next_update()
        self._number = 0  # of the next chunk
        self.received = Amount(0, 0)

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Name and tensor, on the group's device. A tensor's memory is its chunk's, which nothing is written to again.
        Raises `GroupError` unless all that was sent has come."""
        coming = self._begin()
        while coming is not None:
            buffer, entries, work = coming
            self._group.wait(work)
            coming = self._begin()
            for (name, dtype, shape), (place, size) in zip(entries, _places(entries), strict=True):
                self.received = Amount(self.received.tensors + 1, self.received.bytes + size)
                yield name, buffer[place : place + size].view(DTYPES[dtype]).view(shape)

    def _begin(self) -> tuple[torch.Tensor, list, Work] | None:
        """The next chunk, on its way; None after the last."""
        content = json.loads(self._group.read())
        if "sent" in content:
            self._due = Amount(*content["sent"])
            return None
        heard, number = self._group.heard, self._number
        if content["tensors"] is not None:
            heard[number:] = [content["tensors"]]
        entries, self._number = heard[number], number + 1
        size = sum(DTYPES[dtype].itemsize * torch.Size(shape).numel() for _, dtype, shape in entries)
        buffer = torch.empty(size, dtype=torch.uint8, device=self._group.device)
        return buffer, entries, self._group.broadcast(buffer)

    def check(self) -> Amount:
        """What was received. Raises `GroupError` unless it is what was sent."""
        if self.received != self._due:
            raise GroupError(f"received {self.received}, but {self._due} were sent")
        return self.received
