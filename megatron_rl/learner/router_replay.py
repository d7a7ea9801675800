"""Router replay in Megatron's routers: which experts each router selects in a forward pass, and what it saw.

The routers' `RouterReplay` (patched: exact under recomputation, one microbatch's routes never reach another's backward
pass) does the replaying. This module gives one forward pass at a time its routes. Before that, the routes are compared
with the tokens that Megatron gives this rank and with the layer numbers that the routers report.

Shapes: n tokens of this rank, l MoE layers of this pipeline stage, L of the model, E experts, K experts per token.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.mappings import scatter_to_sequence_parallel_region
from megatron.core.tensor_parallel.random import get_checkpoint_notes
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_rl.config.learner import RoutingConfig
from megatron_rl.errors import InputError
from megatron_rl.layers.context import cut_ranges
from megatron_rl.learner.packing import Microbatch, RouterScores
from megatron_rl.learner.process_groups import replica_group
from megatron_rl.model.architecture import Architecture
from megatron_rl.process.ranks import hand_on
from megatron_rl.routing import (
    LayerTelemetry,
    RouteError,
    RouteShape,
    RouteSlice,
    pack_routes,
    packed_keys,
    route_checksums,
    router_metrics,
)
from megatron_rl.routing.layout import CheckedRoutes, parts_in
from megatron_rl.routing.payload import malformed_rows, missing_id
from megatron_rl.types import Batch, Rollout

# native: routers decide. watch: they decide, and are compared with the routes on record. replay: those on record are
# used (and compared). record: routers decide, and what they chose is kept.
RoutingMode = Literal["native", "watch", "replay", "record"]

# Of one microbatch on one rank: indices of the sequences in the packed row, their lengths there (and of the padding at
# its end), (start, stop) of the rank's rows, its layers, and ids [n, l, K].
Piece = tuple[list[int], list[int], list[tuple[int, int]], list[int], np.ndarray]


class LayerReplay(RouterReplay):
    """`RouterReplay` of one router that also compares the router's own choice with the recorded one."""

    def __init__(self, router: TopKRouter, device: torch.device):
        super().__init__()
        # The process-wide list mixes the routers of all models; ours are found through their model.
        RouterReplay.global_router_replay_instances.remove(self)
        self.layer_number = router.layer_number
        self.telemetry = LayerTelemetry(device)
        self.counted: torch.Tensor | None = None  # [n] bool; None: do not compare
        self.flips: torch.Tensor | None = None  # [n] bool of the last forward pass
        self.keeps_scores = False
        self.reference: torch.Tensor | None = None  # [n, K] experts whose scores are kept; None: those that are chosen
        self.scores: tuple[torch.Tensor, torch.Tensor] | None = None  # experts and log scores of the last forward pass
        self.has_gaps = False  # rows of `target_topk_idx` without record
        self._needs_softmax = router.score_function == "softmax" and not router.config.moe_router_pre_softmax

    def _replay(self, indices, scores, compute_own_indices, topk):
        """Without Megatron's own checks of the ids, a sort in host memory for each layer and pass: `RouterReplayer`
        has checked them once, and says whether any row is left to the router."""
        assert indices.shape == (len(scores), topk), f"layer {self.layer_number}: {indices.shape} for {scores.shape}"
        if self.has_gaps:
            indices = torch.where(indices[:, :1] == -1, compute_own_indices(), indices)
        return scores.gather(1, indices), indices

    def get_replay_topk(self, scores, topk, num_groups=None, group_topk=None, default_compute_topk=None):
        recomputing = get_checkpoint_notes() is not None and torch.is_grad_enabled()
        if self.counted is not None and not recomputing:
            with torch.no_grad():
                own = default_compute_topk(scores, topk, num_groups, group_topk)[1]
                probs = scores.float().softmax(dim=1) if self._needs_softmax else scores.float()
                recorded = self.target_topk_idx.to(scores.device)
                self.flips = self.telemetry.observe(probs, own, recorded, self.counted)
        chosen = super().get_replay_topk(scores, topk, num_groups, group_topk, default_compute_topk)
        if self.keeps_scores and not recomputing:
            with torch.no_grad():
                experts = chosen[1] if self.reference is None else self.reference
                of_all = scores.float().log_softmax(dim=1) if self._needs_softmax else scores.float().log()
                self.scores = experts, of_all.gather(1, experts)
        return chosen


