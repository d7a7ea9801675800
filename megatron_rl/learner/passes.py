"""Passes of the model over a batch: packed microbatches, Megatron's schedule, and routing as asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func

from megatron_rl.config.learner import LearnerConfig
from megatron_rl.learner.context import ContextShare
from megatron_rl.learner.exchange import speaks
from megatron_rl.learner.layers.invariant import batch_invariant
from megatron_rl.learner.model import use_transformer_engine
from megatron_rl.learner.packing import Microbatch, build_microbatch, deal
from megatron_rl.learner.router_replay import RouterReplayer, RoutingMode
from megatron_rl.process.ranks import gather_objects, together
from megatron_rl.routing import RouteError
from megatron_rl.types import Batch

PhaseFn = Callable[[str], AbstractContextManager]


class Passes:
    """``model`` is ``module`` (the bare GPTModel) wrapped for data parallelism."""

    def __init__(
        self,
        model: torch.nn.Module,
        module: torch.nn.Module,
        config: LearnerConfig,
        device: torch.device,
        replay: RouterReplayer | None,
        exact: bool,
        phase: PhaseFn,
    ):
        self._model, self._module, self._config, self._device = model, module, config, device
        self._replay, self._exact, self._phase = replay, exact, phase

    def microbatches(self, batch: Batch, indices: list[int] | range, mode: RoutingMode = "native") -> list[Microbatch]:
        """This rank's share of sequences ``indices``, as many microbatches on every rank; with the routes that
        ``mode`` needs.

        Raises:
            RouteError: a sequence's routes are missing or of another model; on every rank.
        """
        share = ContextShare.of_this_rank()
        packed = [
            build_microbatch(
                batch,
                chosen,
                multiple_of=self._config.parallel.tensor,
                pad_token=0,
                device=self._device,
                share=share,
                exact=self._exact,
            )
            for chosen in self._deal(batch, indices)[parallel_state.get_data_parallel_rank()]
        ]
        if mode in ("replay", "watch"):
            with self._phase("routes"):
                self._add_routes(batch, packed)
        return packed

    def _deal(self, batch: Batch, indices: list[int] | range) -> list[list[list[int]]]:
        """Of every replica the sequences of each microbatch: the same on every rank."""
        lengths = [batch.sequences[i].length for i in indices]
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
    ) -> list[Any]:
        """Megatron's schedule over ``microbatches``; what ``loss`` returned third, on the last stage, else empty.

        With mode "record", what the routers chose is appended to ``recorded``, one item per microbatch.
        """

        def forward_step(data: Iterator[Microbatch], model: torch.nn.Module):
            microbatch = next(data)
            routed = self._replay.forward(mode, microbatch.routes, not forward_only) if self._replay else nullcontext()
            with routed:
                logits = self.forward(microbatch, model)
                if mode == "record":
                    recorded.append(self._replay.recorded(microbatch))
            return logits, partial(loss, microbatch=microbatch)

        self._model.train(not forward_only)
        with batch_invariant(self._device) if self._exact else nullcontext():
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
            self._module.rotary_pos_emb.position_ids = microbatch.position_ids
        return (model or self._module)(
            input_ids=microbatch.tokens,
            position_ids=microbatch.position_ids[None],
            attention_mask=None,
            packed_seq_params=microbatch.packed,
        )

    def share(self, values: Mapping[int, np.ndarray]) -> dict[int, np.ndarray]:
        """Arrays of all replicas by number of the sequence, on every rank: for tools, on batches small enough.

        Collective.
        """
        return {i: array for rank in gather_objects(dict(values) if speaks() else {}) for i, array in rank.items()}
