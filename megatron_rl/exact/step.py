"""One further token of every row, straight on the learner's weights: what `exact.turns` runs once a token.

Megatron's modules take a row of padding and a packed row alike; in steps of a few dozen rows what they do around their
products costs more than the products. Here a step is these products and what lies between them, with the arithmetic
of `learner.layers.invariant`: each row has the bits that the modules compute. Ranks that share out heads, experts and
vocabulary exchange rows in fixed shapes (`exact.step`). On kernels no shape depends on a value, and nothing waits
for one.

Shapes: n rows, equal on all ranks that share experts; H hidden size, D head width, K experts of a token, V/tp this
rank's share of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_layer import TransformerLayer

from megatron_rl.learner.layers import invariant
from megatron_rl.learner.layers.exact_layers import CachedStep, add_experts, experts, gated, route
from megatron_rl.learner.layers.invariant import TILE, batch_invariant, linear, rms_norm, rotate
from megatron_rl.learner.lora import has_adapters

# One forward pass of the policy outside Megatron's schedule, through all pipeline stages.


@torch.no_grad()
def forward(module: GPTModel, tokens: torch.Tensor, positions: torch.Tensor, packed: Any) -> torch.Tensor:
    """Logits [1, N, V/tp] of a packed row, on every stage, so that all stages draw the same tokens; float32 where there
    are several.

    A stage waits for the one before it: with P stages each works a P-th of the time. ``tokens`` [1, N], ``positions``
    [N], the places of the tokens in their sequences. Collective over the ranks of a pipeline.
    """
    if hasattr(module.rotary_pos_emb, "position_ids"):
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
# `learner.layers.rank_sums`.
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
        return layers_are_whole and heads_are_whole and not has_adapters(module)

    @property
    def needs_equal_rows(self) -> bool:
        """Whether replicas share experts, so that all must have the same number of rows."""
        return self._config.expert_model_parallel_size > 1

    def begin(self, longest: int) -> None:
        """For sequences of at most ``longest`` tokens: cosine and sine of the angle of every position."""
        device = next(self._module.parameters()).device
        with torch.no_grad(), batch_invariant(device):
            angles = self._module.rotary_pos_emb.rotary(longest, packed_seq=True).flatten(1)  # [M, D]
            half, _ = angles.chunk(2, dim=-1)  # the other one is the same
            self._cos, self._sin = (f(half) for f in (torch.cos, torch.sin))

    @torch.no_grad()
    def __call__(self, tokens: torch.Tensor, step: CachedStep) -> torch.Tensor:
        """``tokens`` [n] int64 → logits [n, V/tp]."""
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
        if isinstance(layer.mlp, MoELayer):
            return self._experts(layer.mlp, x)
        mlp = layer.mlp
        return self._ranks.sum_of_parts(linear(gated(linear(x, mlp.linear_fc1.weight)), mlp.linear_fc2.weight))

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
        mine = ranks.own_of_expert_group(chosen)
        return ranks.whole(add_experts(*ranks.results(results, places, mine, len(local))))


def _norm(norm: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    return rms_norm(x, norm.normalized_shape, norm.weight, norm.eps) if isinstance(norm, torch.nn.RMSNorm) else x
