"""A process that runs one job after the other: what a finished one leaves in it is freed."""

import gc

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel

from megatron_rl.learner.optimizer import unhook


def leave_layout() -> None:
    """Give up the learners of a finished job and Megatron's process groups, but not the job itself. Collective.

    A group has three threads, one of which wakes a hundred times a second: those of thirty finished jobs would take as
    long as the job at hand.
    """
    for candidate in gc.get_objects():
        if type(candidate) is DistributedDataParallel:
            unhook(candidate)
    if dist.is_initialized():
        dist.barrier()  # nobody leaves a group that another still uses
        for group in {*(parallel_state._global_process_group_list or ())} - {None}:
            dist.destroy_process_group(group)
    parallel_state.destroy_model_parallel()  # passes over groups that are gone
    candidate = group = None  # the last of each would live on
    gc.collect()
