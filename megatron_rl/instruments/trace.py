"""`megatron-rl recipe trace`: the real learner of a recipe, built at full size as one rank of its job, on any machine.

A trace is construction, optimizer states, save, and an update, shown as text and as JSON values. Tensors are fake
(shapes, dtypes and devices without values), and so are other ranks (collectives return at once). `fake_rank` lists the
substitutions and counts.

An update is a forward and a backward pass over a microbatch, and Adam's step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.optimizer import clip_grads
from megatron.core.optimizer.optimizer import MixedPrecisionOptimizer
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from megatron.core.utils import unwrap_model
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_rl.checkpoint.shards import CONTENT_METADATA, allocate_moments, distributed_optimizers, sharded_state
from megatron_rl.config import Recipe
from megatron_rl.config.learner import ParallelConfig, RoutingConfig
from megatron_rl.instruments.fake_rank import DEVICE, HOST, Phase, fake_rank, storage_bytes
from megatron_rl.instruments.plan.hardware import GIB, GRAPHS_GIB, RUNTIME_GIB
from megatron_rl.instruments.plan.learner import learner_memory
from megatron_rl.instruments.plan.memory import PLACEMENT, learner_stages
from megatron_rl.instruments.plan.workload import Workload
from megatron_rl.layers.context import ContextShare
from megatron_rl.learner.learner import Learner
from megatron_rl.model.architecture import Architecture
from megatron_rl.types import Batch, Sequence

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


# Replaces decisions that depend on values, which fake tensors lack: all experts get equal numbers of rows.
#
# | in training | in a traced update |
# |---|---|
# | the dispatcher counts rows by expert | equal counts, or as equal as integers are; the same exchange of counts |
# | `masked_select` of a routing map | as many rows as tokens times experts per token |
# | a number that is read from a tensor | 1; 0 where gradients are looked through for overflows |
# | Megatron's norm of many tensors, through Python numbers | the same norm through tensors, as fused kernels take it |


_aten = torch.ops.aten


class _Values(TorchDispatchMode):
    """Returns results that fake tensors cannot compute. Enter it inside the mode that makes tensors fake."""

    def __init__(self, experts_per_token: int):
        super().__init__()
        self.experts_per_token = experts_per_token
        self.number = 1.0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func is _aten.masked_select.default:  # of [experts, tokens]
            tensor, mask = args
            return tensor.new_empty(mask.shape[1] * self.experts_per_token)
        if func is _aten._local_scalar_dense.default:
            dtype = args[0].dtype
            return False if dtype == torch.bool else float(self.number) if dtype.is_floating_point else 1
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def uniform_routes(experts_per_token: int) -> Iterator[None]:
    """Make updates of a learner possible under fake tensors, with uniform routes."""
    values = _Values(experts_per_token)
    look = MixedPrecisionOptimizer._unscale_main_grads_and_check_for_nan

    def without_overflow(optimizer: MixedPrecisionOptimizer) -> bool:
        with mock.patch.object(values, "number", 0.0):
            return look(optimizer)

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(MoEAlltoAllTokenDispatcher, "preprocess", _equal_counts))
        stack.enter_context(mock.patch.object(clip_grads, "l2_norm_impl", _norm))
        patched = mock.patch.object(MixedPrecisionOptimizer, "_unscale_main_grads_and_check_for_nan", without_overflow)
        stack.enter_context(patched)
        stack.enter_context(values)
        yield


def balanced(total: int, parts: int) -> np.ndarray:
    """Return integers [parts] that sum to ``total`` and differ by at most one."""
    return np.diff(np.arange(parts + 1) * total // parts)


def _norm(size: int, overflow: torch.Tensor, tensors: list[list[torch.Tensor]], per_tensor: bool) -> tuple:
    return torch.stack([tensor.norm() for tensor in tensors[0]]).norm(), None


def _equal_counts(self: MoEAlltoAllTokenDispatcher, routing_map: torch.Tensor) -> np.ndarray:
    """Replace `preprocess`: return equal counts on the host, where the original copies them later."""
    local = routing_map.sum(dim=0).long()
    self.num_out_tokens = routing_map.size(0) * self.config.moe_router_topk
    counts = balanced(self.num_out_tokens, self.num_experts)
    local_counts = counts[self.local_expert_indices[0] : self.local_expert_indices[-1] + 1]
    sources = self.tp_size * self.ep_size
    if sources > 1:
        gather_from_sequence_parallel_region(local, group=self.tp_ep_group)
        self.input_splits = counts.reshape(self.ep_size, -1).sum(axis=1)
        self.output_splits = np.full(self.ep_size, local_counts.sum())
        self.output_splits_tp = np.full(self.tp_size, local_counts.sum() * self.ep_size)
        self._maybe_update_cuda_sync_point("before_ep_alltoall")
    else:
        self._maybe_update_cuda_sync_point("before_finish")
    chunks = np.arange(self.num_experts * self.tp_size)
    self.sort_input_by_local_experts = chunks.reshape(-1, self.num_local_experts).T.ravel()
    self.restore_output_by_local_experts = chunks.reshape(self.num_local_experts, -1).T.ravel()
    self.num_global_tokens_per_local_expert = np.tile(local_counts, (sources, 1))
    return local_counts * sources


PASSES, UPDATE = "forward and backward", "update"


def why_untraced(work: Workload) -> str:
    """Return why an update cannot be traced; empty if it can."""
    if work.parallel.pipeline > 1:
        return "stages of a pipeline tell each other the shapes of what they send, and these are values"
    if work.architecture.is_moe and work.parallel.expert * work.parallel.expert_tensor == 1:
        return "without expert parallelism rows are sorted by values"
    if work.recipe.rollout.engine == "exact":
        return "exact mode reads the lengths of packed rows, which are values"
    return ""


def trace_update(work: Workload, rank: int) -> list[Phase]:
    """Trace `PASSES` over a microbatch of ``work.microbatch_tokens`` tokens, and `UPDATE`. Routes are not replayed."""
    runtime = work.recipe.runtime.model_copy(update={"device": "cpu"})
    recipe = work.recipe.model_copy(update={"runtime": runtime, "routing": RoutingConfig()})
    batch = _batch(work)
    with (
        fake_rank(rank, work.ranks, work.architecture, device="cpu") as recorder,
        uniform_routes(work.architecture.experts_per_token),
    ):
        learner = Learner(recipe)
        allocate_moments(learner.optimizer)
        with recorder.phase(PASSES) as passes:
            learner.accumulate(batch, batch.minibatches[0], batch.minibatches[0])
        with recorder.phase(UPDATE) as update:
            learner.overflow.step()
    return [passes, update]


def _batch(work: Workload) -> Batch:
    """Return the fewest sequences that fill one microbatch of each data-parallel rank.

    They have equal lengths without padding, because removing padding depends on values.
    """
    tokens, share = work.microbatch_tokens, ContextShare(work.parallel.context)
    multiple = share.row_multiple(work.parallel.tensor)
    num_sequences = -(-tokens // work.longest)
    length = tokens // num_sequences // multiple * multiple
    sequences = [_sequence(i, length, work) for i in range(num_sequences * work.data_parallel)]
    return Batch(0, sequences, [list(range(len(sequences)))])


def _sequence(number: int, length: int, work: Workload) -> Sequence:
    prompt = min(work.recipe.data.prompt.max_length, length // 2)
    response, candidates = length - prompt, work.recipe.rollout.candidates
    return Sequence(
        id=f"traced/{number}",
        tokens=np.ones(length, np.int64),
        prompt_length=prompt,
        inference_logprobs=np.zeros(response, np.float32),
        loss_mask=np.ones(response, bool),
        advantage=1.0,
        reward=1.0,
        policy_versions=np.zeros(response, np.int32),
        old_logprobs=np.zeros(response, np.float32),
        kept_tokens=np.ones((response, candidates), np.int32) if candidates else None,
    )


# Compares a trace with `plan`, to check the plan's arithmetic against the real learner.


TOLERANCE = 0.05  # relative error per static kind; `plan` leaves out padding of buffers


@dataclass(frozen=True)
class Comparison:
    """One static kind on one rank, in bytes."""

    rank: int
    kind: str
    traced: float
    planned: float

    @property
    def error(self) -> float:
        """Error of the plan relative to the trace; 0 if both are 0."""
        return 0.0 if self.planned == self.traced else (self.planned - self.traced) / max(self.traced, 1.0)

    @property
    def holds(self) -> bool:
        return abs(self.error) <= TOLERANCE


def compare_static(work: Workload, trace: RankTrace) -> list[Comparison]:
    """Return the comparison of each static kind of a rank with the plan of its pipeline stage, and of their sum."""
    planned = learner_stages(work)[trace.stage]
    kinds = {
        "weights": planned.weights,
        "gradients": planned.gradients,
        "master weights": planned.masters,
        "moments": planned.moments,
    }
    comparisons = [Comparison(trace.rank, kind, trace.static[kind], size) for kind, size in kinds.items()]
    return [*comparisons, Comparison(trace.rank, "all static", sum(trace.static.values()), planned.static)]


def room_for_a_save(work: Workload, trace: RankTrace) -> float:
    """Return the free bytes of a GPU during a save, beside the resting learner, the runtime and a sleeping engine."""
    asleep = GRAPHS_GIB * GIB if is_colocated(work) else 0.0
    return work.gpu.memory_gib * GIB - RUNTIME_GIB * GIB - asleep - sum(trace.static.values())


def planned_passes(work: Workload, fused: bool) -> float:
    """Return the bytes of a forward and a backward pass in `plan`, with uniform routes.

    ``fused``: with TransformerEngine's layers, else with the traced layers.
    """
    (stage,) = learner_memory(
        work.architecture,
        work.recipe.learner,
        work.ranks,
        work.microbatch_tokens,
        fp32_head=work.recipe.precision.fp32_head,
        fused=fused,
    )
    return stage.activations + max(stage.head, stage.layer) + stage.buffers


def save_fits(work: Workload, trace: RankTrace) -> bool:
    return trace.phase("checkpoint").transient(DEVICE) <= room_for_a_save(work, trace)


def differences(work: Workload, traces: list[RankTrace]) -> list[str]:
    """Return messages on differences from `plan` above `TOLERANCE` and on saves that do not fit."""
    messages = [
        f"rank {line.rank}: {line.kind}: {line.planned / GIB:.2f} GiB by plan, {line.traced / GIB:.2f} traced "
        f"({line.error:+.1%})"
        for trace in traces
        for line in compare_static(work, trace)
        if not line.holds
    ]
    for trace in traces:
        if not save_fits(work, trace):
            needed, free = trace.phase("checkpoint").transient(DEVICE) / GIB, room_for_a_save(work, trace) / GIB
            form = trace.checkpoint_format
            messages.append(
                f"rank {trace.rank}: a save in the format {form} adds {needed:.2f} GiB, {free:.2f} are free"
            )
    return messages


def is_colocated(work: Workload) -> bool:
    """Return whether an engine sleeps on the learner's GPUs."""
    return PLACEMENT[work.recipe.rollout.engine] == "colocated"


