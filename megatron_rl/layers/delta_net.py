"""Gated delta nets over packed rows: Megatron-Core's layer, and its three kernels in torch where `fla` cannot run.

A layer keeps a state S, a matrix, for each head of values. Unit keys kₜ, values vₜ, decays gₜ ≤ 0, strengths βₜ:

    S ← exp(gₜ)·S;   S ← S + kₜ ⊗ βₜ·(vₜ − Sᵀkₜ);   oₜ = Sᵀqₜ / √K

A sequence is cut into chunks of `CHUNK` tokens. Within a chunk all writes follow from one triangular system, so that
the chunks of all sequences of a row are one batch of products. Only the states go from chunk to chunk, those of all
sequences at once. Nothing goes from one sequence to the next.

Shapes: N tokens of a row, T chunks, C = `CHUNK`, G heads of queries and keys, R heads of values for each, K and V their
widths. All of it is fp32; a backward pass computes it again and keeps the inputs alone.
"""

from __future__ import annotations

import copy
import functools
import importlib.util
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules, common, gdn
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch.utils.checkpoint import checkpoint

from megatron_rl.errors import InputError
from megatron_rl.layers.attention import PackedSequences, Pad, Unpad
from megatron_rl.layers.cpu_layers import FewPassRMSNorm
from megatron_rl.model.architecture import Architecture

Tensor = torch.Tensor
CHUNK = 64


def fields_with_delta_nets(a: Architecture) -> dict[str, Any]:
    """Fields of Megatron's configuration for the delta nets, gates and norms of ``a``; empty where it has none."""
    fields: dict[str, Any] = {}
    if a.output_gate:
        fields["attention_output_gate"] = True
    if a.zero_centred_norms:
        fields["layernorm_zero_centered_gamma"] = True
    if (m := a.linear) is not None:
        fields |= {
            "linear_attention_freq": [int(a.is_linear(layer)) for layer in range(a.num_layers)],
            "linear_num_key_heads": m.key_heads,
            "linear_num_value_heads": m.value_heads,
            "linear_key_head_dim": m.key_width,
            "linear_value_head_dim": m.value_width,
            "linear_conv_kernel_dim": m.kernel,
        }
    return fields


def use_delta_nets(block: TransformerBlockSubmodules, config: TransformerConfig, te: bool) -> None:
    """Put delta nets into the layers of this stage that have them: Megatron's with TransformerEngine's projections and
    the kernels of `fla`, or (``te`` false) with Megatron's projections and these kernels."""
    if te:
        if importlib.util.find_spec("fla") is None:
            raise InputError(
                "model.path: this model has gated delta nets, whose kernels on GPUs are fla's: pip install "
                "flash-linear-attention. Or uninstall transformer-engine for torch's, which are slower"
            )
        from megatron.core.extensions.transformer_engine import TELayerNormColumnParallelLinear, TERowParallelLinear

        parts = GatedDeltaNetSubmodules(TELayerNormColumnParallelLinear, PlainNorm, TERowParallelLinear)
    else:
        common.HAVE_FLA, common.l2norm = True, None  # what it would import of fla
        gdn.causal_conv1d, gdn.chunk_gated_delta_rule = causal_conv, chunked_delta_rule
        parts = GatedDeltaNetSubmodules(ColumnParallelLinear, PlainNorm, OutputProjection)
    first = get_transformer_layer_offset(config)
    for number, layer in enumerate(block.layer_specs):
        if config.linear_attention_freq[first + number]:
            own = copy.copy(layer.submodules)  # Megatron has one for all layers
            own.self_attention = ModuleSpec(DeltaNet if te else PackedDeltaNet, submodules=parts)
            if not te:
                own.sharded_state_dict_keys_map = own.sharded_state_dict_keys_map | {
                    "input_layernorm.": "self_attention.in_proj.layer_norm_"
                }
            block.layer_specs[number] = replace(layer, submodules=own)


