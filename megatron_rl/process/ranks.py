"""Collectives of all ranks of the job: objects, decisions, errors that every rank hears of, and arrays between ranks.

Each also works without a process group, in a job of one process. The learner starts and ends the groups
(`learner.process_groups`).

An array goes from the rank that holds it to the ranks that need it, and to no other. Every rank knows of every array
where it is, where it goes and how large it is. Therefore no sizes, pickles or padding are sent. A rank sends what it
holds and receives what it needs, whatever the number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

try:
    import torch
    import torch.distributed as dist
except ModuleNotFoundError:  # commands that need no engine run without it, in a job of one process
    torch = dist = None

from megatron_rl.errors import Fault, InputError

T = TypeVar("T")


def world_rank() -> int:
    return dist.get_rank() if dist and dist.is_initialized() else 0


def world_size() -> int:
    return dist.get_world_size() if dist and dist.is_initialized() else 1


def store_for_ranks(address: str = "127.0.0.1") -> tuple[Any, dict[str, str]]:
    """A store of this process where ranks meet, as the agent of `torchrun` has one, and the variables that lead to it.

    It binds its port and keeps it while it is referenced. A port that is looked for first and bound later may be
    another process's by then.
    """
    store = dist.TCPStore(address, 0, None, True, wait_for_workers=False)
    return store, {"MASTER_ADDR": address, "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}


def gather_objects(item: T) -> list[T]:
    """One picklable object of every rank, in rank order, on every rank. It unpickles: only data of our own ranks."""
    if world_size() == 1:
        return [item]
    items: list[Any] = [None] * world_size()
    dist.all_gather_object(items, item)
    return items


def gather_to_main(item: T) -> list[T] | None:
    """Return all ranks' items on rank 0, None on the others."""
    if world_size() == 1:
        return [item]
    items: list[Any] | None = [None] * world_size() if world_rank() == 0 else None
    dist.gather_object(item, items, dst=0)
    return items


def broadcast_object(item: T) -> T:
    """Rank 0's ``item`` on every rank."""
    if world_size() == 1:
        return item
    items = [item]
    dist.broadcast_object_list(items, src=0)
    return items[0]


def any_rank(flag: bool) -> bool:
    """True on every rank if ``flag`` is true on one: how a stop request becomes a decision of all."""
    if world_size() == 1:
        return flag
    value = torch.tensor([int(flag)])
    dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return bool(value.item())


def on_main_rank(action: Callable[[], T]) -> T:
    """What ``action`` returns on rank 0, on every rank; an `InputError` that it raises there is raised on all."""
    if world_size() == 1:
        return action()
    result, problem = None, None
    if world_rank() == 0:
        try:
            result = action()
        except InputError as error:
            problem = str(error)
    result, problem = broadcast_object((result, problem))
    if problem is not None:
        raise InputError(problem)
    return result


def _type_and_text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def together(
    what: str,
    action: Callable[[], T],
    *,
    fault: type[Fault] = Fault,
    describe: Callable[[Exception], str] = _type_and_text,
) -> T:
    """Call ``action`` and return its result, once it has succeeded on all ranks.

    Where it raised on one, every rank raises: that rank's `InputError` as one, anything else as a ``fault`` that begins
    with ``what`` and goes on as ``describe`` says. Otherwise the other ranks would wait in their next collective for a
    rank that has left.
    """
    result, problem, own_failure = None, None, None
    try:
        result = action()
    except Exception as error:  # noqa: BLE001 - whatever it is, the other ranks are waiting
        problem = error
        is_input = isinstance(error, InputError)
        own_failure = (is_input, str(error) if is_input else describe(error))
    for rank, failure in enumerate(gather_objects(own_failure)):
        if failure is None:
            continue
        is_input, text = failure
        if is_input:
            raise InputError(text) from problem
        raise fault(f"{what}: " + (f"rank {rank}: " if world_size() > 1 else "") + text) from problem
    return result  # type: ignore[return-value]


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
    local_rows = np.zeros((counts.max(initial=0), width))
    local_rows[: len(rows)] = rows
    gathered = torch.empty((world_size(), *local_rows.shape), dtype=torch.float64)
    dist.all_gather_into_tensor(gathered.view(-1), torch.from_numpy(local_rows).view(-1))
    shares = gathered.numpy()
    rows_of_all = np.empty((len(places), width))
    for rank in range(world_size()):
        its = np.flatnonzero(np.asarray(places) == rank)
        rows_of_all[its] = shares[rank, : len(its)]
    return rows_of_all


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
    """Give ``items`` to every rank of ``group``, from its member ``source`` (a rank of the job). Collective in the
    group.

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
    arrays, start, whole = {}, 0, buffer.numpy()
    for item in items:
        end = start + _num_bytes(shapes[item], dtype)
        arrays[item] = np.frombuffer(whole, dtype=dtype, count=(end - start) // np.dtype(dtype).itemsize, offset=start)
        arrays[item] = arrays[item].reshape(shapes[item])
        start = end
    return arrays
