"""Megatron's layers in fewer passes over memory, for where TransformerEngine's kernels cannot run.

Between two matrix products Megatron's own layers walk over the activations once per elementary operation: a rotary
embedding is two concatenations, two products and a sum, and cosines of every angle in every layer. A CPU waits for
memory in each of them. Here each such stretch is one function in few passes (`rms_norm`, …), with its own gradient; the
layers and `kernel_ops` call these in their autograd functions. All experts of a rank are one function, so that
elementwise work is done once for all of them. Parameters, their names and the results (to rounding) are Megatron's;
tests/unit/layers/test_cpu_layers.py compares values and gradients with the original layers.

Shapes: N tokens, b = 1, H hidden size, D head width, E local experts, F expert width, K experts per token, M = N·K rows
that are sorted by expert. Activations have the learner's dtype, 1 / rms is float32.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt import GPTModel
from megatron.core.post_training.modelopt.layers import Linear as ReplicatedLinear
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_rl.layers.attention import PackedRotaryEmbedding, WideNorm

Tensor = torch.Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x / rms(x) · weight over the last dimension, in x's dtype; and 1 / rms in float32."""
    square = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32).square_()
    scale = square.div_(x.size(-1)).add_(eps).rsqrt_()
    return (x.float() * scale).mul_(weight).to(x.dtype), scale


