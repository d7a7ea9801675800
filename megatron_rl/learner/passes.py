"""Passes of the model over a batch: packed microbatches, Megatron's schedule, and routing as asked for.

Before them, sequences go from the ranks that sampled them to the data-parallel replicas that learn from them, once.
`packing.deal` decides from lengths alone which replica learns from what, the same on every rank, so nothing has to be
asked. An array goes from its owner to the rank that speaks for the replica, in one all_to_all for each kind of array,
and from there to the replica's other ranks. What a rank has afterwards is what its replica learns from; the rest is
known by length, reward and advantage.

Where a batch has several mini-batches and needs a pass before its updates, that pass is dealt over the whole batch: a
sequence can then belong to one replica in the pass and to another in its update. It goes to both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.mappings import scatter_to_sequence_parallel_region

from megatron_rl.config.learner import LearnerConfig
from megatron_rl.exact.invariant import batch_invariant
from megatron_rl.layers.context import ContextShare
from megatron_rl.learner.model import use_transformer_engine
from megatron_rl.learner.packing import Microbatch, RouterScores, build_microbatch, deal
from megatron_rl.learner.process_groups import replica_group
from megatron_rl.learner.router_replay import RouterReplayer, RoutingMode
from megatron_rl.process.ranks import Shape, gather_objects, hand_on, send, together, world_rank
from megatron_rl.routing import RouteError
from megatron_rl.types import SCORED_ARRAYS, SET_ARRAYS, Batch, Rollout

LOGPROBS = np.dtype(np.float32)


@dataclass(frozen=True)
class Replicas:
    """The learner's data-parallel replicas."""

    own: int  # number of this rank's replica
    speakers: tuple[int, ...]  # of each replica the rank that receives, writes and reports for it
    group: dist.ProcessGroup | None  # of this rank's replica; None without a world

    @classmethod
    def of_job(cls) -> Replicas:
        """Those of Megatron's layout. Collective."""
        own = parallel_state.get_data_parallel_rank()
        gathered = gather_objects(own if speaks() else None)
        rank_of = {replica: rank for rank, replica in enumerate(gathered) if replica is not None}
        group = replica_group() if dist.is_initialized() else None
        return cls(own, tuple(rank_of[replica] for replica in range(len(rank_of))), group)

    def hand_on(
        self, held: Mapping[int, np.ndarray], shapes: Mapping[int, Shape], dtype: np.dtype, items: list
    ) -> dict:
        """Give ``items``, which the speaker of this replica holds, to all its ranks."""
        return hand_on(held, shapes, dtype, items, self.group, self.speakers[self.own])


def speaks() -> bool:
    """One rank per data-parallel replica speaks for it: first of its tensor and context groups, on the last stage."""
    first = parallel_state.get_tensor_model_parallel_rank() == parallel_state.get_context_parallel_rank() == 0
    return first and parallel_state.is_pipeline_last_stage()


@dataclass(frozen=True)
class _Field:
    """A kind of array: its name in `Rollout`, what travels, and what it is made of on arrival."""

    name: str
    dtype: np.dtype
    shape: Callable[[Rollout], Shape]
    becomes: np.dtype | None = None  # None: as it travels


_TOKENS = _Field("tokens", np.dtype(np.int32), lambda s: (s.length,))


