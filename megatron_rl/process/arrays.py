"""Arrays between ranks: each goes from the rank that holds it to the ranks that need it, and to no other.

Every rank knows of every item where it is, where it goes and how large it is. So nothing but the items travels: no
sizes, no pickles, no padding. What a rank holds is what it sends and what it receives, whatever the number of ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
import torch.distributed as dist

from megatron_rl.process.ranks import world_rank, world_size

Shape = tuple[int, ...]


def gather_rows(rows: Sequence[Sequence[float]], places: Sequence[int], width: int) -> np.ndarray:
    """A few numbers about every item, on every rank, from the rank that knows them: [N, width] float64.

    ``places`` [N]: the rank that knows of each item, the same on all ranks. ``rows`` [m, width]: of this rank's items,
    in their order. Float64 holds integers up to 2^53 exactly. Collective.
    """
    rows = np.asarray(rows, dtype=np.float64).reshape(-1, width)
    assert len(rows) == list(places).count(world_rank()), "a row for each item of this rank"
    if world_size() == 1:
        return rows
    counts = np.bincount(np.asarray(places, dtype=np.int64), minlength=world_size())
    mine = np.zeros((counts.max(initial=0), width))
    mine[: len(rows)] = rows
    gathered = torch.empty((world_size(), *mine.shape), dtype=torch.float64)
    dist.all_gather_into_tensor(gathered.view(-1), torch.from_numpy(mine).view(-1))
    shares = gathered.numpy()
    found = np.empty((len(places), width))
    for rank in range(world_size()):
        its = np.flatnonzero(np.asarray(places) == rank)
        found[its] = shares[rank, : len(its)]
    return found


def send(
    held: Mapping[int, np.ndarray], shapes: Mapping[int, Shape], dtype: np.dtype, moves: Sequence[tuple[int, int, int]]
) -> dict[int, np.ndarray]:
    """The items that arrive at this rank, by number; those that it has already are not among them.

    ``held``: items of this rank, C-contiguous, of ``dtype``. ``shapes``: of every item. ``moves``: (item, from, to),
    the same list on every rank. One all_to_all; the arrays returned share its buffer. Collective, unless nothing moves.
    """
    moves = [(item, source, target) for item, source, target in moves if source != target]
    if not moves:
        return {}
    rank, outgoing, incoming = world_rank(), [[] for _ in range(world_size())], [[] for _ in range(world_size())]
    for item, source, target in moves:
        if source == rank:
            outgoing[target].append(item)
        if target == rank:
            incoming[source].append(item)
    sizes = {item: _num_bytes(shapes[item], dtype) for share in (*outgoing, *incoming) for item in share}
    leaving = _joined([held[item] for share in outgoing for item in share])
    arriving = torch.empty(sum(sizes[item] for share in incoming for item in share), dtype=torch.uint8)
    dist.all_to_all_single(
        arriving,
        leaving,
        [sum(sizes[item] for item in share) for share in incoming],
        [sum(sizes[item] for item in share) for share in outgoing],
    )
    return _cut(arriving, [item for share in incoming for item in share], shapes, dtype)


def hand_on(
    held: Mapping[int, np.ndarray],
    shapes: Mapping[int, Shape],
    dtype: np.dtype,
    items: Sequence[int],
    group: dist.ProcessGroup | None,
    source: int,
) -> dict[int, np.ndarray]:
    """``items`` on every rank of ``group``, from its member ``source`` (a rank of the job). Collective in the group.

    ``held``: on ``source`` holds the items; what it holds is returned to it as it is.
    """
    if not items or group is None or group.size() == 1:
        return {item: held[item] for item in items}
    if world_rank() == source:
        dist.broadcast(_joined([held[item] for item in items]), source, group=group)
        return {item: held[item] for item in items}
    arriving = torch.empty(sum(_num_bytes(shapes[item], dtype) for item in items), dtype=torch.uint8)
    dist.broadcast(arriving, source, group=group)
    return _cut(arriving, items, shapes, dtype)


def _num_bytes(shape: Shape, dtype: np.dtype) -> int:
    return int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize


def _joined(pieces: Sequence[np.ndarray]) -> torch.Tensor:
    flat = [np.ascontiguousarray(piece).reshape(-1).view(np.uint8) for piece in pieces]
    return torch.from_numpy(np.concatenate(flat) if flat else np.empty(0, dtype=np.uint8))


def _cut(buffer: torch.Tensor, items: Sequence[int], shapes: Mapping[int, Shape], dtype: np.dtype) -> dict:
    """The items that lie in ``buffer`` one after the other."""
    found, start, whole = {}, 0, buffer.numpy()
    for item in items:
        end = start + _num_bytes(shapes[item], dtype)
        found[item] = np.frombuffer(whole, dtype=dtype, count=(end - start) // np.dtype(dtype).itemsize, offset=start)
        found[item] = found[item].reshape(shapes[item])
        start = end
    return found
