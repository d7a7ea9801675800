"""Core attention over packed sequences: PyTorch's scaled_dot_product_attention, and what TransformerEngine chooses.

Megatron's own `DotProductAttention` materialises the [heads, tokens, tokens] scores and refuses packed sequences.
Here one microbatch is one row of ``N`` tokens that holds ``S`` sequences back to back. Sequences of one length are
attended to together as they lie. Sequences of several lengths are padded to the longest, or go one by one where padding
costs more than it saves. The result is the same function in every case: a causal mask never lets a token see what
follows it.

On a GPU TransformerEngine attends. Its fused attention (cuDNN) has packed rows on compute capability 9.0 and later,
flash-attn from 8.0 on. Where neither can run it falls back, without a message, to an attention that stores every score:
[sequences, heads, longest, longest]. This module therefore asks TransformerEngine which attention it takes.

Shapes: N packed tokens, S sequences, M longest sequence, H heads, D head width; GQA groups are expanded by SDPA.

Norms of queries and keys over all heads of a token, which tensor-parallel ranks share.

Each rank has some heads and the part of the weight that belongs to them. The mean square is over all ranks' heads: one
sum over the ranks in the forward pass, and one in the backward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch.utils.checkpoint import checkpoint

from megatron_rl.errors import InputError
from megatron_rl.layers.context import WHOLE_ROW, ContextShare

# PyTorch's attention, as all layers call it that compute without TransformerEngine.


PACKS_IN_VAIN = "pack_vnni2 is only supported"


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float | None,
    mask: torch.Tensor | None = None,
    is_causal: bool = False,
) -> torch.Tensor:
    """softmax(``scale`` · query · keyᵀ) · value, [B, H, S, D]; keys may have fewer heads, shared in groups."""

    def attention(*qkv: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        grouped = query.size(1) != key.size(1)
        return F.scaled_dot_product_attention(
            *qkv, attn_mask=mask, is_causal=is_causal, scale=scale, enable_gqa=grouped
        )

    try:
        return attention(query, key, value, mask=mask)
    except RuntimeError as error:
        # torch 2.13 packs long 16-bit rows for AMX where the processor has it, though ATEN_CPU_CAPABILITY asks for code
        # of other processors, which cannot. In fp32 it does not, at the cost of copies that `plan` does not count.
        if PACKS_IN_VAIN not in str(error):
            raise
    wide = mask.float() if mask is not None and mask.is_floating_point() else mask
    return attention(query.float(), key.float(), value.float(), mask=wide).to(query.dtype)


# Causal attention of a rank's chunks over whole sequences: keys and values of all context-parallel ranks, gathered.
#
# The ranks exchange keys and values once a layer, in one collective, and their gradients in another; queries stay.
# Where scores of one call would not fit, queries go in blocks, whose scores the backward pass computes again.
#
# Shapes: N packed tokens of a whole row, n = N / size of them on this rank, S sequences, M longest of them, Q = M /
# size queries of it here, H heads, G key/value heads, D head width.


# Entries of a mask that are made at once: 64 MiB in fp32. Smaller ones are made once for all layers of a microbatch.
MASK_ENTRIES = 2**24


class ContextKeys:
    """Of one packed row: where each sequence's keys lie among the gathered ones, and which of them a query sees.

    ``lengths``: of the whole sequences, with padding to whole chunks.
    """

    def __init__(self, lengths: Sequence[int], share: ContextShare, device: torch.device):
        self.lengths, self.share = list(lengths), share
        self.own = [n // share.size for n in lengths]  # queries of each sequence
        num_own = sum(self.own)
        order = np.empty(sum(lengths), dtype=np.int64)  # of each key its place among the gathered
        for rank in range(share.size):
            ranges = ContextShare(share.size, rank).ranges(lengths)
            rows = np.concatenate([np.arange(a, b) for a, b in ranges])
            order[rows] = np.arange(num_own) + rank * num_own
        place = np.empty_like(order)  # of each gathered key its place in the row
        place[order] = np.arange(len(order))
        self._order, self._place = (torch.from_numpy(x).to(device) for x in (order, place))
        self.padding: tuple[torch.Tensor, torch.Tensor] | None = None  # as `padding_indices` gives it, of the keys
        self._masks: dict[int | None, torch.Tensor] = {}
        self._positions = [share.positions(n) for n in lengths]

    def gather(self, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """``key`` and ``value`` [n, 1, G, D] → both side by side of the whole row, in its order, [N, G, 2·D]."""
        both = torch.cat([key, value], dim=-1).squeeze(1)
        both = gather_from_sequence_parallel_region(
            both, tensor_parallel_output_grad=True, group=parallel_state.get_context_parallel_group()
        )
        return _Permute.apply(both, self._order, self._place)

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float | None,
        number: int | None = None,
    ) -> torch.Tensor:
        """``query`` [S, H, Q, D], ``key`` and ``value`` [S, G, M, D] of all sequences, padded to the longest, or of
        sequence ``number`` → [S, H, Q, D]."""
        last_keys, longest = self._last_keys(number), key.size(2)
        num_sequences, width = last_keys.shape
        rows = max(1, MASK_ENTRIES // (num_sequences * longest))
        if rows >= width:
            if number not in self._masks:
                self._masks[number] = _mask(torch.from_numpy(last_keys).to(query.device), longest, query.dtype)
            return attend(query, key, value, scale, self._masks[number])
        outputs, on_device = [], torch.from_numpy(last_keys).to(query.device)
        for first in range(0, width, rows):
            block = slice(first, first + rows)
            seen = int(last_keys[:, block].max()) + 1
            inputs = (query[:, :, block], key[:, :, :seen], value[:, :, :seen], on_device[:, block], scale)
            outputs.append(checkpoint(_block, *inputs, use_reentrant=False, preserve_rng_state=False))
        return torch.cat(outputs, dim=2)

    def _last_keys(self, number: int | None) -> np.ndarray:
        """[S, Q]: the last key that each query sees. Padding sees one."""
        chosen = self._positions if number is None else [self._positions[number]]
        keys = np.zeros((len(chosen), max(len(p) for p in chosen)), dtype=np.int64)
        for row, positions in zip(keys, chosen):
            row[: len(positions)] = positions
        return keys


class _Permute(torch.autograd.Function):
    """Rows in another order; ``back`` undoes it."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, order: torch.Tensor, back: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(back)
        return x.index_select(0, order)

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        return grad.index_select(0, ctx.saved_tensors[0]), None, None


