"""Collectives of all ranks of the job: objects, decisions, and errors that every rank hears of.

Each also works without a process group, in a job of one process. The learner starts and ends the groups
(`learner.process_groups`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from megatron_rl.errors import Fault, InputError

T = TypeVar("T")


def world_rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def gather_objects(item: T) -> list[T]:
    """One picklable object of every rank, in rank order, on every rank. It unpickles: only data of our own ranks."""
    if world_size() == 1:
        return [item]
    items: list[Any] = [None] * world_size()
    dist.all_gather_object(items, item)
    return items


def gather_to_main(item: T) -> list[T] | None:
    """As `gather_objects`, on rank 0 alone; None on the others."""
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
    """``action()`` of this rank, once it has succeeded on all of them.

    Where it raised on one, every rank raises: that rank's `InputError` as one, anything else as a ``fault`` that begins
    with ``what`` and goes on as ``describe`` says. Otherwise the other ranks would wait in their next collective for a
    rank that has left.
    """
    result, problem, found = None, None, None
    try:
        result = action()
    except Exception as error:  # noqa: BLE001 - whatever it is, the other ranks are waiting
        problem = error
        is_input = isinstance(error, InputError)
        found = (is_input, str(error) if is_input else describe(error))
    for rank, failure in enumerate(gather_objects(found)):
        if failure is None:
            continue
        is_input, text = failure
        if is_input:
            raise InputError(text) from problem
        raise fault(f"{what}: " + (f"rank {rank}: " if world_size() > 1 else "") + text) from problem
    return result  # type: ignore[return-value]