MIB = 1 << 20


def render(work: Workload, traces: list[RankTrace]) -> str:
    p = work.parallel
    lines = [
        f"{work.recipe.name}: {work.ranks} ranks, TP{p.tensor} · PP{p.pipeline} · CP{p.context} · "
        f"DP{work.data_parallel} · EP{p.expert} · ETP{p.expert_tensor}, {work.recipe.learner.dtype}; "
        "fake tensors, fake process groups"
    ]
    for trace in traces:
        lines += ["", *_rank(work, trace)]
    return "\n".join(lines)


def as_json(work: Workload, traces: list[RankTrace]) -> dict[str, Any]:
    """Return the traces as JSON values; sizes are in bytes."""
    return {"recipe": work.recipe.name, "ranks": work.ranks, "traces": [_rank_json(work, trace) for trace in traces]}


def _rank(work: Workload, trace: RankTrace) -> list[str]:
    lines = [
        f"rank {trace.rank} (pipeline stage {trace.stage}): {trace.num_layers} layers, "
        f"{trace.parameters / 1e9:.3f} B parameters",
        "  at rest           traced      plan     error",
    ]
    for line in compare_static(work, trace):
        state = "" if line.holds else f"  ← beyond {TOLERANCE:.0%}"
        lines.append(
            f"    {line.kind:<14} {line.traced / GIB:7.2f} {line.planned / GIB:9.2f} GiB {line.error:+7.1%}{state}"
        )
    lines.append(f"    {'other':<14} {trace.static['other'] / GIB:7.2f}           (part of the sum)")
    lines.append("  added, GiB              device: at most      kept    host: at most      kept")
    for phase in trace.phases:
        sizes = [size / GIB for where in (DEVICE, HOST) for size in (phase.transient(where), phase.kept(where))]
        lines.append("    {:<22} {:15.2f} {:9.2f} {:16.2f} {:9.2f}".format(phase.name, *sizes))
    lines += [_save(work, trace), _passes(work, trace)]
    lines.append("  collectives")
    for phase in trace.phases:
        lines += [
            f"    {phase.name:<22} {call.kind:<18} {call.group} of {call.size}: {count} × {size / count / MIB:.2f} MiB"
            for call, (count, size) in phase.sent.items()
        ]
    return lines