@dataclass(frozen=True)
class _Contents:
    """What the sequences of a batch have beside tokens, log-probs and versions."""

    routes: tuple[str, int, int] | None  # dtype, layers and experts per token
    logprobs: tuple[str, ...]  # further log-probs of each token: of the exact engine, and of second models
    widths: tuple[int, ...]  # most numbers of a token in each of `SET_ARRAYS`; 0: there are none
    masks: bool  # the policy sampled a part of some response

    @classmethod
    def of(cls, batch: Batch) -> _Contents:
        """Return what any rank has. Collective."""
        routes = next((s.routed_experts for s in batch.sequences if s.routed_experts is not None), None)
        names = ("exact_logprobs", *SCORED_ARRAYS)
        present = [any(getattr(s, name) is not None for s in batch.sequences) for name in names]
        widths = tuple(
            max((array.shape[1] for s in batch.sequences if (array := getattr(s, name)) is not None), default=0)
            for name in SET_ARRAYS
        )
        about = gather_objects((None if routes is None else (routes.dtype.str, *routes.shape[1:]), present, widths))
        shapes, flags, widths = zip(*about, strict=True)
        masks = any(s.num_sampled < s.length for s in batch.sequences)
        return cls(
            next((shape for shape in shapes if shape is not None), None),
            tuple(name for name, here in zip(names, zip(*flags, strict=True), strict=True) if any(here)),
            tuple(map(max, zip(*widths, strict=True))),
            masks,
        )

    @property
    def fields(self) -> list[_Field]:
        described = [
            _TOKENS,
            _Field("inference_logprobs", LOGPROBS, lambda s: (s.length,)),
            _Field("policy_versions", np.dtype(np.int32), lambda s: (s.length,)),
        ]
        described += [_Field(name, LOGPROBS, lambda s: (s.length,)) for name in self.logprobs]
        if self.masks:
            described.append(_Field("sampled", np.dtype(np.uint8), lambda s: (s.length,), np.dtype(np.bool_)))
        described += [
            _Field(name, np.dtype(dtype), lambda s, width=width: (s.length, width))
            for (name, dtype), width in zip(SET_ARRAYS.items(), self.widths, strict=True)
            if width
        ]
        return described if self.routes is None else [*described, *_route_fields(*self.routes)]


def _route_fields(dtype: str, layers: int, topk: int) -> list[_Field]:
    return [
        _Field("route_checksums", np.dtype(np.int64), lambda s: (s.whole_length - 1 + layers,)),
        _Field("routed_experts", np.dtype(dtype), lambda s: (s.whole_length - 1, layers, topk)),
    ]


def distribute(batch: Batch, homes: list[list[int]], replicas: Replicas) -> None:
    """Bring every sequence to the replicas ``homes[i]``, and forget it everywhere else.

    What every rank holds (`Rollout.owner` None) stays as it is. Collective.
    """
    numbers = [i for i, s in enumerate(batch.sequences) if s.owner is not None]
    if not numbers:
        return
    moves = [(i, batch.sequences[i].owner, replicas.speakers[home]) for i in numbers for home in homes[i]]
    wanted = [i for i in numbers if replicas.own in homes[i]]
    contents = _Contents.of(batch)
    for sequence in (batch.sequences[i] for i in numbers if contents.masks):
        if sequence.tokens is not None and sequence.sampled is None:
            sequence.sampled = np.full(sequence.length, True)
    for field in contents.fields:
        _move(batch, field, numbers, moves, wanted, replicas)


def hand_over_routes(batch: Batch, source: list[int], target: list[int], replicas: Replicas) -> None:
    """Routes that replica ``source[i]`` has recorded, to replica ``target[i]``. Collective."""
    if source != target:
        _hand_over(batch, _route_fields(*_Contents.of(batch).routes), source, target, replicas)


def hand_over_scores(batch: Batch, source: list[int], target: list[int], replicas: Replicas) -> None:
    """Routers' scores that replica ``source[i]`` has kept, to replica ``target[i]``. Collective."""
    shape = _shape_beyond_tokens(batch, "old_scores")
    kinds = (("old_experts", np.dtype(np.int16)), ("old_scores", np.dtype(np.float32)))
    fields = [_Field(name, dtype, lambda s: (s.whole_length, *shape)) for name, dtype in kinds]
    _hand_over(batch, fields, source, target, replicas)


def hand_over_sets(batch: Batch, names: list[str], source: list[int], target: list[int], replicas: Replicas) -> None:
    """Arrays [R, k] that replica ``source[i]`` has found, to replica ``target[i]``. Collective."""
    fields = []
    for name in names:
        shape, dtype = _shape_beyond_tokens(batch, name), np.dtype(SET_ARRAYS.get(name, LOGPROBS))
        fields.append(_Field(name, dtype, lambda s, shape=shape: (s.length, *shape)))
    _hand_over(batch, fields, source, target, replicas)


