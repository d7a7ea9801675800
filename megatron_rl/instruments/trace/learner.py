"""Traces the learner of a recipe as one rank of its job: construction, optimizer states, save, weight update."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.utils import unwrap_model

from megatron_rl.checkpoint.sharded import CONTENT_METADATA, allocate_moments, distributed_optimizers, sharded_state
from megatron_rl.config import Recipe
from megatron_rl.config.learner import ParallelConfig
from megatron_rl.instruments.trace.fake_rank import fake_rank
from megatron_rl.instruments.trace.recorder import Phase, storage_bytes
from megatron_rl.learner.learner import Learner
from megatron_rl.model.architecture import Architecture

OWN = "own"
FORMATS = (OWN, "fully_reshardable", "dp_reshardable")
"""Formats of a traced save: the run's own, or Megatron's builders by name."""


@dataclass
class RankTrace:
    """The trace of one rank. Bytes are those of tensors, not rounded to an allocator's blocks."""

    rank: int
    world_size: int
    stage: int  # pipeline stage
    num_layers: int  # on this rank
    parameters: int  # on this rank
    checkpoint_format: str
    static: dict[str, int] = field(default_factory=dict)  # kind → bytes on the device: weights, gradients, …
    phases: list[Phase] = field(default_factory=list)  # construction, optimizer states, save, refit, passes, update

    def phase(self, name: str) -> Phase:
        return next(phase for phase in self.phases if phase.name == name)


def trace_rank(
    recipe: Recipe, architecture: Architecture, rank: int, world_size: int, checkpoint_format: str = OWN
) -> RankTrace:
    """Build and trace the learner of ``recipe`` with a model of ``architecture`` as ``rank`` of ``world_size``.

    Raises `InputError` if the recipe's learner cannot be built on GPUs.
    """
    runtime = recipe.runtime.model_copy(update={"device": "cuda"})
    recipe = recipe.model_copy(update={"runtime": runtime})
    with fake_rank(rank, world_size, architecture) as recorder:
        with recorder.phase("construction"):
            learner = Learner(recipe)
        with recorder.phase("optimizer states"):
            allocate_moments(learner.optimizer)
        trace = RankTrace(
            rank,
            world_size,
            parallel_state.get_pipeline_model_parallel_rank(),
            len(learner.module.decoder.layers),
            sum(parameter.numel() for parameter in learner.module.parameters()),
            checkpoint_format,
            static=_static(learner, recorder.held()["cuda"]),
            phases=recorder.phases,
        )
        with recorder.phase("checkpoint"):
            _state_of_a_save(learner, checkpoint_format)
        with recorder.phase("weights to the engine"):
            _send(learner)
    return trace


def ranks_that_differ(parallel: ParallelConfig, world_size: int) -> list[int]:
    """Return one rank of each pipeline stage whose share differs: the first, one in the middle, the last.

    Ranks of a stage have the same number of bytes, except for padding at the end of a data-parallel buffer.
    """
    per_stage = world_size // parallel.pipeline
    stages = sorted({0, min(1, parallel.pipeline - 1), parallel.pipeline - 1})
    return [stage * per_stage for stage in stages]


def _state_of_a_save(learner: Learner, checkpoint_format: str) -> Any:
    if checkpoint_format == OWN:
        return sharded_state(learner.model, learner.optimizer)
    metadata = {**CONTENT_METADATA, "distrib_optim_sharding_type": checkpoint_format}
    weights = unwrap_model(learner.model).sharded_state_dict(metadata=dict(metadata))
    return weights, learner.optimizer.sharded_state_dict(weights, is_loading=False, metadata=metadata)


def _send(learner: Learner) -> None:
    """Send the weights and keep one tensor at a time, as an engine does."""
    for _name, _tensor in learner.export_weights():
        pass


def _static(learner: Learner, held: int) -> dict[str, int]:
    """Return the bytes on the device between steps by kind; "other" is the rest."""
    wrapped = learner.model
    kinds: dict[str, list[torch.Tensor]] = {
        "weights": [parameter.data for parameter in learner.module.parameters()],
        "gradients": [buffer.grad_data for buffer in (*wrapped.buffers, *wrapped.expert_parallel_buffers)],
        "master weights": [],
        "moments": [],
    }
    for chained in distributed_optimizers(learner.optimizer):
        masters = [part for group in chained.shard_fp32_from_float16_groups for part in group if part is not None]
        kinds["master weights"] += masters
        for state in chained.optimizer.state.values():
            kinds["moments"] += [tensor for tensor in state.values() if _is_moment(tensor)]
    static = {kind: storage_bytes(_on_device(tensors)) for kind, tensors in kinds.items()}
    return static | {"other": held - sum(static.values())}


def _is_moment(tensor: Any) -> bool:
    return isinstance(tensor, torch.Tensor) and tensor.dim() > 0


def _on_device(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor for tensor in tensors if tensor.device.type == "cuda"]