def _save(work: Workload, trace: RankTrace) -> str:
    room, needed = room_for_a_save(work, trace), trace.phase("checkpoint").transient(DEVICE)
    state = "fits" if save_fits(work, trace) else "DOES NOT FIT"
    return (
        f"  a save in the format {trace.checkpoint_format} adds {needed / GIB:.2f} GiB where {room / GIB:.1f} GiB are "
        f"free beside {'a sleeping engine' if is_colocated(work) else 'the learner'}: {state}"
    )


def _passes(work: Workload, trace: RankTrace) -> str:
    if reason := why_untraced(work):
        return f"  no forward and backward pass is traced: {reason}"
    if PASSES not in [phase.name for phase in trace.phases]:
        return "  no forward and backward pass was asked for"
    traced = trace.phase(PASSES).transient(DEVICE)
    plain, transformer_engine = (planned_passes(work, fused) for fused in (False, True))
    return (
        f"  {PASSES} of {work.microbatch_tokens} tokens: {traced / GIB:.2f} GiB traced, {plain / GIB:.2f} by plan "
        f"({plain / traced - 1:+.1%}); {transformer_engine / GIB:.2f} by plan with TransformerEngine's layers"
    )


def _rank_json(work: Workload, trace: RankTrace) -> dict[str, Any]:
    record = {
        "rank": trace.rank,
        "stage": trace.stage,
        "num_layers": trace.num_layers,
        "parameters": trace.parameters,
        "static": {
            line.kind: {"traced": line.traced, "planned": line.planned, "error": line.error, "holds": line.holds}
            for line in compare_static(work, trace)
        }
        | {"other": {"traced": trace.static["other"]}},
        "phases": {
            phase.name: {
                "device_transient": phase.transient(DEVICE),
                "device_kept": phase.kept(DEVICE),
                "host_transient": phase.transient(HOST),
                "host_kept": phase.kept(HOST),
                "collectives": [
                    {"kind": call.kind, "group": call.group, "group_size": call.size, "count": count, "bytes": size}
                    for call, (count, size) in phase.sent.items()
                ],
            }
            for phase in trace.phases
        },
        "checkpoint": {
            "format": trace.checkpoint_format,
            "free_beside_sleeping_engine": room_for_a_save(work, trace),
            "fits": save_fits(work, trace),
        },
    }
    if PASSES in record["phases"]:
        planned = {"planned": planned_passes(work, False), "planned_fused": planned_passes(work, True)}
        record["passes"] = {
            "tokens": work.microbatch_tokens,
            "traced": trace.phase(PASSES).transient(DEVICE),
            **planned,
        }
    return record