def _shape_beyond_tokens(batch: Batch, name: str) -> Shape:
    """The shape of one token of the array ``name``, from whichever rank has a sequence with it. Collective."""
    arrays = (getattr(s, name) for s in batch.sequences)
    shapes = gather_objects(next((array.shape[1:] for array in arrays if array is not None), None))
    return next(shape for shape in shapes if shape is not None)


def _hand_over(batch: Batch, fields: list[_Field], source: list[int], target: list[int], replicas: Replicas) -> None:
    """Move ``fields`` of every sequence whose two replicas differ. Collective."""
    numbers = [i for i in range(len(batch.sequences)) if source[i] != target[i]]
    moves = [(i, replicas.speakers[source[i]], replicas.speakers[target[i]]) for i in numbers]
    wanted = [i for i in numbers if target[i] == replicas.own]
    for field in fields if numbers else ():
        _move(batch, field, numbers, moves, wanted, replicas)


def hand_over_logprobs(
    batch: Batch, computed: Mapping[int, np.ndarray], source: list[int], target: list[int], replicas: Replicas
) -> dict[int, np.ndarray]:
    """Log-probs [R] that replica ``source[i]`` has found, at replica ``target[i]``, by number of the sequence.

    ``computed``: this replica's, on its last stage. Where both are the same they stay there. Collective.
    """
    moving = [i for i in range(len(batch.sequences)) if source[i] != target[i]]
    shapes = {i: (batch.sequences[i].length,) for i in moving}
    arrived = send(
        computed, shapes, LOGPROBS, [(i, *(replicas.speakers[x[i]] for x in (source, target))) for i in moving]
    )
    wanted = [i for i in moving if target[i] == replicas.own]
    stayed = {i: logprobs for i, logprobs in computed.items() if source[i] == target[i]}
    return stayed | replicas.hand_on(arrived, shapes, LOGPROBS, wanted)


def tokens_at(batch: Batch, target: list[int], replicas: Replicas) -> dict[int, np.ndarray]:
    """Tokens [R] int32 of the responses that ``target`` [B] gives to this replica, by number, from the replicas that
    have learned from them (`Rollout.holder`). The batch stays as it is. Collective."""
    shapes = {i: _TOKENS.shape(s) for i, s in enumerate(batch.sequences)}
    held = {
        i: np.ascontiguousarray(s.tokens, dtype=_TOKENS.dtype)
        for i, s in enumerate(batch.sequences)
        if s.holder == world_rank()
    }
    moves = [(i, s.holder, replicas.speakers[target[i]]) for i, s in enumerate(batch.sequences)]
    held |= send(held, shapes, _TOKENS.dtype, moves)
    return replicas.hand_on(held, shapes, _TOKENS.dtype, [i for i in shapes if target[i] == replicas.own])


def _move(
    batch: Batch,
    field: _Field,
    numbers: list[int],
    moves: list[tuple[int, int, int]],
    wanted: list[int],
    replicas: Replicas,
) -> None:
    shapes = {i: field.shape(batch.sequences[i]) for i in numbers}
    here = {i: array for i in numbers if (array := getattr(batch.sequences[i], field.name)) is not None}
    rank = world_rank()
    leaving = {i for i, source, target in moves if source == rank}
    held = {i: np.ascontiguousarray(array, dtype=field.dtype) for i, array in here.items() if i in leaving}
    for i in numbers:
        assert i not in held or held[i].shape == shapes[i], f"{batch.sequences[i].id}: {field.name} {held[i].shape}"
        setattr(batch.sequences[i], field.name, None)
    held |= send(held, shapes, field.dtype, moves)
    for i, array in replicas.hand_on(held, shapes, field.dtype, wanted).items():
        setattr(batch.sequences[i], field.name, array if field.becomes is None else array.astype(field.becomes))


