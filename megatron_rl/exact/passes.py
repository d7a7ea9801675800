"""Passes of the learner's own module for generation: over whole sequences, and over one further token of each row.

Whole sequences are passes of the module that the update runs, over packed rows. Steps are `exact.step`, or the same
module where a rank has a part of the weights. All are made under the same batch-invariant computation.

Shapes: N rows of a pass; n rows of a step, a multiple of `room.rows_and_steps`; V/tp this rank's share of the
vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel

from megatron_rl.exact.doses import Dose
from megatron_rl.exact.schedule import num_pages
from megatron_rl.exact.step import StepForward, Watch, forward
from megatron_rl.learner.layers.exact_layers import CachedPrompts, CachedStep, PackedSequences, PagedCache
from megatron_rl.learner.layers.invariant import KEY_BLOCK, batch_invariant
from megatron_rl.process.ranks import gather_objects

T = TypeVar("T")

Owners = Callable[[], list[tuple[int, int]]]
"""(sequence, position) of each row of a pass, padding left out."""


class GenerationPasses:
    """Passes of ``module``. ``step_forward``: None where every step is a pass of the module."""

    def __init__(self, module: GPTModel, device: torch.device):
        self.module, self.device = module, device
        self.tensor_group = parallel_state.get_tensor_model_parallel_group()
        self.step_forward = StepForward(module) if StepForward.takes(module) else None
        self.prompt_lengths: list[int] = []  # of all sequences, which tell a dose where responses begin
        self._dose: Dose | None = None
        self._owners: Owners = list

    @property
    def needs_equal_rows(self) -> bool:
        """Whether a step takes the same number of rows on all replicas."""
        return self.step_forward is not None and self.step_forward.needs_equal_rows

    @property
    def step_is_alone(self) -> bool:
        """Whether a step is `StepForward` and nothing on the host takes part in it."""
        return self._steps_forward and self.step_forward.watch is None

    @property
    def _steps_forward(self) -> bool:
        return self.step_forward is not None and not (self._dose is not None and self._dose.is_inside_layers)

    @property
    def row_owners(self) -> list[tuple[int, int]]:
        """Of the pass at hand. A sequence that has ended in this turn is there with positions beyond its end."""
        return self._owners()

    def whole_rows(
        self,
        sequences: list[list[int]],
        *,
        cache: PagedCache | None = None,
        pages: Sequence[list[int]] = (),
        owners: Owners = list,
    ) -> torch.Tensor:
        """Logits [N, V/tp] after every token of ``sequences``, back to back, and after padding. ``pages``: of
        ``cache``, for the keys and values of each."""
        lengths = [len(sequence) for sequence in sequences]
        tail = self._padding(sum(lengths))
        rows = [*lengths, tail] if tail else lengths
        tokens = [token for sequence in sequences for token in sequence] + [0] * tail
        positions = torch.cat([torch.arange(n) for n in rows])
        packed = PackedSequences.from_lengths(rows, self.device)
        if cache is not None:
            held = [*pages, *([[PagedCache.SCRATCH] * num_pages(tail)] if tail else [])]
            of_rows = torch.cat(
                [torch.tensor(p).repeat_interleave(KEY_BLOCK)[:n] for p, n in zip(held, rows, strict=True)]
            )
            packed = CachedPrompts(
                **vars(packed),
                cache=cache,
                pages=of_rows.to(self.device),
                offsets=(positions % KEY_BLOCK).to(self.device),
            )
        self._owners = owners
        return self._forward(torch.tensor(tokens, device=self.device), positions.to(self.device), packed)

    def one_step(self, tokens: torch.Tensor, positions: torch.Tensor, step: CachedStep, owners: Owners) -> torch.Tensor:
        """``tokens`` [n] → logits [n, V/tp] after them."""
        self._owners = owners
        if self._steps_forward:
            return self.step_forward(tokens, step)
        return self._forward(tokens, positions, step)

    def _forward(self, tokens: torch.Tensor, positions: torch.Tensor, packed: Any) -> torch.Tensor:
        """``tokens`` [N] → logits [N, V/tp]."""
        if self._dose is not None and self._dose.changes_model:
            seeds = [
                (self._prompt_seeds if place < self.prompt_lengths[i] else self._seeds)[i]
                for i, place in self._owners()
            ]
            seeds += [0] * (len(tokens) - len(seeds))
            self._dose.before_pass(torch.tensor(seeds, device=self.device), positions)
        with batch_invariant(self.device):
            return forward(self.module, tokens[None], positions, packed).flatten(0, 1)

    def _padding(self, num_rows: int) -> int:
        """Rows to add for sequence parallelism; a replica without rows takes part with padding alone."""
        multiple = self.tensor_group.size()
        return -num_rows % multiple if num_rows else multiple

    @contextmanager
    def dosed(self, dose: Dose, seeds: list[int], prompt_seeds: list[int]) -> Iterator[None]:
        """Passes within are the sampler's under ``dose``. ``seeds``: of each sequence's response; ``prompt_seeds``: of
        its prompt's tokens."""
        self._dose, self._seeds, self._prompt_seeds = dose, seeds, prompt_seeds
        try:
            with dose.on(self.module):
                yield
        finally:
            self._dose = None

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        was_training = self.module.training
        self.module.eval()
        try:
            yield
        finally:
            self.module.train(was_training)

    @contextmanager
    def watched(self, watch: Watch) -> Iterator[None]:
        """``watch`` is told the rows [N, …] that come out of every layer, in the order of the forward pass."""
        if self.step_forward is not None:
            self.step_forward.watch = watch
        try:
            with watched(self.module, watch):
                yield
        finally:
            if self.step_forward is not None:
                self.step_forward.watch = None


def in_passes(items: list[T], length: Callable[[T], int], max_tokens: int) -> list[list[T]]:
    """Dealt in order into passes of at most ``max_tokens``; a longer item has a pass of its own."""
    parts: list[list[T]] = []
    tokens = 0
    for item in items:
        if not parts or tokens + length(item) > max_tokens:
            parts.append([])
            tokens = 0
        parts[-1].append(item)
        tokens += length(item)
    return parts


def largest(*numbers: int) -> tuple[int, ...]:
    """The largest of each over all ranks. Collective."""
    return tuple(map(max, zip(*gather_objects(numbers), strict=True)))


@contextmanager
def watched(module: torch.nn.Module, watch: Watch) -> Iterator[None]:
    """``watch`` is told the rows [N, …] that come out of every layer of this stage, in the order of the pass."""
    group = parallel_state.get_tensor_model_parallel_group()
    parts = [("embedding", module.embedding)] if module.pre_process else []
    parts += [(f"layer {layer.layer_number - 1}", layer) for layer in module.decoder.layers]
    if module.post_process:
        parts += [("final norm", module.decoder.final_layernorm), ("output layer", module.output_layer)]

    def hook(name: str) -> Callable:
        def on_output(_module: torch.nn.Module, _args: tuple, output: torch.Tensor | tuple) -> None:
            hidden = (output[0] if isinstance(output, tuple) else output).detach()
            if group.size() > 1 and name != "output layer":  # rows are shared out over tensor-parallel ranks
                parts = [torch.empty_like(hidden) for _ in range(group.size())]
                torch.distributed.all_gather(parts, hidden.contiguous(), group=group)
                hidden = torch.cat(parts)
            watch(name, hidden.flatten(0, 1))

        return on_output

    handles = [part.register_forward_hook(hook(name)) for name, part in parts]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
