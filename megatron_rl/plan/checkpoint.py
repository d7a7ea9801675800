"""What a checkpoint costs a rank: bytes on disk, memory while it is written, time.

Every rank writes an equal share: its part of the weights, which data-parallel ranks hold alike, and the master weights
and moments that it owns (`checkpoint.sharded`). The share is written from where it lies.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_rl.plan.activations import BYTES
from megatron_rl.plan.hardware import DISK, HASH, HOST_LINK
from megatron_rl.plan.learner import MASTER_BYTES, MOMENT_BYTES
from megatron_rl.plan.parameters import StageParameters, adapter_parameters, stage_parameters
from megatron_rl.plan.workload import Workload

FILES = 2  # that a rank writes, one after the other
PINNED = 2.0  # torch rounds a pinned block up to a power of two


@dataclass(frozen=True)
class CheckpointCost:
    """Of one rank of the pipeline stage that has most."""

    size: float  # bytes that it writes, and again reads for their hash
    device: float  # bytes more on the GPU while it is written
    host: float  # bytes of host memory
    stalled_s: float  # that training waits for: the copy to the host, or with `checkpoint.async_save: false` all of it
    written_s: float  # until it is whole


def checkpoint_cost(work: Workload, disk: float = DISK) -> CheckpointCost:
    """Of one save of ``work``. ``disk``: bytes/s that one node writes."""
    size = max(_share(work, stage) for stage in stage_parameters(work.architecture, work.parallel))
    written = size * work.gpus_per_node / disk + size / HASH
    if work.recipe.checkpoint.async_save:
        copy = size / (HOST_LINK * work.gpu.host_link)
        return CheckpointCost(size, 0.0, PINNED * size, copy, copy + written)
    return CheckpointCost(size, 0.0, size / FILES, written, written)


def _share(work: Workload, stage: StageParameters) -> float:
    p, learner = work.parallel, work.recipe.learner
    b, experts = BYTES[learner.dtype], max(1, work.ranks // (p.expert * p.expert_tensor * p.pipeline))
    dense = work.data_parallel * p.context
    trained = MASTER_BYTES + MOMENT_BYTES  # fp32 weights, their own masters, are written under both names
    if learner.lora is not None:
        weights = stage.dense / dense + stage.expert / experts
        adapters = adapter_parameters(work.architecture, learner.lora, p, stage)
        return b * weights + (b + trained) * (adapters[0] / dense + adapters[1] / experts)
    return (b + trained) * (stage.dense / dense + stage.expert / experts)