def keep_scores(batch: Batch, microbatch: Microbatch) -> None:
    """Give the sequences of ``microbatch`` what its `router_now` says of their tokens."""
    experts = microbatch.router_now.experts.to(torch.int16).cpu().numpy()
    log_scores = microbatch.router_now.log_scores.cpu().numpy()
    for i, start in zip(microbatch.indices, microbatch.row.starts):  # padding at the end belongs to none
        sequence = batch.sequences[i]
        sequence.old_experts = experts[start : start + sequence.whole_length].copy()
        sequence.old_scores = log_scores[start : start + sequence.whole_length].copy()


def scores_before(batch: Batch, microbatch: Microbatch, device: torch.device) -> RouterScores | None:
    """What `keep_scores` kept of the sequences of ``microbatch``, as one row; None where nothing was kept."""
    sequences = [batch.sequences[i] for i in microbatch.indices]
    if not sequences or any(sequence.old_scores is None for sequence in sequences):
        return None
    shape = (microbatch.tokens.numel(), *sequences[0].old_scores.shape[1:])
    experts, log_scores = np.zeros(shape, np.int64), np.zeros(shape, np.float32)
    for sequence, start in zip(sequences, microbatch.row.starts):
        experts[start : start + sequence.whole_length] = sequence.old_experts
        log_scores[start : start + sequence.whole_length] = sequence.old_scores
    return RouterScores(torch.from_numpy(experts).to(device), torch.from_numpy(log_scores).to(device))


def router_shift(microbatch: Microbatch) -> torch.Tensor | None:
    """[n] float32: Δ, the mean over layers and experts of |log score - log old score| of the tokens that predict the
    response [arXiv 2510.23027 Eqs 5-6]; None without a `router_before`."""
    if microbatch.router_before is None:
        return None
    difference = microbatch.router_now.log_scores - microbatch.router_before.log_scores
    return difference.abs().mean(dim=(1, 2))[microbatch.positions]


PhaseFn = Callable[[str], AbstractContextManager]


