"""Passes of generation: whole sequences by the learner's module, and steps of one further token of every row.

A step runs straight on the learner's weights; `exact.turns` makes one for each token. Whole sequences are passes of the
module that the update runs, over packed rows. Where a rank has a part of the weights, steps are passes of the module
too. All are made under the same batch-invariant computation.

Megatron's modules take a row of padding and a packed row alike; in steps of a few dozen rows what they do around their
products costs more than the products. Here a step is these products and what lies between them, with the arithmetic
of `exact.invariant`: each row has the bits that the modules compute. Ranks that share out heads, experts and
vocabulary exchange rows in fixed shapes. On kernels no shape depends on a value, and nothing waits
for one.

Shapes: N rows of a pass; n rows of a step, a multiple of `decode.rows_and_steps`, equal on all ranks that share
experts; H hidden size, D head width, K experts of a token, V/tp this rank's share of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.transformer_layer import TransformerLayer

from megatron_rl.exact import invariant
from megatron_rl.exact.doses import Dose
from megatron_rl.exact.invariant import KEY_BLOCK, TILE, batch_invariant, linear, padded, rms_norm, rotate
from megatron_rl.exact.layers import (
    CachedPrompts,
    CachedStep,
    PackedSequences,
    PagedCache,
    add_experts,
    experts,
    gated,
    norm_over_heads,
    route,
)
from megatron_rl.exact.schedule import num_pages
from megatron_rl.layers.attention import WideNorm
from megatron_rl.process.ranks import gather_objects

# One forward pass of the policy outside Megatron's schedule, through all pipeline stages.


@torch.no_grad()
def forward(module: GPTModel, tokens: torch.Tensor, positions: torch.Tensor, packed: Any) -> torch.Tensor:
    """Logits [1, N, V/tp] of a packed row, on every stage, so that all stages draw the same tokens; float32 where there
    are several.

    A stage waits for the one before it: with P stages each works a P-th of the time. ``tokens`` [1, N], ``positions``
    [N], the places of the tokens in their sequences. Collective over the ranks of a pipeline.
    """
    if hasattr(getattr(module, "rotary_pos_emb", None), "position_ids"):  # latent attention on a GPU has its own
        module.rotary_pos_emb.position_ids = positions
    arguments = {
        "input_ids": tokens,
        "position_ids": positions[None],
        "attention_mask": None,
        "packed_seq_params": packed,
    }
    group = parallel_state.get_pipeline_model_parallel_group()
    stage, last = group.rank(), group.size() - 1
    if last == 0:
        return module(**arguments)
    config, tensor = module.config, parallel_state.get_tensor_model_parallel_world_size()
    num_rows = tokens.numel()
    if stage > 0:
        rows = num_rows // tensor if config.sequence_parallel else num_rows
        hidden = torch.empty(rows, 1, config.hidden_size, dtype=config.pipeline_dtype, device=tokens.device)
        dist.recv(hidden, group=group, group_src=stage - 1)
        module.set_input_tensor(hidden)
    output = module(**arguments)
    if stage < last:
        dist.send(output.contiguous(), group=group, group_dst=stage + 1)
        output = torch.empty(1, num_rows, module.vocab_size // tensor, device=output.device)
    output = output.float().contiguous()
    dist.broadcast(output, group=group, group_src=last)
    return output


# What ranks exchange in a step of generation, in shapes that no value decides.
#
# Megatron's dispatcher sends a row to the ranks of its experts, and so has to know how many rows each of them gets.
# Here every rank of an expert group gets all rows, and returns a place for each result that there can be. That moves
# more bytes, a few megabytes a layer, and waits for nothing. Sums over tensor-parallel ranks are those of
# `exact.invariant`.
#
# Shapes: n rows of a replica; t tensor-parallel ranks, which share them out among themselves; g ranks of an expert
# group; K experts of a token, E experts of a rank, H hidden size.


Group = dist.ProcessGroup


class RowsOfRanks:
    """The groups of this rank, and what goes through them. All methods are collective."""

    def __init__(self) -> None:
        self.tensor_group: Group = parallel_state.get_tensor_model_parallel_group()
        self.expert_group: Group = parallel_state.get_expert_model_parallel_group()

    def sum_of_parts(self, x: torch.Tensor) -> torch.Tensor:
        """[n, …] of every tensor-parallel rank → their sum, added from the first rank on; ``x`` may be changed."""
        if self.tensor_group.size() > 1:
            invariant.all_reduce(x, group=self.tensor_group)
        return x

    def own(self, x: torch.Tensor) -> torch.Tensor:
        """[n, …] → [n/t, …], this tensor-parallel rank's."""
        return x.chunk(self.tensor_group.size())[self.tensor_group.rank()]

    def whole(self, own: torch.Tensor) -> torch.Tensor:
        """[n/t, …] → [n, …], of all tensor-parallel ranks."""
        return _gathered(own, self.tensor_group)

    def of_expert_group(self, own: torch.Tensor) -> torch.Tensor:
        """[n/t, …] → [g · n/t, …], of all ranks whose rows this rank's experts may get."""
        return _gathered(own, self.expert_group)

    def own_of_expert_group(self, rows: torch.Tensor) -> torch.Tensor:
        """[g · n/t, …] → [n/t, …]."""
        return rows.chunk(self.expert_group.size())[self.expert_group.rank()]

    def results(
        self, results: torch.Tensor, places: torch.Tensor, chosen: torch.Tensor, num_local: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The results of all experts for this rank's own rows.

        Args:
            results: [M, H], of this rank's experts.
            places: [g · n/t, K], where in them those of every row lie.
            chosen: [n/t, K], the experts of this rank's own rows.
            num_local: E.

        Returns:
            results [g · n/t · K, H], and the places [n/t, K] in them of the own rows' experts.
        """
        if self.expert_group.size() == 1:
            return results, places
        sent = results[places.flatten()]
        received = torch.empty_like(sent)
        dist.all_to_all_single(received.view(-1), sent.view(-1), group=self.expert_group)
        numbers = torch.arange(chosen.numel(), device=chosen.device).view_as(chosen)
        return received, torch.add(numbers, chosen // num_local, alpha=chosen.numel())


def _gathered(own: torch.Tensor, group: Group) -> torch.Tensor:
    if group.size() == 1:
        return own
    gathered = own.new_empty(group.size() * own.size(0), *own.shape[1:])
    dist.all_gather_into_tensor(gathered.view(-1), own.contiguous().view(-1), group=group)
    return gathered


def _has_adapters(module: torch.nn.Module) -> bool:
    """Whether ``module`` has adapters, which are in its weights within the forward passes of its layers alone."""
    return any(".lora_A" in name for name, _ in module.named_parameters())


Watch = Callable[[str, torch.Tensor], None]
"""(layer, what came out of it [n, …])"""


class StepForward:
    """Steps of ``module``. Its weights are read anew in every step. Steps are collective."""

    def __init__(self, module: GPTModel):
        self._module, self._config, self._ranks = module, module.config, RowsOfRanks()
        self.watch: Watch | None = None

    @staticmethod
    def takes(module: GPTModel) -> bool:
        """Whether what lies between the weights is known here: no pipeline and no adapters; experts and key heads are
        whole."""
        config, tensor = module.config, module.config.tensor_model_parallel_size
        layers_are_whole = config.pipeline_model_parallel_size == (config.expert_tensor_parallel_size or 1) == 1
        key_heads = config.num_query_groups or config.num_attention_heads
        heads_are_whole = TILE % tensor == key_heads % tensor == 0  # TILE: rows are shared out, too
        return layers_are_whole and heads_are_whole and not _has_adapters(module)

    @property
    def needs_equal_rows(self) -> bool:
        """Whether replicas share experts, so that all must have the same number of rows."""
        return self._config.expert_model_parallel_size > 1

    def begin(self, longest: int) -> None:
        """Compute cosine and sine of the angle of each of ``longest`` positions."""
        device = next(self._module.parameters()).device
        with torch.no_grad(), batch_invariant(device):
            angles = self._module.rotary_pos_emb.rotary(longest, packed_seq=True).flatten(1)  # [M, D]
            half, _ = angles.chunk(2, dim=-1)  # the other one is the same
            self._cos, self._sin = (f(half) for f in (torch.cos, torch.sin))

    @torch.no_grad()
    def __call__(self, tokens: torch.Tensor, step: CachedStep) -> torch.Tensor:
        """Return the logits [n, V/tp] after ``tokens`` [n] int64."""
        module = self._module
        x = self._embedding(tokens)
        self._see("embedding", x)
        cos, sin = self._cos[step.positions], self._sin[step.positions]
        for number, layer in enumerate(module.decoder.layers):
            x = x + self._attention(number, layer, x, cos, sin, step)
            x = x + self._feed_forward(layer, _norm(layer.pre_mlp_layernorm, x))
            self._see(f"layer {number}", x)
        x = _norm(module.decoder.final_layernorm, x)
        self._see("final norm", x)
        weight = module.shared_embedding_or_output_weight() if module.share_embeddings_and_output_weights else None
        if self._config.sequence_parallel:
            x = self._ranks.own(x)  # the layer gathers them
        with batch_invariant(x.device):
            logits, _ = module.output_layer(x[:, None], weight=weight)
        self._see("output layer", logits.squeeze(1))
        return logits.squeeze(1)

    def _see(self, name: str, x: torch.Tensor) -> None:
        if self.watch is not None:
            self.watch(name, x)

    def _embedding(self, tokens: torch.Tensor) -> torch.Tensor:
        """[n] → [n, H]; an entry of another rank adds 0."""
        table = self._module.embedding.word_embeddings
        local = tokens - table.vocab_start_index
        elsewhere = (local < 0) | (local >= len(table.weight))
        x = F.embedding(local.masked_fill(elsewhere, 0), table.weight)
        return self._ranks.sum_of_parts(x.masked_fill(elsewhere[:, None], 0.0))

    def _attention(
        self,
        number: int,
        layer: TransformerLayer,
        x: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        step: CachedStep,
    ) -> torch.Tensor:
        part = layer.self_attention
        groups, width = part.num_query_groups_per_partition, part.hidden_size_per_attention_head
        mixed = linear(_norm(layer.input_layernorm, x), part.linear_qkv.weight, part.linear_qkv.bias)
        mixed = mixed.view(len(x), groups, -1, width)
        query, key, value = mixed.split([mixed.size(2) - 2, 1, 1], dim=2)
        query = rotate(_norm(part.q_layernorm, query.reshape(len(x), -1, width)), cos, sin)
        key = rotate(_norm(part.k_layernorm, key.squeeze(2)), cos, sin)
        scale = part.core_attention.softmax_scale or width**-0.5
        out = step.attend(number, query, key, value.squeeze(2), scale)
        return self._ranks.sum_of_parts(linear(out.flatten(1), part.linear_proj.weight))

    def _feed_forward(self, layer: TransformerLayer, x: torch.Tensor) -> torch.Tensor:
        if not isinstance(layer.mlp, MoELayer):
            return self._block(layer.mlp, x)
        routed, shared = self._experts(layer.mlp, x), layer.mlp.shared_experts
        return routed if shared is None else routed + self._shared_expert(shared, x)

    def _block(self, mlp: MLP, x: torch.Tensor) -> torch.Tensor:
        return self._ranks.sum_of_parts(linear(gated(linear(x, mlp.linear_fc1.weight)), mlp.linear_fc2.weight))

    def _shared_expert(self, part: SharedExpertMLP, x: torch.Tensor) -> torch.Tensor:
        """The experts that every token passes, with their gate, if they have one."""
        out = self._block(part, x)
        return out if part.gate_weight is None else out * padded(torch.sigmoid)(linear(x, part.gate_weight))

    def _experts(self, moe: MoELayer, x: torch.Tensor) -> torch.Tensor:
        """Each rank routes all rows that its experts may get: that is less than sending what was found."""
        router, config, ranks = moe.router, self._config, self._ranks
        rows = ranks.of_expert_group(ranks.own(x))
        dtype = torch.float32 if config.moe_router_dtype == "fp32" else x.dtype
        probs, chosen = route(
            linear(rows.to(dtype), router.weight.to(dtype)), router.topk, config.moe_router_pre_softmax
        )
        local = moe.experts.local_experts
        weights = [expert.linear_fc1.weight for expert in local], [expert.linear_fc2.weight for expert in local]
        results, places = experts(rows, probs, chosen, *weights, first=moe.local_expert_indices[0])
        local_assignments = ranks.own_of_expert_group(chosen)
        return ranks.whole(add_experts(*ranks.results(results, places, local_assignments, len(local))))


def _norm(norm: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    if isinstance(norm, WideNorm):
        return norm_over_heads(norm, x)
    return rms_norm(x, norm.normalized_shape, norm.weight, norm.eps) if isinstance(norm, torch.nn.RMSNorm) else x


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
        """Owners of the rows of the current pass. A sequence that ended in this turn has positions beyond its end."""
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
        """Return the logits [n, V/tp] after ``tokens`` [n]."""
        self._owners = owners
        if self._steps_forward:
            return self.step_forward(tokens, step)
        return self._forward(tokens, positions, step)

    def _forward(self, tokens: torch.Tensor, positions: torch.Tensor, packed: Any) -> torch.Tensor:
        """Return the logits [N, V/tp] after ``tokens`` [N]."""
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
        """Give ``watch`` the rows [N, …] that come out of every layer, in the order of the forward pass."""
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
    """Give ``watch`` the rows [N, …] that come out of every layer of this stage, in the order of the pass."""
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
