"""Megatron's own layers with the functions of exact mode between their products: `invariant` and `exact_experts`.

On a CPU experts and router are Megatron's, under `invariant.BatchInvariant`.

Shapes: N tokens, H hidden size, D head width, E experts of this rank, M rows sorted by expert.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from megatron_rl.learner.layers.cpu_layers import CosSinEmbedding, of_class, parts_of
from megatron_rl.learner.layers.exact_attention import ExactCoreAttention
from megatron_rl.learner.layers.exact_experts import route
from megatron_rl.learner.layers.invariant import kernel_ops, on_kernels, rotate


def use_exact_layers(block: TransformerBlockSubmodules) -> None:
    """Put these layers into the specification of Megatron's local layers."""
    for layer in block.layer_specs:
        parts = layer.submodules
        parts.self_attention.module = ExactSelfAttention
        parts.self_attention.submodules.core_attention = ExactCoreAttention
        feed_forward = parts_of(parts.mlp)
        if hasattr(feed_forward, "experts"):
            feed_forward.experts = of_class(feed_forward.experts, ExactExperts)


def finish_exact_model(model: GPTModel) -> None:
    """Set what a specification cannot express: one cosine for all layers, and the routers' functions."""
    model.rotary_pos_emb = CosSinEmbedding(model.rotary_pos_emb)
    for router in (part for part in model.modules() if isinstance(part, TopKRouter)):
        router.gating = partial(_gating, router)
        router.routing = partial(_routing, router, router.routing)


class ExactSelfAttention(SelfAttention):
    """Rotates queries and keys by `invariant.rotate`; the rotary embedding must be a `CosSinEmbedding`."""

    def forward(self, hidden_states: torch.Tensor, attention_mask: Any, *args: Any, **kwargs: Any) -> Any:
        self._cos_sin = kwargs.pop("rotary_pos_emb")  # [N, 1, 1, D/2 + D/2]
        return super().forward(hidden_states, attention_mask, *args, rotary_pos_emb=None, **kwargs)

    def get_query_key_value_tensors(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        query, key, *others = super().get_query_key_value_tensors(hidden_states, *args, **kwargs)
        cos, sin = self._cos_sin.flatten(1).chunk(2, dim=-1)
        query, key = (rotate(x.squeeze(1), cos, sin).unsqueeze(1) for x in (query, key))
        return query, key, *others


class ExactExperts(SequentialMLP):
    """On kernels all experts of this rank in two grouped products. Gated SiLU without biases, as in every model."""

    def forward(
        self, hidden_states: torch.Tensor, tokens_per_expert: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, None]:
        """``hidden_states`` [M, H], ``tokens_per_expert`` [E] int64, ``probs`` [M] → [M, H]."""
        if not on_kernels(hidden_states):
            return super().forward(hidden_states, tokens_per_expert, probs)
        fc1, fc2 = ([getattr(e, name).weight for e in self.local_experts] for name in ("linear_fc1", "linear_fc2"))
        return kernel_ops().trained_experts(hidden_states, probs, tokens_per_expert, fc1, fc2), None


def _gating(router: TopKRouter, x: torch.Tensor) -> torch.Tensor:
    """A router's logits by PyTorch's product, which exact mode computes; Megatron's own asks TransformerEngine."""
    dtype = torch.float32 if router.config.moe_router_dtype == "fp32" else x.dtype
    return F.linear(x.to(dtype), router.weight.to(dtype))


def _routing(
    router: TopKRouter, megatrons: Any, logits: torch.Tensor, *args: Any, **kwargs: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Probabilities and their places [N, experts] of ``logits`` [N, 1, experts]."""
    if not on_kernels(logits):
        return megatrons(logits, *args, **kwargs)
    logits = logits.flatten(0, -2)
    probs, chosen = route(logits, router.topk, router.config.moe_router_pre_softmax)
    nowhere = torch.zeros_like(logits)
    return nowhere.scatter(1, chosen, probs), nowhere.bool().scatter(1, chosen, True)