class Passes:
    """Forward and backward passes. ``model`` is ``module`` (the bare GPTModel) wrapped for data parallelism.

    ``weights``: a context in which the model has the weights that passes compute with.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        module: torch.nn.Module,
        config: LearnerConfig,
        device: torch.device,
        replay: RouterReplayer | None,
        exact: bool,
        phase: PhaseFn,
        weights: Callable[[], AbstractContextManager] = nullcontext,
    ):
        self._model, self.module, self._config, self._device = model, module, config, device
        self._replay, self._exact, self._phase, self.weights = replay, exact, phase, weights

    def microbatches(self, batch: Batch, indices: list[int] | range, mode: RoutingMode = "native") -> list[Microbatch]:
        """This rank's share of sequences ``indices``, as many microbatches on every rank; with the routes that
        ``mode`` needs.

        Raises:
            RouteError: a sequence's routes are missing or of another model; on every rank.
        """
        chosen = self._deal(batch, indices)[parallel_state.get_data_parallel_rank()]
        packed = [self._build(batch, numbers) for numbers in chosen]
        if mode in ("replay", "watch"):
            with self._phase("routes"):
                self._add_routes(batch, packed)
        for microbatch in packed if self._replay else ():
            microbatch.router_before = scores_before(batch, microbatch, self._device)
        return packed

    def alone(self, batch: Batch, index: int | None, mode: RoutingMode = "native") -> Microbatch:
        """The microbatch of one sequence of this replica; None: an empty one. Collective where ``mode`` has routes."""
        microbatch = self._build(batch, [] if index is None else [index])
        if mode in ("replay", "watch"):
            self._add_routes(batch, [microbatch])
        return microbatch

    def _build(self, batch: Batch, chosen: list[int]) -> Microbatch:
        return build_microbatch(
            batch,
            chosen,
            multiple_of=self._config.parallel.tensor,
            pad_token=0,
            device=self._device,
            share=ContextShare.of_this_rank(),
            exact=self._exact,
        )

    def _deal(self, batch: Batch, indices: list[int] | range) -> list[list[list[int]]]:
        """Deal sequences to the microbatches of every replica, the same on every rank."""
        lengths = [batch.sequences[i].whole_length for i in indices]
        plan = deal(lengths, parallel_state.get_data_parallel_world_size(), self._config.max_tokens_per_microbatch)
        return [[[indices[i] for i in chosen] for chosen in replica] for replica in plan]

    def homes(self, batch: Batch, parts: list[list[int]] | list[range]) -> list[int]:
        """The replica of every sequence, where the parts of the batch are dealt one by one."""
        home = [0] * len(batch.sequences)
        for part in parts:
            for replica, microbatches in enumerate(self._deal(batch, part)):
                for i in (i for chosen in microbatches for i in chosen):
                    home[i] = replica
        return home

    def _add_routes(self, batch: Batch, microbatches: list[Microbatch]) -> None:
        def slice_all() -> None:
            for microbatch in microbatches:
                microbatch.routes = self._replay.slice([batch.sequences[i] for i in microbatch.indices], microbatch)

        together("routes cannot be replayed", slice_all, fault=RouteError, describe=str)

    def run(
        self,
        microbatches: list[Microbatch],
        loss: Callable,
        mode: RoutingMode,
        forward_only: bool = False,
        recorded: list[Any] | None = None,
        observe: bool | None = None,
        keeps_scores: bool = False,
    ) -> list[Any]:
        """Megatron's schedule over ``microbatches``; what ``loss`` returned third, on the last stage, else empty.

        With mode "record", what the routers chose is appended to ``recorded``, one item per microbatch. ``observe``:
        enter the routers' choices into the telemetry; None: those of passes with a gradient. ``keeps_scores``: each
        microbatch gets its `router_now`, as it does where it has a `router_before`.
        """
        observe = not forward_only if observe is None else observe

        def forward_step(data: Iterator[Microbatch], model: torch.nn.Module):
            microbatch = next(data)
            before, routed = microbatch.router_before, nullcontext()
            if self._replay:
                routed = self._replay.forward(mode, microbatch.routes, observe, keeps_scores, before)
            with routed:
                logits = self.forward(microbatch, model)
                if keeps_scores or before is not None:
                    microbatch.router_now = self._replay.scores()
                if mode == "record":
                    recorded.append(self._replay.recorded(microbatch))
            return logits, partial(loss, microbatch=microbatch)

        self._model.train(not forward_only)
        with self.weights(), batch_invariant(self._device) if self._exact else nullcontext():
            return get_forward_backward_func()(
                forward_step_func=forward_step,
                data_iterator=iter(microbatches),
                model=[self._model],
                num_microbatches=len(microbatches),
                seq_length=microbatches[0].tokens.numel() * self._config.parallel.context,
                micro_batch_size=1,
                forward_only=forward_only,
            )

    def forward(self, microbatch: Microbatch, model: torch.nn.Module | None = None) -> torch.Tensor:
        """One pass over a packed row: logits [1, N, V/tp] on the last stage. ``model``: wrapped; None: the bare one."""
        if not use_transformer_engine(self._device, self._exact):
            self.module.rotary_pos_emb.position_ids = microbatch.position_ids
        padding = microbatch.padding
        if not self.module.pre_process:  # the first stage alone cuts it as it cuts the row
            padding = scatter_to_sequence_parallel_region(padding.t()).t()
        return (model or self.module)(
            input_ids=microbatch.tokens,
            position_ids=microbatch.position_ids[None],
            attention_mask=None,
            packed_seq_params=microbatch.packed,
            padding_mask=padding,
        )

    def share(self, values: Mapping[int, np.ndarray]) -> dict[int, np.ndarray]:
        """Arrays of all replicas by number of the sequence, on every rank: for tools, on batches small enough.

        Collective.
        """
        return {i: array for rank in gather_objects(dict(values) if speaks() else {}) for i, array in rank.items()}
