"""Names of the shared memory through which tensor-parallel ranks of a vLLM engine on a CPU add up.

vLLM names it after the port of its start, and an engine that joins a world that exists already has none: all such
engines of a machine would share one name. The second of two would not start, nor any after a run that was killed and
left its memory behind.
"""

from __future__ import annotations

import secrets

import torch.distributed as dist
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator, _CPUSHMDistributed

_make_group_name = _CPUSHMDistributed.make_group_name  # vLLM's


def install() -> None:
    """Put this into vLLM, before an engine of this process joins its ranks."""
    _CPUSHMDistributed.make_group_name = staticmethod(group_name)


def group_name(communicator: CpuCommunicator) -> str:
    """vLLM's name and 64 random bits of the group's first rank. Collective over the group."""
    bits = [secrets.token_hex(8)]
    dist.broadcast_object_list(bits, src=communicator.ranks[0], group=communicator.device_group)
    return f"{_make_group_name(communicator)}-{bits[0]}"