def _mask(last_keys: torch.Tensor, num_keys: int, dtype: torch.dtype) -> torch.Tensor:
    """[S, 1, Q, M] to be added to scores."""
    hidden = torch.arange(num_keys, device=last_keys.device) > last_keys[:, None, :, None]
    return torch.zeros(hidden.shape, dtype=dtype, device=last_keys.device).masked_fill_(hidden, float("-inf"))


def _block(query, key, value, last_keys, scale) -> torch.Tensor:
    return attend(query, key, value, scale, _mask(last_keys, key.size(2), query.dtype))


# All sequences go in one padded call while the padded score matrix has at most this many times the entries of the real
# ones: one call saves about 50 µs of dispatch a sequence, and an entry costs a fraction of a nanosecond.
_MAX_PADDED_WORK = 4.0


@dataclass
class PackedSequences(PackedSeqParams):
    """Megatron's packed-sequence parameters plus the index that pads and unpads.

    ``qkv_format`` stays off "thd" on purpose: Megatron then treats the row as one sequence of N positions, which is
    what `PackedRotaryEmbedding` expects, and applies rotary embeddings in one call instead of one per sequence.
    """

    lengths: tuple[int, ...] = ()
    pad_index: torch.Tensor | None = None  # [S, M], see `padding_indices`
    unpad_index: torch.Tensor | None = None  # [N]
    keys: ContextKeys | None = None  # where the row is cut over context-parallel ranks; the indices are then of queries

    @classmethod
    def from_lengths(
        cls, lengths: list[int], device: torch.device, thd: bool = False, share: ContextShare = WHOLE_ROW
    ) -> PackedSequences:
        """Parameters for sequences of these lengths (≥ 1), in this order. ``share``: the part of each that is here;
        lengths are those of the whole sequences, of whole chunks.

        ``thd``: for TransformerEngine's attention and Megatron's own rotary embedding, which tell sequences apart by
        their offsets alone; with "sbhd" they would take the row for one sequence and attend across its parts.
        """
        if thd:
            offsets = torch.tensor([0, *lengths], device=device).cumsum(0).to(torch.int32)
            longest = max(lengths)
            return cls("thd", offsets, offsets, max_seqlen_q=longest, max_seqlen_kv=longest, lengths=tuple(lengths))
        params = cls(qkv_format="sbhd", max_seqlen_q=max(lengths), max_seqlen_kv=max(lengths), lengths=tuple(lengths))
        if share.size > 1:
            params.keys = ContextKeys(lengths, share, device)
            lengths = params.keys.own
        if len(set(lengths)) > 1 and padding_pays(lengths):
            params.pad_index, params.unpad_index = padding_indices(lengths, max(lengths), device)
            if params.keys is not None:
                whole = params.keys.lengths
                params.keys.padding = padding_indices(whole, max(whole), device)
        return params


