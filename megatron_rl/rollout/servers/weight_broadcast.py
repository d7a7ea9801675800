"""A stream of tensors from the trainer to all workers of a group, in chunks.

Small tensors are packed into one of two buffers; while one is on its way, the other is filled. A tensor that is large
itself is sent from where it lies. What a chunk holds is written to the group's store, so that nothing is agreed on
before the first chunk. Workers ask for the next chunk before they load one. The last entry says how many tensors and
bytes were sent: a worker that has other numbers, or that does not get to it, has no complete set.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch.distributed import Work

from megatron_rl.rollout.servers.weight_group import GroupError, WeightGroup

CHUNK_BYTES = 64 << 20  # of a buffer
WHOLE_BYTES = 16 << 20  # a tensor from this size on is sent as it is
NUM_BUFFERS = 2
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (torch.float32, torch.bfloat16, torch.float16)}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Amount:
    """How much was sent or received."""

    tensors: int
    bytes: int


@dataclass
class _Chunk:
    """A buffer, what it is to hold, and the call that sends it."""

    buffer: torch.Tensor  # uint8 [CHUNK_BYTES]
    size: int = 0  # bytes of `tensors`
    tensors: list[torch.Tensor] = field(default_factory=list)
    entries: list[tuple[str, str, torch.Size]] = field(default_factory=list)  # name, dtype, shape
    work: Work | None = None

    def pack(self) -> torch.Tensor:
        """Copy `tensors` into the buffer, and forget them. uint8 [size]."""
        packed, flat = self.buffer[: self.size], [tensor.reshape(-1) for tensor in self.tensors]
        if flat[0].device != packed.device:
            flat = [tensor.to(packed.device) for tensor in flat]
        if len({dtype for _, dtype, _ in self.entries}) > 1:
            torch.cat([tensor.view(torch.uint8) for tensor in flat], out=packed)
        else:
            torch.cat(flat, out=packed.view(flat[0].dtype))
        self.tensors, self.entries, self.size = [], [], 0
        return packed


class Sender:
    """Rank 0's end of a group, for any number of updates. ``chunk_bytes``: of each of its two buffers, which are on the
    group's device; 0: `CHUNK_BYTES`."""

    def __init__(self, group: WeightGroup, chunk_bytes: int = 0) -> None:
        self._group, self._chunk_bytes = group, chunk_bytes = group, chunk_bytes or CHUNK_BYTES
        self._chunks = [
            _Chunk(torch.empty(chunk_bytes, dtype=torch.uint8, device=group.device)) for _ in range(NUM_BUFFERS)
        ]
        self._filling = 0
        self._whole: deque[tuple[Work, torch.Tensor]] = deque()  # on their way from where they lie
        self._num_tensors = self._num_bytes = 0
        self._whole_bytes = min(WHOLE_BYTES, self._chunk_bytes)

    @torch.no_grad()
    def send(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Amount:
        """All of ``tensors``; returns when the memory that they lie in may change. Raises `GroupError`."""
        self._group.next_update()
        self._num_tensors = self._num_bytes = 0
        for name, tensor in tensors:
            self._add(name, tensor)
        self._send_filled()
        for chunk in self._chunks:
            self._finish(chunk)
        self._let_go(0)
        self._say({"sent": [self._num_tensors, self._num_bytes]})
        return Amount(self._num_tensors, self._num_bytes)

    def _add(self, name: str, tensor: torch.Tensor) -> None:
        size, shape, chunk = tensor.nbytes, tensor.shape, self._chunks[self._filling]
        entry = (name, NAMES[tensor.dtype], shape)
        self._num_tensors += 1
        self._num_bytes += size
        if size >= self._whole_bytes:
            self._send_filled()
            whole = tensor.to(self._group.device).contiguous()
            self._say({"tensors": [entry]})
            self._whole.append((self._group.broadcast(whole.view(-1).view(torch.uint8)), whole))
            self._let_go(NUM_BUFFERS)
            return
        # Tensors of other dtypes begin where they can be viewed.
        if chunk.entries and (chunk.size + size > self._chunk_bytes or chunk.size % tensor.itemsize):
            self._send_filled()
            chunk = self._chunks[self._filling]
        chunk.tensors.append(tensor)
        chunk.entries.append(entry)
        chunk.size += size

    def _send_filled(self) -> None:
        chunk = self._chunks[self._filling]
        if chunk.entries:
            self._finish(chunk)
            self._say({"tensors": chunk.entries})
            chunk.work = self._group.broadcast(chunk.pack())
            self._filling = (self._filling + 1) % NUM_BUFFERS

    def _finish(self, chunk: _Chunk) -> None:
        if chunk.work is not None:
            self._group.wait(chunk.work)
            chunk.work = None

    def _let_go(self, most: int) -> None:
        while len(self._whole) > most:
            self._group.wait(self._whole[0][0])
            self._whole.popleft()

    def _say(self, content: dict) -> None:
        self._group.write(json.dumps(content))


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
            coming = self._begin()
            place = 0
            for name, dtype, shape in entries:
                kind = DTYPES[dtype]
                size = kind.itemsize * torch.Size(shape).numel()
                self.received = Amount(self.received.tensors + 1, self.received.bytes + size)
                yield name, buffer[place : place + size].view(kind).view(shape)
                place += size

    def _begin(self) -> tuple[torch.Tensor, list, Work] | None:
        """The next chunk, on its way; None after the last."""
        content = json.loads(self._group.read())
        if "sent" in content:
            self._due = Amount(*content["sent"])
            return None
        entries = content["tensors"]
        size = sum(DTYPES[dtype].itemsize * torch.Size(shape).numel() for _, dtype, shape in entries)
        buffer = torch.empty(size, dtype=torch.uint8, device=self._group.device)
        return buffer, entries, self._group.broadcast(buffer)

    def check(self) -> Amount:
        """What was received. Raises `GroupError` unless it is what was sent."""
        if self.received != self._due:
            raise GroupError(f"received {self.received}, but {self._due} were sent")
        return self.received
