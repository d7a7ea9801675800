"""One further token of every row, straight on the learner's weights: what `exact.turns` runs once a token.

Megatron's modules take a row of padding and a packed row alike; in steps of a few dozen rows what they do around their
products costs more than the products. Here a step is these products and what lies between them, with the arithmetic
of `learner.layers.invariant`: each row has the bits that the modules compute. Ranks that share out heads, experts and
vocabulary exchange rows in fixed shapes (`exact.sharing`). On kernels no shape depends on a value, and nothing waits
for one.

Shapes: n rows, equal on all ranks that share experts; H hidden size, D head width, K experts of a token, V/tp this
rank's share of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_layer import TransformerLayer

from megatron_rl.exact.sharing import RowsOfRanks
from megatron_rl.learner.layers.exact_attention import CachedStep
from megatron_rl.learner.layers.exact_experts import add_experts, experts, gated, route
from megatron_rl.learner.layers.invariant import TILE, batch_invariant, linear, rms_norm, rotate
from megatron_rl.learner.lora import has_adapters

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