def rms_norm_backward(grad: Tensor, x: Tensor, weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of x (float32) and weight. With s = 1 / rms: dx = s·(w·g) − x·s³·mean(w·g·x), dw = Σ s·g·x."""
    grad, x, weight32 = grad.float(), x.float(), weight.float()
    product = (grad * x).reshape(-1, x.size(-1))
    grad_weight = product.t() @ scale.view(-1)
    total = (product @ weight32).view_as(scale)
    mean = total.mul_(scale.pow(3)).div_(x.size(-1))
    grad_x = (grad * weight32).mul_(scale).addcmul_(x, mean, value=-1.0)
    return grad_x, grad_weight.to(weight.dtype)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """(x₁, x₂) → (x₁·cos − x₂·sin, x₂·cos + x₁·sin), into a new tensor. x₁ and x₂ are halves of what is turned of the
    last dimension, twice as wide as ``cos``; what stands behind it stays."""
    turned = 2 * cos.size(-1)
    x1, x2 = x[..., :turned].chunk(2, dim=-1)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    y1, y2 = out[..., :turned].chunk(2, dim=-1)
    out[..., turned:] = x[..., turned:]
    torch.mul(x1, cos, out=y1).addcmul_(x2, sin, value=-1.0)
    torch.mul(x2, cos, out=y2).addcmul_(x1, sin)
    return out


def split_norm_rotate(
    mixed: Tensor, q_weight: Tensor | None, k_weight: Tensor | None, cos: Tensor, sin: Tensor, eps: float
) -> tuple[Tensor | None, ...]:
    """Queries, keys, values and the 1 / rms of queries and keys of ``mixed`` [N, b, groups, heads + 2, D].

    ``cos``, ``sin`` [N, 1, 1, 1, R/2]: the first R of a head's D numbers are turned. A weight that is None: no norm.
    Queries [N, b, groups·heads, D], keys and values [N, b, groups, D].
    """
    outputs, scales = [], []
    for part, weight in ((mixed[..., :-2, :], q_weight), (mixed[..., -2:-1, :], k_weight)):
        scale = None
        if weight is not None:
            part, scale = rms_norm(part, weight, eps)
        scales.append(scale)
        outputs.append(_rotate(part, cos, sin).flatten(2, 3))
    return *outputs, mixed[..., -1, :].clone(memory_format=torch.contiguous_format), *scales


def split_norm_rotate_backward(
    grad_q: Tensor,
    grad_k: Tensor,
    grad_v: Tensor,
    mixed: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    q_scale: Tensor | None,
    k_scale: Tensor | None,
) -> tuple[Tensor | None, ...]:
    """Gradients of ``mixed`` and of both weights."""
    parts = (mixed[..., :-2, :], grad_q, q_weight, q_scale), (mixed[..., -2:-1, :], grad_k, k_weight, k_scale)
    grads, grad_weights = [], []
    for x, grad_out, weight, scale in parts:
        grad, grad_weight = _rotate(grad_out.reshape(x.shape), cos, -sin), None
        if weight is not None:
            grad, grad_weight = rms_norm_backward(grad, x, weight, scale)
        grads.append(grad.to(mixed.dtype))
        grad_weights.append(grad_weight)
    return torch.cat([*grads, grad_v.unsqueeze(3)], dim=3), *grad_weights


def gated_silu(hidden: Tensor, probs: Tensor) -> Tensor:
    """silu(gate) · up · prob [M, F] of ``hidden`` = (gate, up) [M, 2F] and ``probs`` [M]."""
    gate, up = hidden.chunk(2, dim=-1)
    return (F.silu(gate).mul_(up) * probs[:, None]).to(hidden.dtype)


def gated_silu_backward(grad: Tensor, hidden: Tensor, probs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`gated_silu` once more, and the gradients of ``hidden`` and ``probs``."""
    gate, up = hidden.chunk(2, dim=-1)
    silu = F.silu(gate)
    activated = silu * up
    grad_probs = (grad * activated).sum(dim=-1, dtype=probs.dtype)
    out = activated.mul_(probs[:, None])
    grad_activated = grad.mul_(probs[:, None])
    grad_hidden = torch.empty_like(hidden)
    grad_gate, grad_up = grad_hidden.chunk(2, dim=-1)
    torch.mul(grad_activated, silu, out=grad_up)
    torch.ops.aten.silu_backward.grad_input(grad_activated.mul_(up), gate, grad_input=grad_gate)
    return out, grad_hidden, grad_probs


GATE_SLOPE, GATE_LIMIT, UP_OFFSET = 1.702, 7.0, 1.0  # of `clamped_swiglu`


def clamped_swiglu(hidden: Tensor, probs: Tensor) -> Tensor:
    """(up + 1) · gate · sigmoid(1.702 · gate) · prob [M, F] of ``hidden`` = (gate, up) [M, 2F] and ``probs`` [M].

    The gate is at most 7, and up from −7 to 7. In fp32, rounded once."""
    gate, up = hidden.float().chunk(2, dim=-1)
    gate, up = gate.clamp(max=GATE_LIMIT), up.clamp(-GATE_LIMIT, GATE_LIMIT)
    return (torch.sigmoid(GATE_SLOPE * gate).mul_(gate).mul_(up + UP_OFFSET) * probs[:, None]).to(hidden.dtype)


def clamped_swiglu_backward(grad: Tensor, hidden: Tensor, probs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`clamped_swiglu` once more, and the gradients of ``hidden`` and ``probs``."""
    gate, up = hidden.float().chunk(2, dim=-1)
    low_gate, low_up = gate <= GATE_LIMIT, up.abs() <= GATE_LIMIT
    gate, up = gate.clamp(max=GATE_LIMIT), up.clamp(-GATE_LIMIT, GATE_LIMIT) + UP_OFFSET
    share = torch.sigmoid(GATE_SLOPE * gate)
    glu = gate * share
    activated, grad = glu * up, grad.float()
    grad_probs = (grad * activated).sum(dim=-1).to(probs.dtype)
    grad = grad * probs[:, None]
    # d (gate · share) / d gate = share + slope · gate · share · (1 − share)
    slope = share + GATE_SLOPE * glu * (1 - share)
    grad_hidden = torch.cat([grad * up * slope * low_gate, grad * glu * low_up], dim=-1).to(hidden.dtype)
    return (activated * probs[:, None]).to(hidden.dtype), grad_hidden, grad_probs


def use_few_pass_layers(block: TransformerBlockSubmodules) -> None:
    """Put these layers into the specification of Megatron's local layers."""
    block.layer_norm = FewPassRMSNorm
    for layer in block.layer_specs:
        parts = layer.submodules
        parts.input_layernorm = FewPassRMSNorm
        if parts.pre_mlp_layernorm is not IdentityOp:
            parts.pre_mlp_layernorm = FewPassRMSNorm
        if issubclass(parts.self_attention.module, MLASelfAttention):
            use_latent_attention(parts)
        else:
            parts.self_attention.module = FewPassSelfAttention
            own = parts.self_attention.submodules
            for name in ("q_layernorm", "k_layernorm"):
                if getattr(own, name) not in (None, IdentityOp):
                    setattr(own, name, FewPassRMSNorm)
        use_experts(parts.mlp, FewPassExperts)


def use_latent_attention(parts: Any) -> None:
    """Put latent attention over packed rows into a layer, and TransformerEngine's names of norms into checkpoints."""
    multi_latent_attention.Linear = ReplicatedLinear  # which it knows where TransformerEngine is installed
    parts.self_attention.module = PackedLatentAttention
    # Whole on every rank, as TransformerEngine's: Megatron's own choice, cut over ranks, loses the gradient that other
    # ranks' heads have of the shared part of a key.
    parts.self_attention.submodules.linear_q_down_proj = ReplicatedLinear
    parts.self_attention.submodules.linear_kv_down_proj = ReplicatedLinear
    names = {"input_layernorm.": "input_layernorm."}
    for norm, projection in (("q_layernorm", "linear_q_up_proj"), ("kv_layernorm", "linear_kv_up_proj")):
        setattr(parts.self_attention.submodules, norm, FewPassRMSNorm)
        names[f"self_attention.{norm}."] = f"self_attention.{projection}.layer_norm_"
    if not hasattr(parts.mlp.keywords["submodules"], "experts"):
        names["pre_mlp_layernorm."] = "mlp.linear_fc1.layer_norm_"
    parts.sharded_state_dict_keys_map = names


class LatentAttention(MLASelfAttention):
    """Latent attention with the norms and projections of its specification.

    Where queries have no latent vector, megatron-core 0.19 would put a norm before their projection; no model has it.
    """

    def _resolve_qk_norm_config(self, submodules: Any) -> dict[str, Any]:
        return vars(submodules)


class PackedLatentAttention(LatentAttention):
    """Latent attention whose rotary embedding is the model's, which knows each token's place in its own sequence."""

    def get_query_key_value_tensors(
        self, hidden_states: Tensor, key_value_states: Any = None, position_ids: Any = None, *_: Any, **__: Any
    ) -> tuple[Tensor, ...]:
        return super().get_query_key_value_tensors(hidden_states, key_value_states, position_ids)


def use_experts(feed_forward: functools.partial, experts_class: type) -> None:
    """Put ``experts_class`` into the specification of a feed-forward block, a partial call, if it has experts."""
    parts = feed_forward.keywords["submodules"]
    if hasattr(parts, "experts"):
        parts.experts = functools.partial(experts_class, *parts.experts.args, **parts.experts.keywords)


def finish_few_pass_model(model: GPTModel) -> None:
    """Set what a specification cannot express: one cosine for all layers, no exchange where a rank has all experts."""
    if model.config.multi_latent_attention:
        attention = [layer.self_attention for layer in model.decoder.layers]
        model.rotary_pos_emb = PackedRotaryEmbedding(attention[0].rotary_pos_emb)
        for part in attention:
            part.rotary_pos_emb = model.rotary_pos_emb
    else:
        model.rotary_pos_emb = CosSinEmbedding(model.rotary_pos_emb)
    if model.config.expert_model_parallel_size * model.config.expert_tensor_parallel_size > 1:
        return
    for layer in model.decoder.layers:
        if isinstance(layer.mlp, MoELayer):
            layer.mlp.token_dispatcher = LocalDispatcher(layer.mlp.config)


# -- root mean square norm


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        rows = x.reshape(-1, x.size(-1))
        out, scale = rms_norm(rows, weight, eps)
        ctx.save_for_backward(rows, weight, scale)
        return out.view(x.shape)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, scale = ctx.saved_tensors
        grad_x, grad_weight = rms_norm_backward(grad.reshape(x.shape), x, weight, scale)
        return grad_x.to(x.dtype).view(grad.shape), grad_weight, None


class FewPassRMSNorm(torch.nn.RMSNorm):
    """`torch.nn.RMSNorm` with the arguments that Megatron gives a norm."""

    zero_centred: bool | None = None  # as the model's, where a subclass does not say

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any):
        super().__init__(hidden_size, eps)
        if self.zero_centred is None:
            self.zero_centred = config.layernorm_zero_centered_gamma
        # Under sequence parallelism each rank has its own tokens only: Megatron sums these gradients over the ranks.
        self.weight.sequence_parallel = config.sequence_parallel

    @property
    def factor(self) -> torch.Tensor:
        """What x / rms(x) is multiplied by."""
        return self.weight.float() + 1 if self.zero_centred else self.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _RMSNorm.apply(x, self.factor, self.eps)


# -- from the projection to rotated queries and keys


class CosSinEmbedding(PackedRotaryEmbedding):
    """Cosine and sine of every token's angles [N, 1, 1, D/2 + D/2], once for all layers; with YaRN's factor, if any."""

    def forward(self, max_seq_len: int, **kwargs: object) -> torch.Tensor | tuple[torch.Tensor, float]:
        angles = super().forward(max_seq_len, **kwargs)
        if not isinstance(angles, tuple):
            return _cos_sin(angles)
        angles, scale = angles  # of YaRN
        return _cos_sin(angles).mul_(scale), 1.0


def _cos_sin(angles: Tensor) -> Tensor:
    half = angles[..., : angles.size(-1) // 2]
    return torch.cat([half.cos(), half.sin()], dim=-1)


class _SplitNormRotate(torch.autograd.Function):
    """[N, b, groups, heads + 2, D] → queries [N, b, groups·heads, D], keys and values [N, b, groups, D]."""

    @staticmethod
    def forward(ctx: Any, mixed, q_weight, k_weight, cos_sin, eps):
        cos, sin = (part.to(mixed.dtype) for part in cos_sin.unsqueeze(2).chunk(2, dim=-1))
        *outputs, q_scale, k_scale = split_norm_rotate(mixed, q_weight, k_weight, cos, sin, eps)
        ctx.save_for_backward(mixed, q_weight, k_weight, cos, sin, q_scale, k_scale)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, grad_q, grad_k, grad_v):
        return *split_norm_rotate_backward(grad_q, grad_k, grad_v, *ctx.saved_tensors), None, None


class RotatingSelfAttention(SelfAttention):
    """Rotates queries and keys where they are made; the rotary embedding must be a `CosSinEmbedding`."""

    def forward(self, hidden_states: torch.Tensor, attention_mask: Any, *args: Any, **kwargs: Any) -> Any:
        self._cos_sin = kwargs.pop("rotary_pos_emb")  # [N, 1, 1, D/2 + D/2]
        return super().forward(hidden_states, attention_mask, *args, rotary_pos_emb=None, **kwargs)


class FewPassSelfAttention(RotatingSelfAttention):
    """Splits, normalises and rotates in one function."""

    def get_query_key_value_tensors(self, hidden_states: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, ...]:
        mixed, _bias = self.linear_qkv(hidden_states)
        groups = self.num_query_groups_per_partition
        mixed = mixed.unflatten(-1, (groups, -1, self.hidden_size_per_attention_head))
        if isinstance(self.q_layernorm, WideNorm):
            query, key, value = mixed.split((mixed.size(3) - 2, 1, 1), dim=3)
            mixed = torch.cat([self.q_layernorm(query), self.k_layernorm(key), value], dim=3)
        weights = (
            None if norm is None or isinstance(norm, IdentityOp | WideNorm) else norm.factor
            for norm in (self.q_layernorm, self.k_layernorm)
        )
        gates = []
        if self.config.attention_output_gate:
            heads = mixed.size(3) // 2 - 1
            gates = [mixed[..., heads : 2 * heads, :]]
            mixed = torch.cat([mixed[..., :heads, :], mixed[..., 2 * heads :, :]], dim=3)
        return *_SplitNormRotate.apply(mixed, *weights, self._cos_sin, self.config.layernorm_epsilon), *gates

    def _apply_output_gate(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return (x * torch.sigmoid(gate.reshape(x.shape).float())).to(x.dtype)


# -- experts


class Experts(torch.autograd.Function):
    """Rows [M, H], sorted by expert → act(x·w₁, prob)·w₂ [M, H], expert by expert; act is `gated_silu`.

    ``weights``: those of all experts' first layers, then of their second layers, then, if they have them, both layers'
    biases likewise: act(x·w₁ + b₁, prob)·w₂ + prob·b₂, where act is `clamped_swiglu`.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, probs: Tensor, counts: list[int], *weights: Tensor):
        fc1, fc2, bias1, bias2 = _by_kind(weights, len(counts))
        hidden = x.new_empty(len(x), fc1[0].size(0))
        _each(x, fc1, counts, hidden, transposed=True)
        for rows, bias in zip(hidden.split(counts), bias1):
            rows.add_(bias)
        out = x.new_empty(len(x), fc2[0].size(0))
        activated = clamped_swiglu(hidden, probs) if bias1 else gated_silu(hidden, probs)
        _each(activated, fc2, counts, out, transposed=True)
        for rows, share, bias in zip(out.split(counts), probs.to(x.dtype).split(counts), bias2):
            rows.addr_(share, bias)
        ctx.save_for_backward(x, probs, hidden, *weights)
        ctx.counts = counts
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor):
        x, probs, hidden, *weights = ctx.saved_tensors
        counts, grad = ctx.counts, grad.contiguous()
        fc1, fc2, bias1, bias2 = _by_kind(weights, len(counts))
        grad_scaled = hidden.new_empty(len(hidden), hidden.size(1) // 2)
        _each(grad, fc2, counts, grad_scaled, transposed=False)
        activation_backward = clamped_swiglu_backward if bias1 else gated_silu_backward
        scaled, grad_hidden, grad_probs = activation_backward(grad_scaled, hidden, probs)
        of_expert = grad.split(counts)
        grad_fc2 = [g.t() @ a for g, a in zip(of_expert, scaled.split(counts), strict=True)]
        grad_fc1 = [g.t() @ a for g, a in zip(grad_hidden.split(counts), x.split(counts), strict=True)]
        grad_biases = []
        if bias1:
            grad_probs += torch.cat([g @ bias for g, bias in zip(of_expert, bias2, strict=True)]).to(probs.dtype)
            grad_biases = [g.sum(dim=0) for g in grad_hidden.split(counts)]
            shares = probs.to(x.dtype).split(counts)
            grad_biases += [share @ g for share, g in zip(shares, of_expert, strict=True)]
        grad_x = torch.empty_like(x)
        _each(grad_hidden, fc1, counts, grad_x, transposed=False)
        return grad_x, grad_probs, None, *grad_fc1, *grad_fc2, *grad_biases


def _by_kind(weights: Sequence[Tensor], experts: int) -> list[Sequence[Tensor]]:
    """Weights of the first layers, of the second layers, and their biases; these are empty where there are none."""
    return [weights[kind * experts : (kind + 1) * experts] for kind in range(4)]


def _each(
    x: torch.Tensor, weights: tuple[torch.Tensor, ...], counts: list[int], out: torch.Tensor, transposed: bool
) -> None:
    """``out`` = the rows of each expert times its weight."""
    for rows, weight, result in zip(x.split(counts), weights, out.split(counts), strict=True):
        torch.mm(rows, weight.t() if transposed else weight, out=result)


class FewPassExperts(SequentialMLP):
    """All experts of this rank in one function: with gated SiLU, or, where they have biases, gpt-oss's activation."""

    def forward(
        self, hidden_states: torch.Tensor, tokens_per_expert: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, None]:
        layers = [expert.linear_fc1 for expert in self.local_experts]
        layers += [expert.linear_fc2 for expert in self.local_experts]
        weights = [layer.weight for layer in layers] + [layer.bias for layer in layers if layer.bias is not None]
        return Experts.apply(hidden_states, probs, tokens_per_expert.tolist(), *weights), None


class _Gather(torch.autograd.Function):
    """Rows of [N, H] in the order of their experts, [M, H]; and its adjoint: the sum over a token's K rows."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, tokens: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(places)
        return x.index_select(0, tokens)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor):
        return F.embedding_bag(ctx.saved_tensors[0], grad.contiguous(), mode="sum"), None, None


class _Combine(torch.autograd.Function):
    """[M, H] → [N, H], the sum over a token's K rows; and its adjoint."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, tokens: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(tokens)
        return F.embedding_bag(places, rows, mode="sum")

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor):
        return grad.index_select(0, ctx.saved_tensors[0]), None, None


class LocalDispatcher(MoETokenDispatcher):
    """Sorts tokens by expert where a rank has all experts: nothing to exchange, one gather and one sum."""

    def __init__(self, config: TransformerConfig):
        super().__init__(config, get_default_pg_collection())

    def dispatch_preprocess(self, tokens: torch.Tensor, routing_map: torch.Tensor, probs: torch.Tensor):
        """``tokens`` [N, b, H], ``routing_map`` and ``probs`` [N·b, experts]."""
        self._shape = tokens.shape
        by_expert = routing_map.t().contiguous()
        self._counts = by_expert.sum(dim=1)
        self._tokens = by_expert.nonzero()[:, 1]  # [M]
        # Row of (token, expert): those of earlier experts, and of the same one's earlier tokens.
        before = by_expert.cumsum(dim=1) - 1 + (self._counts.cumsum(0) - self._counts)[:, None]
        self._places = before.t()[routing_map].view(-1, self.config.moe_router_topk)  # [N·b, K]
        rows = _Gather.apply(tokens.reshape(-1, tokens.size(-1)), self._tokens, self._places)
        return rows, probs.t().masked_select(by_expert)

    def token_dispatch(self, hidden_states: torch.Tensor, probs: torch.Tensor):
        return hidden_states, probs

    def dispatch_postprocess(self, hidden_states: torch.Tensor, probs: torch.Tensor):
        return hidden_states, self._counts, probs

    def combine_preprocess(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return _Combine.apply(hidden_states, self._tokens, self._places)

    def token_combine(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return hidden_states

    def combine_postprocess(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return hidden_states.view(self._shape)
