"""Rank programs of test_gloo.py: what the launcher itself must get right."""

from __future__ import annotations

import time

import torch


def scaled_sum(scale: float) -> tuple[int, torch.Tensor]:
    """All-reduce of `scale * (rank + 1)`, with the rank that computed it."""
    value = torch.tensor([scale * (torch.distributed.get_rank() + 1)])
    torch.distributed.all_reduce(value)
    return torch.distributed.get_rank(), value


def one_rank_raises(bad_rank: int) -> None:
    """`bad_rank` raises while its peers wait in a collective."""
    if torch.distributed.get_rank() == bad_rank:
        raise ValueError(f"broken on purpose at rank {bad_rank}")
    torch.distributed.barrier()


def never_returns() -> None:
    """Sleep longer than any test waits."""
    time.sleep(3600)
