"""Rank programs of test_gloo.py: what the launcher itself must get right."""

from __future__ import annotations

import os
import time

import torch


def scaled_sum(scale: float) -> tuple[int, torch.Tensor]:
    """All-reduce of `scale * (rank + 1)`, with the rank that computed it."""
    value = torch.tensor([scale * (torch.distributed.get_rank() + 1)])
    torch.distributed.all_reduce(value)
    return torch.distributed.get_rank(), value


def joins_by_itself() -> int:
    """Join the group from the environment, as a program under torchrun does."""
    assert not torch.distributed.is_initialized()
    torch.distributed.init_process_group("gloo")
    return torch.distributed.get_world_size()


def one_rank_raises(bad_rank: int) -> None:
    """`bad_rank` raises while its peers wait in a collective."""
    if torch.distributed.get_rank() == bad_rank:
        raise ValueError(f"broken on purpose at rank {bad_rank}")
    torch.distributed.barrier()


def one_rank_dies(bad_rank: int) -> None:
    """`bad_rank` ends without a traceback."""
    if torch.distributed.get_rank() == bad_rank:
        os.abort()
    torch.distributed.barrier()


def never_returns() -> None:
    """Sleep longer than any test waits."""
    time.sleep(3600)