class RouterReplayer:
    """The routers of one model on this rank. Raises `InputError` where the model has options that bypass replay."""

    def __init__(self, model: GPTModel, architecture: Architecture, config: RoutingConfig, device: torch.device):
        refuse_options(model.config)
        self.config, self.device, self.shape = config, device, RouteShape.of(architecture)
        self.routers: list[LayerReplay] = []
        for module in model.modules():
            if isinstance(module, TopKRouter):
                module.router_replay = LayerReplay(module, device)
                self.routers.append(module.router_replay)
        # Layer numbers count over all pipeline stages, from 1; routes over the model's MoE layers, from 0.
        self.layers = [self.shape.layers.index(router.layer_number - 1) for router in self.routers]
        self.start_over()

    def start_over(self) -> None:
        """Forget the passes seen, and the slices of the step's routes."""
        for router in self.routers:
            router.telemetry = LayerTelemetry(self.device)
        self._flips: list[torch.Tensor] = []  # [2, n] uint8 per forward pass: token has a route, differs in a layer
        self._due = self._missing = 0
        self._known = CheckedRoutes()
        # Of the step, by the packed row: its slice, and the routes that it was made of.
        self._slices: dict[tuple[int, tuple[str, ...]], tuple[RouteSlice, list[np.ndarray]]] = {}

    # -- one rank's share of the routes

    def slice(self, sequences: list[Rollout], microbatch: Microbatch) -> RouteSlice:
        """Routes of this rank's tokens and layers, verified. Raises `RouteError`.

        A row that a pass of the same step has had already is the same slice.
        """
        num_tokens, layout = microbatch.tokens.numel(), microbatch.row
        row = num_tokens, tuple(s.id for s in sequences)
        earlier, of = self._slices.get(row, (None, []))
        if earlier is not None and all(self._known.get(s) is routes for s, routes in zip(sequences, of, strict=True)):
            return earlier
        packed = pack_routes(sequences, layout.tail, self.shape, self._known, layout.after)
        routes = packed.take(_own_ranges(microbatch), self.layers)
        layers = [self.shape.layers.index(router.layer_number - 1) for router in self.routers]
        routes.verify(self._own_keys(routes.parts, microbatch), layers, self.shape)
        self._check_rows(routes)
        routes.settle()
        self._slices[row] = routes, [self._known.get(s) for s in sequences]
        return routes

    def _check_rows(self, routes: RouteSlice) -> None:
        """On the device: every row that has a record names different experts that there are."""
        small = routes.experts if routes.experts.dtype == np.uint8 else routes.experts.astype(np.int32)
        malformed = malformed_rows(torch.from_numpy(small).to(self.device), self.shape.num_experts)
        if not malformed.any():
            return
        wrong = malformed.cpu().numpy()
        if self.config.malformed == "error":
            row, layer = (int(x) for x in np.argwhere(wrong)[0])
            sequence, token = routes.owner(row)
            raise RouteError(
                f"sequence {sequence}, layer {self.shape.layers[self.layers[layer]]}, token {token}: experts "
                f"{routes.experts[row, layer].tolist()}; expected {self.shape.topk} different ones of 0 … "
                f"{self.shape.num_experts - 1} (such rows: {wrong.sum()} in the microbatch; routing.malformed: "
                "fallback leaves them to the router)"
            )
        routes.experts = np.where(wrong[..., None], missing_id(self.shape.dtype), routes.experts)
        routes.experts = routes.experts.astype(self.shape.dtype)

    def _own_keys(self, parts: list[tuple[str, int]], microbatch: Microbatch) -> np.ndarray:
        """[n] keys of the tokens that Megatron's own scatter leaves on this rank, from the tensors the model gets.

        ``parts``: ids and lengths of the whole packed row.
        """
        ids, lengths = zip(*parts_in(parts, microbatch.row.ranges), strict=True)
        tokens, positions = microbatch.tokens[0].cpu().numpy(), microbatch.position_ids.cpu().numpy()
        keys = packed_keys(tokens, positions, ids, lengths)
        if _sequence_parallel()[0] == 1:
            return keys
        scattered = scatter_to_sequence_parallel_region(torch.from_numpy(keys.view(np.int64)))
        return scattered.numpy().view(np.uint64)

    # -- a forward pass

    @contextmanager
    def forward(
        self,
        mode: RoutingMode,
        routes: RouteSlice | None,
        observe: bool,
        keeps_scores: bool = False,
        before: RouterScores | None = None,
    ) -> Iterator[None]:
        """Route one microbatch's forward pass. ``observe``: enter it into the telemetry. ``keeps_scores``: `scores`
        are wanted afterwards, of the experts of ``before``, or else of those that are chosen."""
        action = {"replay": RouterReplayAction.REPLAY_FORWARD, "record": RouterReplayAction.RECORD}.get(mode)
        observe = observe and routes is not None
        ids, counted = (None, None) if routes is None else routes.on(self.device)
        for i, router in enumerate(self.routers):
            router.router_replay_action = action
            # Not set_target_indices, which also queues the indices for a backward action that is never used.
            router.target_topk_idx = None if ids is None else ids[i]
            router.has_gaps = routes is not None and routes.gaps[i]
            router.counted = counted[:, i] if observe else None
            router.keeps_scores = keeps_scores or before is not None
            router.reference = None if before is None else before.experts[:, i]
        try:
            yield
            if observe:
                self._observe(routes, counted)
        finally:
            for router in self.routers:
                router.router_replay_action = router.target_topk_idx = router.counted = router.flips = None
                router.reference = router.scores = None
                router.keeps_scores = False

    def _observe(self, routes: RouteSlice, counted_rows: torch.Tensor) -> None:
        self._due += routes.num_due
        self._missing += routes.num_missing
        nothing = torch.zeros(len(routes.is_real), dtype=torch.bool, device=self.device)
        flips, counted = nothing, nothing
        for i, router in enumerate(self.routers):
            flips, counted = flips | router.flips, counted | counted_rows[:, i]
        self._flips.append(torch.stack([counted, flips]).to(torch.uint8))

    def scores(self) -> RouterScores:
        """Return the last forward pass's scores; inside `forward`, if it keeps them."""
        experts, log_scores = zip(*(router.scores for router in self.routers), strict=True)
        return RouterScores(torch.stack(experts, dim=1), torch.stack(log_scores, dim=1))

    # -- recording by the learner itself (R2)

    def recorded(self, microbatch: Microbatch) -> Piece:
        """What the routers chose in the forward pass just done: see `assemble`. Call it inside `forward`."""
        chosen = [router.recorded_topk_idx for router in self.routers]
        shape = (microbatch.tokens.numel() // _sequence_parallel()[0], 0, self.shape.topk)
        ids = torch.stack(chosen, dim=1).cpu().numpy() if chosen else np.zeros(shape)
        ids = ids.astype(self.shape.dtype)
        return microbatch.indices, microbatch.row.padded, _own_ranges(microbatch), self.layers, ids

    def assemble(self, batch: Batch, pieces: list[Piece]) -> None:
        """Give every sequence of this replica the routes that its ranks recorded. Collective in the replica."""
        due = (len(self.shape.layers), self.shape.topk)
        rows = {tuple(indices): padded for indices, padded, *_ in pieces}
        whole = {row: np.zeros((sum(padded), *due), self.shape.dtype) for row, padded in rows.items()}
        for indices, _padded, ranges, layers, ids in self._of_replica(pieces):
            start = 0
            for first, last in ranges:
                whole[tuple(indices)][first:last, layers] = ids[start : start + last - first]
                start += last - first
        routes = {}
        for row, padded in rows.items():
            starts = np.cumsum([0, *padded]).tolist()
            for i, start in zip(row, starts):  # padding at the end belongs to none
                routes[i] = whole[row][start : start + batch.sequences[i].whole_length]
        for i, routed in routes.items():
            # As an engine reports them: the last token predicts nothing, so its route is left out.
            sequence = batch.sequences[i]
            sequence.routed_experts = routed[:-1]
            sequence.route_checksums = route_checksums(sequence.id, sequence.whole, routed[:-1])

    def _of_replica(self, pieces: list[Piece]) -> Iterator[Piece]:
        """The pieces of one rank of this replica after the other."""
        group = replica_group()
        abouts: list[Any] = [None] * group.size()
        dist.all_gather_object(abouts, [(*about, ids.shape) for *about, ids in pieces], group=group)
        for source, its in zip(dist.get_process_group_ranks(group), abouts, strict=True):
            shapes = {number: shape for number, (*_, shape) in enumerate(its)}
            held = {number: ids for number, (*_, ids) in enumerate(pieces)} if source == dist.get_rank() else {}
            received = hand_on(held, shapes, self.shape.dtype, list(shapes), group, source)
            yield from ((*about, received[number]) for number, (*about, _) in enumerate(its))

    # -- results

    def metrics(self) -> dict[str, float]:
        """`router/*` of the forward passes seen since the last call, over all ranks; then start over. Collective."""
        width = len(self.routers[0].telemetry.packed()) if self.routers else len(LayerTelemetry(self.device).packed())
        counts = torch.zeros(len(self.shape.layers), width, dtype=torch.float64, device=self.device)
        for layer, router in zip(self.layers, self.routers, strict=True):
            counts[layer] = router.telemetry.packed()
        flips = torch.cat(self._flips, dim=1) if self._flips else counts.new_zeros(2, 0, dtype=torch.uint8)
        pipeline = parallel_state.get_pipeline_model_parallel_group()
        if pipeline.size() > 1:  # a token is on every stage, with other layers
            dist.all_reduce(flips, op=dist.ReduceOp.MAX, group=pipeline)
        tokens = flips.sum(dim=1).double() * (pipeline.rank() == 0)
        sums = torch.cat([counts.flatten(), tokens, tokens.new_tensor([self._due, self._missing])])
        dist.all_reduce(sums)
        *flat, num_tokens, flipped, due, missing = sums.tolist()
        self.start_over()
        return router_metrics(
            self.shape.layers,
            np.array(flat).reshape(counts.shape),
            flipped=flipped,
            tokens=num_tokens,
            due=due,
            missing=missing,
            bytes_per_token=self.shape.bytes_per_token,
            is_replayed=self.config.replay != "off",
        )


def _own_ranges(microbatch: Microbatch) -> list[tuple[int, int]]:
    """(start, stop) in the whole packed row of the tokens that pass this rank's routers."""
    size, rank = _sequence_parallel()
    share = microbatch.tokens.numel() // size
    return cut_ranges(microbatch.row.ranges, rank * share, (rank + 1) * share)


def _sequence_parallel() -> tuple[int, int]:
    """Into how many shares the packed row is split on its way through the layers, and which is this rank's."""
    # Above tensor-parallel size 1, sequence parallelism is always on (see `learner.model`).
    return parallel_state.get_tensor_model_parallel_world_size(), parallel_state.get_tensor_model_parallel_rank()


def refuse_options(config: TransformerConfig) -> None:
    """Refuse options under which routes on record would be ignored, or a loss would push against them."""
    try:
        RouterReplay.check_config(config)
    except ValueError as error:
        raise InputError(f"routing: {error}") from error
    balancing = config.moe_router_load_balancing_type
    kinds = {balancing} if isinstance(balancing, str) else set(balancing)
    coefficients = config.moe_aux_loss_coeff
    if kinds - {"none"} and np.any(np.asarray(coefficients) != 0):
        raise InputError(
            f"routing: a load-balancing loss ({', '.join(sorted(kinds))}) computes a top-k of its own, which replay "
            "does not reach; train without it, or with routing.replay: off"
        )
    for option in ("moe_router_force_load_balancing", "moe_expert_capacity_factor", "moe_input_jitter_eps"):
        if getattr(config, option):
            raise InputError(f"routing: {option} changes routes after or before replay; not with router replay")
