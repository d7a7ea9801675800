"""Megatron's own layers with the functions of exact mode between their products: attention, router and experts.

Core attention gives a token the same bits in training, in a prompt and in a step of generation. A row goes to the same
experts, and gets the same bits from them, whatever the other rows are. On a CPU experts and router are Megatron's,
under `invariant.BatchInvariant`.

Shapes: N tokens, S sequences, L longest sequence rounded up to whole blocks of keys, H hidden size or heads, D head
width, E experts of this rank, M rows sorted by expert.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_rl.exact.invariant import (
    KEY_BLOCK,
    TILE,
    attention,
    kernel_ops,
    on_kernels,
    padded,
    rms_norm,
    rotate,
    step_attention,
)
from megatron_rl.layers.attention import (
    PackedSequences,
    SDPACoreAttention,
    WideNorm,
    attend,
    padding_indices,
    padding_pays,
)
from megatron_rl.layers.cpu_layers import CosSinEmbedding, RotatingSelfAttention, use_experts


class PagedCache:
    """Keys and values of the tokens that were seen, per layer, in pages of `KEY_BLOCK` tokens.

    Whoever writes says in which page; sequences may share the pages of a common prompt. Page 0 is for rows of padding.
    What was never written is zero: attention multiplies what its mask hides by zero, and so it must be finite.
    """

    SCRATCH = 0

    def __init__(
        self, num_pages: int, num_layers: int, kv_heads: int, width: int, like: torch.Tensor, first_layer: int = 0
    ):
        """``like``: has the device and the dtype of keys and values. ``first_layer``: of this pipeline stage."""
        self._first_layer = first_layer
        shape = (num_pages, kv_heads, KEY_BLOCK, width)
        self.num_pages = num_pages
        self._layers = [(like.new_zeros(shape), like.new_zeros(shape)) for _ in range(num_layers)]

    def write(
        self, layer: int, pages: torch.Tensor, offsets: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> None:
        """``pages`` and ``offsets`` [N] int64, where each token goes; ``key`` and ``value`` [N, H/groups, D]."""
        for stored, new in zip(self._layers[layer - self._first_layer], (key, value)):
            stored[pages, :, offsets] = new

    def whole(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [pages, H/groups, `KEY_BLOCK`, D]."""
        return self._layers[layer - self._first_layer]

    def read(self, layer: int, tables: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [n, P, H/groups, `KEY_BLOCK`, D] of the pages ``tables`` [n, P] int64."""
        key, value = self._layers[layer - self._first_layer]
        return key[tables], value[tables]

    def copy(self, source: list[int], target: list[int]) -> None:
        """Pages to pages, in all layers."""
        for stored in (part for pair in self._layers for part in pair):
            stored[target] = stored[source]


@dataclass
class CachedPrompts(PackedSequences):
    """Packed whole prompts, whose keys and values go into the cache."""

    cache: PagedCache | None = None
    pages: torch.Tensor | None = None  # [N] int64, of each token
    offsets: torch.Tensor | None = None  # [N] int64


@dataclass
class CachedStep(PackedSeqParams):
    """One further token of each of N sequences."""

    cache: PagedCache | None = None
    tables: torch.Tensor | None = None  # [N, P] int64, pages of each sequence from its first token on
    positions: torch.Tensor | None = None  # [N] int64
    pages: torch.Tensor | None = None  # [N] int64, where its key and value go
    offsets: torch.Tensor | None = None  # [N] int64

    @classmethod
    def of(cls, cache: PagedCache, tables: torch.Tensor, positions: torch.Tensor) -> CachedStep:
        longest = tables.size(1) * KEY_BLOCK  # a bound that the host knows: what Megatron makes rotary angles for
        step = cls("sbhd", max_seqlen_q=longest, max_seqlen_kv=longest, cache=cache, tables=tables, positions=positions)
        step.pages = tables.gather(1, (positions // KEY_BLOCK)[:, None]).squeeze(1)
        step.offsets = positions % KEY_BLOCK
        return step

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """Put ``key`` and ``value`` [N, H/groups, D] into the cache, and attend to those of all tokens there: ``query``
        [N, H, D] → [N, H, D]."""
        self.cache.write(layer, self.pages, self.offsets, key, value)
        if on_kernels(query):
            return kernel_ops().paged_attention(query, *self.cache.whole(layer), self.tables, self.positions, scale)
        return step_attention(query, *self.cache.read(layer, self.tables), self.positions, scale)


class ExactCoreAttention(SDPACoreAttention):
    """Drop-in for `DotProductAttention`: causal, block-wise, the same for a token whatever is computed beside it."""

    def __init__(self, config: TransformerConfig, layer_number: int, *args: Any, **kwargs: Any):
        super().__init__(config, layer_number, *args, **kwargs)
        self.layer_number = layer_number

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *_: Any,
        packed_seq_params: PackedSeqParams | None = None,
        **__: Any,
    ) -> torch.Tensor:
        """``query`` [N, 1, H, D], ``key`` and ``value`` [N, 1, H/groups, D] → [N, 1, H·D]."""
        packed = packed_seq_params
        query, key, value = (x.squeeze(1) for x in (query, key, value))
        layer = self.layer_number - 1
        if isinstance(packed, CachedStep):
            out = packed.attend(layer, query, key, value, self._scale(query))
        else:
            if isinstance(packed, CachedPrompts):
                packed.cache.write(layer, packed.pages, packed.offsets, key, value)
            if on_kernels(query):
                lengths = list(packed.lengths) if packed is not None else [len(query)]
                out = kernel_ops().packed_attention(query, key, value, lengths, self._scale(query))
            else:
                out = torch.cat([self._attend_packed(*qkv) for qkv in self._parts(packed, query, key, value)])
        return out.flatten(1).unsqueeze(1)

    def _parts(self, packed: PackedSequences | None, *qkv: torch.Tensor) -> Any:
        """(lengths, q, k, v) of sequences that are attended to in one call."""
        lengths = list(packed.lengths) if packed is not None else [qkv[0].size(0)]
        if padding_pays(lengths):
            return [(lengths, *qkv)]
        return [([len(part[0])], *part) for part in zip(*(x.split(lengths) for x in qkv), strict=True)]

    def _attend_packed(
        self, lengths: list[int], query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """Sequences of ``lengths`` back to back, [N, H, D] → [N, H, D]."""
        pad, unpad = padding_indices(lengths, _whole_blocks(max(lengths)), query.device)
        padded = (x[pad].transpose(1, 2) for x in (query, key, value))  # [S, H, M, D]
        out = _Attend.apply(*padded, self._scale(query)).transpose(1, 2)
        return out.flatten(0, 1)[unpad]

    def _scale(self, query: torch.Tensor) -> float:
        return self.softmax_scale or query.size(-1) ** -0.5


class _Attend(torch.autograd.Function):
    """Invariant forward; the gradient is that of PyTorch's attention, the same function."""

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
        ctx.save_for_backward(query, key, value)
        ctx.scale = scale
        last_key = torch.arange(query.size(2), device=query.device).expand(query.size(0), -1)
        return attention(query, key, value, last_key, scale)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        qkv = [x.detach().requires_grad_() for x in ctx.saved_tensors]
        with torch.enable_grad():
            out = attend(*qkv, ctx.scale, is_causal=True)
        return (*torch.autograd.grad(out, qkv, grad), None)


def _whole_blocks(num_tokens: int) -> int:
    return -(-num_tokens // KEY_BLOCK) * KEY_BLOCK


def route(logits: torch.Tensor, top: int, pre_softmax: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The ``top`` experts of each token.

    Args:
        logits: [N, E].
        pre_softmax: probabilities of a softmax over all experts; else over the chosen ones.

    Returns:
        probabilities [N, top] in the dtype of ``logits`` and experts [N, top] int64, in the order of the experts.
    """
    if on_kernels(logits):
        return kernel_ops().route(logits, top, not pre_softmax)
    scores, is_chosen = topk_routing_with_score_function(logits, top, use_pre_softmax=pre_softmax)
    chosen = is_chosen.nonzero()[:, 1].view(-1, top)
    return scores.gather(1, chosen), chosen


def experts(
    x: torch.Tensor,
    probs: torch.Tensor,
    chosen: torch.Tensor,
    fc1: list[torch.Tensor],
    fc2: list[torch.Tensor],
    first: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Each row through those of its experts that are here, without gradient. On kernels nothing looks at a value, and
    no shape depends on one.

    Args:
        x: [n, H].
        probs, chosen: [n, K], what `route` returns.
        fc1, fc2: of E experts the gate and up projections [2F, H], and the one down [H, F].
        first: the number of the first of them.

    Returns:
        results [M, H], and the place [n, K] in them of each row's; that of an expert elsewhere is of no meaning.
    """
    if on_kernels(x):
        return kernel_ops().experts(x, probs, chosen, fc1, fc2, first)
    return _experts_in_tiles(x, probs, chosen - first, fc1, fc2)


def add_experts(results: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """[M, H], [n, K] → [n, H]: the rows at each token's places, added in their order as a pass adds them."""
    if on_kernels(results):
        return kernel_ops().combine(results, places)
    parts = results[places]  # [n, K, H]
    total = torch.zeros_like(parts[:, 0])
    for k in range(parts.size(1)):
        total = total + parts[:, k]
    return total


def _experts_in_tiles(
    x: torch.Tensor, probs: torch.Tensor, local: torch.Tensor, fc1: list[torch.Tensor], fc2: list[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    is_there = local.flatten()[:, None] == torch.arange(len(fc1), device=x.device)  # [nK, E]
    before = is_there.cumsum(0)
    counts = (before[-1] + TILE - 1) // TILE  # [E], tiles
    first = (counts.cumsum(0) - counts) * TILE
    here = local.clamp(0, len(fc1) - 1)
    places = first[here] + before.gather(1, here.view(-1, 1)).view_as(here) - 1  # [n, K]
    # Tiles that there can be: every one of E experts has at most one that is not full. One more is for rows elsewhere.
    num_tiles = local.numel() // TILE + len(fc1) + 1
    places = places.where(here == local, (num_tiles - 1) * TILE)
    rows = x.new_zeros(num_tiles * TILE, x.size(1))
    rows[places.flatten()] = x.repeat_interleave(local.size(1), 0)
    scale = probs.new_zeros(num_tiles * TILE, 1)
    scale[places.flatten(), 0] = probs.flatten()
    hidden = _grouped_matmul(rows.view(num_tiles, TILE, -1), counts.tolist(), fc1)
    hidden = (gated(hidden.flatten(0, 1)) * scale).to(x.dtype)
    return _grouped_matmul(hidden.view(num_tiles, TILE, -1), counts.tolist(), fc2).flatten(0, 1), places


def _grouped_matmul(tiles: torch.Tensor, counts: list[int], weights: list[torch.Tensor]) -> torch.Tensor:
    """Tiles of rows [T, `TILE`, K] times the weight [N, K] of the expert that each belongs to, [T, `TILE`, N].

    ``counts``: tiles of each expert, which lie in the order of the experts; what follows them is 0. A row has the bits
    of `matmul`.
    """
    out = tiles.new_zeros(len(tiles), TILE, weights[0].size(0))
    first = 0
    for weight, count in zip(weights, counts, strict=True):
        if count:
            of_size = slice(first, first + count)
            torch.bmm(tiles[of_size], weight.t().expand(count, -1, -1), out=out[of_size])
            first += count
    return out


def gated(x: torch.Tensor) -> torch.Tensor:
    """silu(gate) · up [N, F] of ``x`` = (gate, up) [N, 2F]."""
    gate, up = x.chunk(2, dim=-1)
    return padded(F.silu)(gate) * up


def use_exact_layers(block: TransformerBlockSubmodules) -> None:
    """Put these layers into the specification of Megatron's local layers."""
    for layer in block.layer_specs:
        parts = layer.submodules
        parts.self_attention.module = ExactSelfAttention
        attention_parts = parts.self_attention.submodules
        attention_parts.core_attention = ExactCoreAttention
        use_experts(parts.mlp, ExactExperts)


def finish_exact_model(model: GPTModel) -> None:
    """Set what a specification cannot express: one cosine for all layers, and the routers' functions."""
    model.rotary_pos_emb = CosSinEmbedding(model.rotary_pos_emb)
    for router in (part for part in model.modules() if isinstance(part, TopKRouter)):
        router.gating = partial(_gating, router)
        router.routing = partial(_routing, router, router.routing)


class ExactSelfAttention(RotatingSelfAttention):
    """Rotates queries and keys by `invariant.rotate`."""

    def get_query_key_value_tensors(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        query, key, *others = super().get_query_key_value_tensors(hidden_states, *args, **kwargs)
        cos, sin = self._cos_sin.flatten(1).chunk(2, dim=-1)
        query, key = (rotate(x.squeeze(1), cos, sin).unsqueeze(1) for x in (query, key))
        return query, key, *others


def norm_over_heads(norm: WideNorm, x: torch.Tensor) -> torch.Tensor:
    """The norm of [N, …, D] over all heads. One rank must have all of them: `config.model_rules` refuses more."""
    if norm.weight.numel() != norm.width:
        raise NotImplementedError(f"exact norm over {norm.width} columns, of which a rank has {norm.weight.numel()}")
    return rms_norm(x.reshape(-1, norm.width), (norm.width,), norm.weight, norm.eps).view(x.shape)


class ExactWideNorm(WideNorm):
    forward = norm_over_heads


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