class OutputProjection(RowParallelLinear):
    """Megatron's projection, of equal bits with and without gradients.

    Its input [N, 1, channels] is a transposed row. For the strides of a transposed row torch.matmul takes another
    kernel when no operand needs a gradient, and that kernel rounds differently. Here the input has plain strides.
    """

    def forward(self, input_: Tensor) -> Any:
        return super().forward(input_.flatten(0, 1)[:, None])


class PlainNorm(FewPassRMSNorm):
    """That in front of the output, which no model centres at zero."""

    zero_centred = False


class DeltaNet(GatedDeltaNet):
    """Megatron's layer, whose A_log stays fp32 when the model is cast: vLLM has it so."""

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self.A_log = torch.nn.Parameter(self.A_log.detach().float())
        set_tensor_model_parallel_attributes(self.A_log, True, 0, 1)

    def _apply(self, function: Any, recurse: bool = True) -> DeltaNet:
        kept = self.A_log.data
        super()._apply(function, recurse)
        self.A_log.data = kept.to(self.A_log.device)
        return self


class PackedDeltaNet(DeltaNet):
    """Megatron's layer with the kernels of this module."""

    def forward(self, hidden_states: Tensor, *args: Any, packed_seq_params: Any = None, **options: Any) -> Any:
        tokens = len(hidden_states) * self.sp_size * self.cp_size
        lengths = [tokens] if packed_seq_params is None else list(packed_seq_params.lengths)
        packed = PackedSequences.from_lengths(lengths, hidden_states.device, thd=True)
        return super().forward(hidden_states, None, packed_seq_params=packed)

    def _prepare_input_for_gated_delta_rule(
        self, qkv: Tensor, gate: Tensor, batch: int, seq_len: int, *gate_feats: Tensor
    ) -> tuple[Tensor, ...]:
        """[1, N, channels] → queries, keys and values [1, N, heads, width], and the rest as it is."""
        keys = self.qk_dim_local_tp // self.cp_size
        parts = qkv.split((keys, keys, self.v_dim_local_tp // self.cp_size), dim=-1)
        widths = (self.key_head_dim, self.key_head_dim, self.value_head_dim)
        heads = (part.unflatten(-1, (-1, width)) for part, width in zip(parts, widths, strict=True))
        return *heads, gate, *gate_feats

    def _compute_g_and_beta(self, a_log: Tensor, dt_bias: Tensor, alpha: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
        return -a_log.float().exp() * F.softplus(alpha.float() + dt_bias.float()), beta.float().sigmoid()

    def _apply_gated_norm(self, x: Tensor, gate: Tensor) -> Tensor:
        return (self.out_norm(x.float()) * F.silu(gate.float())).to(x.dtype)


# -- the kernels, with the arguments that Megatron gives those of fla


def causal_conv(x: Tensor, weight: Tensor, cu_seqlens: Tensor, **_: Any) -> tuple[Tensor, None]:
    """SiLU of a convolution over each token and those before it in its sequence. ``x`` [1, N, channels], ``weight``
    [channels, kernel]. In fp32, rounded once."""
    places = chunk_places(tuple(cu_seqlens.diff().tolist()), x.device)
    row, weight = x[0].float(), weight.float()
    out = row * weight[:, -1]
    for back in range(1, weight.size(1)):
        before = F.pad(row, (0, 0, back, 0))[: len(row)]
        out = out + before.masked_fill(places.position[:, None] < back, 0.0) * weight[:, -1 - back]
    return F.silu(out).to(x.dtype)[None], None


class Places:
    """Where the tokens of a row are among the chunks of its sequences.

    Chunks lie by their number in their sequence, and those of one number from the longest sequence to the shortest:
    the sequences that have a next chunk are the first ones.
    """

    def __init__(self, lengths: tuple[int, ...], device: torch.device):
        size = torch.tensor(lengths)
        start = size.cumsum(0) - size
        order = torch.argsort(size, descending=True, stable=True)
        chunks = -(-size // CHUNK)
        self.counts = [int((chunks > number).sum()) for number in range(int(chunks.max()))]  # of each number
        begin = torch.cat([start[order[:count]] + CHUNK * number for number, count in enumerate(self.counts)])
        end = torch.cat([(start + size)[order[:count]] for count in self.counts])
        column = begin[:, None] + torch.arange(CHUNK)
        valid = column < end[:, None]  # [T, C]
        pad = torch.where(valid, column, begin[:, None])
        unpad = torch.empty(int(size.sum()), dtype=torch.long)
        unpad[pad[valid]] = valid.flatten().nonzero().flatten()
        position = torch.arange(len(unpad)) - start.repeat_interleave(size)
        self.valid, self.pad, self.unpad, self.position = (x.to(device) for x in (valid, pad, unpad, position))


@functools.lru_cache(maxsize=4)
def chunk_places(lengths: tuple[int, ...], device: torch.device) -> Places:
    return Places(lengths, device)


def chunked_delta_rule(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, cu_seqlens: Tensor, **_: Any
) -> tuple[Tensor, None]:
    """`delta_rule` of [1, N, …]."""
    places = chunk_places(tuple(cu_seqlens.diff().tolist()), value.device)
    arguments = (query[0], key[0], value[0], g[0], beta[0], places)
    out = checkpoint(delta_rule, *arguments, use_reentrant=False, preserve_rng_state=False)
    return out.to(value.dtype)[None], None


def unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def delta_rule(query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, places: Places) -> Tensor:
    """[N, G·R, V] of [N, G, K], [N, G, K], [N, G·R, V], [N, G·R] and [N, G·R]."""
    groups = query.size(1)

    def in_chunks(x: Tensor) -> Tensor:  # [N, heads, …] → [T, heads, C, …]
        return Pad.apply(x.float(), places.pad, places.unpad).transpose(1, 2)

    query, key = unit(in_chunks(query)) * query.size(-1) ** -0.5, unit(in_chunks(key))  # [T, G, C, K]
    value = in_chunks(value).unflatten(1, (groups, -1))  # [T, G, R, C, V]
    # Padding neither decays a state nor is written to it.
    g, beta = ((in_chunks(x) * places.valid[:, None]).unflatten(1, (groups, -1)) for x in (g, beta))  # [T, G, R, C]
    decay = g.cumsum(-1)
    later = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=g.device).triu(1)
    between = (decay[..., :, None] - decay[..., None, :]).masked_fill(later, -torch.inf).exp()
    system = (key @ key.mT)[:, :, None] * between * beta[..., None]
    seen = (query @ key.mT)[:, :, None] * between
    begun, strength = decay.exp()[..., None], beta[..., None]
    of_state = key[:, :, None] * (strength * begun)
    written = torch.cat([value * strength, of_state.expand(*value.shape[:-1], -1)], dim=-1)
    written = torch.linalg.solve_triangular(system, written, upper=False, unitriangular=True)
    new, of_state = written.split((value.size(-1), key.size(-1)), dim=-1)
    asked, kept = query[:, :, None] * begun, key[:, :, None] * (decay[..., -1:] - decay).exp()[..., None]
    outputs = scan(new, of_state, asked, kept, seen, decay[..., -1].exp()[..., None, None], places.counts)
    return Unpad.apply(outputs.flatten(1, 2).transpose(1, 2), places.pad, places.unpad)


def scan(
    new: Tensor, of_state: Tensor, asked: Tensor, kept: Tensor, seen: Tensor, decay: Tensor, counts: list[int]
) -> Tensor:
    """[T, G, R, C, V]: chunk after chunk, of all sequences that have one of this number at once."""
    # Slices of the whole would make a backward pass quadratic in the chunks: each has a gradient of the whole's size.
    pieces = (x.split(counts) for x in (new, of_state, asked, kept, seen, decay))
    outputs, state = [], None
    for change, reads, asks, keeps, sees, decays, following in zip(*pieces, [*counts[1:], 0], strict=True):
        out = 0.0
        if state is not None:
            change, out = change - reads @ state, asks @ state
        outputs.append(out + sees @ change)
        if following:
            update = keeps[:following].mT @ change[:following]
            state = update if state is None else state[:following] * decays[:following] + update
    return torch.cat(outputs)
