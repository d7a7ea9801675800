"""A stream of tensors from the trainer to all workers of a group, in chunks.

Small tensors are packed into one of two buffers; while one is on its way, the other is filled. A tensor that is large
itself is sent from where it lies. What a chunk holds is written to the group's store, so that nothing is agreed on
before the first chunk. Workers ask for the next chunk before they load one. The last entry says how many tensors and
bytes were sent: a worker that has other numbers, or that does not get to it, has no complete set.
"""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch.distributed import Work

from megatron_rl.rollout.servers.weight_group import GroupError, WeightGroup

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
    """Of each entry of a chunk, where its bytes begin and how many they are."""
    kinds: dict[Kind, list[int]] = {}
    for number, (_, dtype, shape) in enumerate(entries):
        kinds.setdefault((dtype, tuple(shape)), []).append(number)
    found, place = [(0, 0)] * len(entries), 0
    for kind in sorted(kinds, key=_wider_first):
        for number in kinds[kind]:
            size = DTYPES[kind[0]].itemsize * math.prod(entries[number][2])
            found[number] = place, size
            place += size
    return found


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
        said, number = self._said, self._num_said
        if number < len(said) and said[number] == entries:
            self._group.write(SAME)
        else:
            said[number:] = [entries]
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