def padding_pays(lengths: Sequence[int]) -> bool:
    """Whether sequences of these lengths are better attended to in one padded call than one by one."""
    return len(lengths) * max(lengths) ** 2 <= _MAX_PADDED_WORK * sum(n * n for n in lengths)


def padding_indices(lengths: Sequence[int], width: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """[S, width] int64 into N, whose padding repeats the sequence's first token, and its inverse [N] into S·width."""
    size = torch.tensor(lengths)
    start = torch.cumsum(size, 0) - size
    column = torch.arange(width)
    valid = column < size[:, None]
    pad = torch.where(valid, start[:, None] + column, start[:, None])
    return pad.to(device), valid.flatten().nonzero().flatten().to(device)


class SDPACoreAttention(MegatronModule):
    """Drop-in for `DotProductAttention` in a layer spec. Causal self-attention, no dropout."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        *_: Any,
        softmax_scale: float | None = None,
        **__: Any,
    ):
        super().__init__(config=config)
        assert attn_mask_type in (AttnMaskType.causal, AttnMaskType.padding_causal), attn_mask_type
        self.softmax_scale = softmax_scale

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *_: Any,
        packed_seq_params: PackedSequences | None = None,
        **__: Any,
    ) -> torch.Tensor:
        """``query`` [N, b, H, D], ``key`` and ``value`` [N, b, H/groups, D] → [N, b, H·D]."""
        if packed_seq_params is not None and packed_seq_params.keys is not None:
            return self._attend_chunks(query, key, value, packed_seq_params)
        if packed_seq_params is None or len(packed_seq_params.lengths) == 1:
            return self._attend(*(x.permute(1, 2, 0, 3) for x in (query, key, value))).permute(2, 0, 1, 3).flatten(2)
        assert query.size(1) == 1, "packed sequences are one row"
        if packed_seq_params.pad_index is None and len(set(packed_seq_params.lengths)) == 1:
            whole = (x.unflatten(0, (-1, packed_seq_params.max_seqlen_q)).squeeze(2) for x in (query, key, value))
            out = self._attend(*(x.transpose(1, 2) for x in whole)).transpose(1, 2)
            return out.flatten(0, 1).flatten(1).unsqueeze(1)
        if packed_seq_params.pad_index is not None:
            index = (packed_seq_params.pad_index, packed_seq_params.unpad_index)
            padded = (Pad.apply(x.squeeze(1), *index).transpose(1, 2) for x in (query, key, value))  # [S, H, M, D]
            out = Unpad.apply(self._attend(*padded).transpose(1, 2), *index)
            return out.flatten(1).unsqueeze(1)
        pieces = [
            self._attend(*(x.permute(1, 2, 0, 3) for x in qkv)).permute(2, 0, 1, 3)
            for qkv in zip(*(x.split(packed_seq_params.lengths) for x in (query, key, value)), strict=True)
        ]
        return torch.cat(pieces).flatten(2)

    def _attend_chunks(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, packed: PackedSequences
    ) -> torch.Tensor:
        """As `forward` for this rank's chunks of every sequence, whose keys lie on all context-parallel ranks."""
        keys, width = packed.keys, query.size(-1)
        both, query = keys.gather(key, value), query.squeeze(1)
        if packed.pad_index is None and len(set(keys.lengths)) > 1:
            outputs = []
            for i, parts in enumerate(zip(query.split(keys.own), both.split(keys.lengths), strict=True)):
                q, kv = (x.transpose(0, 1).unsqueeze(0) for x in parts)
                out = keys.attend(q, *kv.split(width, dim=-1), self.softmax_scale, i)
                outputs.append(out.squeeze(0).transpose(0, 1))
            return torch.cat(outputs).flatten(1).unsqueeze(1)
        if packed.pad_index is None:
            q, kv = (x.unflatten(0, (len(keys.lengths), -1)).transpose(1, 2) for x in (query, both))
        else:
            q = Pad.apply(query, packed.pad_index, packed.unpad_index).transpose(1, 2)
            kv = Pad.apply(both, *keys.padding).transpose(1, 2)
        out = keys.attend(q, *kv.split(width, dim=-1), self.softmax_scale).transpose(1, 2)
        if packed.pad_index is None:
            return out.flatten(0, 1).flatten(1).unsqueeze(1)
        return Unpad.apply(out, packed.pad_index, packed.unpad_index).flatten(1).unsqueeze(1)

    def _attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        width, missing = value.size(-1), query.size(-1) - value.size(-1)
        if missing == 0:
            return attend(query, key, value, self.softmax_scale, is_causal=True)
        # Latent attention has narrower values, which no kernel takes but the one that keeps all scores.
        return attend(query, key, F.pad(value, (0, missing)), self.softmax_scale, is_causal=True)[..., :width]


class Pad(torch.autograd.Function):
    """[N, …] → [S, M, …]. A causal mask hides padding from real tokens, so padding has no gradient."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, pad_index: torch.Tensor, unpad_index: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(unpad_index)
        return x.index_select(0, pad_index.flatten()).unflatten(0, pad_index.shape)

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        return grad.flatten(0, 1).index_select(0, ctx.saved_tensors[0]), None, None


class Unpad(torch.autograd.Function):
    """[S, M, …] → [N, …], the adjoint of a padding with zeros."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, pad_index: torch.Tensor, unpad_index: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(unpad_index)
        ctx.padded = x.shape
        return x.flatten(0, 1).index_select(0, unpad_index)

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        padded = grad.new_zeros(ctx.padded)
        padded.view(-1, *grad.shape[1:]).index_copy_(0, ctx.saved_tensors[0], grad)
        return padded, None, None


class PackedRotaryEmbedding(torch.nn.Module):
    """Wraps Megatron's `RotaryEmbedding`: angles by each token's position in its own sequence.

    The learner sets ``position_ids`` [N] before every forward pass, because Megatron's model asks its rotary module
    for angles by total length alone.
    """

    def __init__(self, rotary: torch.nn.Module):
        super().__init__()
        self.rotary = rotary
        self.position_ids: torch.Tensor | None = None

    def get_rotary_seq_len(self, *args: object, **kwargs: object) -> int:
        return self.rotary.get_rotary_seq_len(*args, **kwargs)

    def forward(self, max_seq_len: int, **kwargs: object) -> torch.Tensor | tuple[torch.Tensor, float]:
        # Not this rank's two ends of one long sequence, which Megatron would cut out under context parallelism.
        angles = self.rotary(
            max_seq_len, packed_seq=True
        )  # [M, 1, 1, D]; of YaRN also what cosine and sine are scaled by
        angles, *scale = angles if isinstance(angles, tuple) else (angles,)
        angles = angles if self.position_ids is None else angles[self.position_ids]
        return (angles, *scale) if scale else angles


FLASH_ATTN = "flash-attn>=2.7.3,<2.8.4"  # what TransformerEngine 2.20 takes
CONTEXT_COMMUNICATION = "p2p"
"""Keys and values go round a ring of context-parallel ranks while attention to those that are here is computed."""
_SEQUENCES, _LENGTH = 4, 4096  # a row that stands for all: the choice depends on neither


def packed_attention(config: TransformerConfig) -> Literal["flash", "fused", "unfused"]:
    """What TransformerEngine selects in training for rows packed as the learner packs them."""
    from transformer_engine.pytorch.attention.dot_product_attention.utils import AttentionParams, get_attention_backend

    parameters = AttentionParams(
        qkv_dtype=config.params_dtype,
        qkv_layout="thd_thd_thd",
        batch_size=_SEQUENCES,
        num_heads=config.num_attention_heads // config.tensor_model_parallel_size,
        num_gqa_groups=config.num_query_groups // config.tensor_model_parallel_size,
        max_seqlen_q=_LENGTH,
        max_seqlen_kv=_LENGTH,
        num_tokens_q=_SEQUENCES * _LENGTH,
        num_tokens_kv=_SEQUENCES * _LENGTH,
        head_dim_qk=config.kv_channels,
        head_dim_v=config.kv_channels,
        attn_mask_type="padding_causal",
        window_size=(-1, 0),
        context_parallel=config.context_parallel_size > 1,
        cp_comm_type=CONTEXT_COMMUNICATION,
    )
    flash, _, fused, *_ = get_attention_backend(parameters)
    return "flash" if flash else "fused" if fused else "unfused"


def refuse_unfused_attention(config: TransformerConfig) -> None:
    """Raise `InputError` where TransformerEngine would store every score. fp32 is let through: it has no other, and
    none at all for parts of sequences."""
    if config.params_dtype == torch.float32 and config.context_parallel_size > 1:
        raise InputError(
            f"learner.parallel.context: {config.context_parallel_size} with learner.dtype or scoring.dtype fp32, "
            "for which TransformerEngine has no attention over parts of sequences; use bf16 or fp16, or uninstall "
            "transformer-engine for torch's attention"
        )
    if config.params_dtype == torch.float32 or packed_attention(config) != "unfused":
        return
    major, minor = torch.cuda.get_device_capability()
    raise InputError(
        f"TransformerEngine has no fused attention over packed sequences on this GPU (compute capability {major}."
        f"{minor}) and would store every attention score; install '{FLASH_ATTN}' (requirements.txt says how), or "
        "uninstall transformer-engine for torch's attention"
    )


Tensor = torch.Tensor


def _over_ranks(x: Tensor) -> Tensor:
    group = parallel_state.get_tensor_model_parallel_group()
    if group.size() > 1:
        dist.all_reduce(x, group=group)
    return x


class _WideNorm(torch.autograd.Function):
    """[N, w] → x / rms(x) · weight, where the rms is over ``width`` columns, of which this rank has w."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, width: int, eps: float) -> Tensor:
        square = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32).square_()
        scale = _over_ranks(square).div_(width).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        ctx.width = width
        return (x.float() * scale).mul_(weight).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """As `cpu_layers.rms_norm_backward`, but for the sum over ranks."""
        x, weight, scale = ctx.saved_tensors
        grad, x32, weight32 = grad.float(), x.float(), weight.float()
        product = grad * x32
        grad_weight = product.t() @ scale.view(-1)
        mean = _over_ranks((product @ weight32)[:, None]).mul_(scale.pow(3)).div_(ctx.width)
        grad_x = (grad * weight32).mul_(scale).addcmul_(x32, mean, value=-1.0)
        return grad_x.to(x.dtype), grad_weight.to(weight.dtype), None, None


class WideNorm(torch.nn.Module):
    """The norm of [N, b, …, D], where the dimensions behind the second are this rank's heads."""

    def __init__(self, config: TransformerConfig, num_heads: int) -> None:
        super().__init__()
        self.width, self.eps = config.kv_channels * num_heads, config.layernorm_epsilon
        own = self.width // config.tensor_model_parallel_size
        self.weight = torch.nn.Parameter(torch.ones(own, dtype=config.params_dtype))
        set_tensor_model_parallel_attributes(self.weight, True, 0, 1)

    def forward(self, x: Tensor) -> Tensor:
        return _WideNorm.apply(x.reshape(-1, self.weight.numel()), self.weight, self.width, self.eps).view(x.shape)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: Any = None) -> dict:
        weights = self.state_dict(prefix="", keep_vars=True)
        return make_sharded_tensors_for_checkpoint(weights, prefix, {"weight": 0}, sharded_offsets)


def use_wide_norms(model: GPTModel, norm: type[WideNorm] = WideNorm) -> None:
    """Give the layers of a model this norm of queries, and one of keys.

    Not in its specification: Megatron takes norms there only where `qk_layernorm` is set, and would then sum gradients
    of their weights over tensor-parallel ranks, which have different parts of them.
    """
    config = model.config
    for layer in model.decoder.layers:
        layer.self_attention.q_layernorm = norm(config, config.num_attention_heads)
        layer.self_attention.k_layernorm = norm(config, config.num_query_groups)
