"""Attention with a sink in each head and, in some layers, over a window.

A sink is a trained score that takes part in the softmax and has no value. Here it is one more key, in front of the
others. Queries get a part that is one in the place of their head, and only this key has such a part: it gives each head
the head's own score. Its value is zero. PyTorch's attention then needs no mask, and sinks get a gradient. In 16 bits a
sink is rounded once more where the root of the head's width is no power of two (it is one for 64).

Over a window of w tokens, each piece of w queries sees the keys of its own piece and of the one before it. Work and
memory grow with the length of a sequence, and not with its square.

Shapes: S sequences, M longest of them, H heads, G key/value heads, P = H / G, D head width.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention, make_sharded_tensors_for_checkpoint

from megatron_rl.layers.attention import SDPACoreAttention, attend
from megatron_rl.layers.cpu_layers import GATE_LIMIT, UP_OFFSET
from megatron_rl.model.architecture import Architecture
from megatron_rl.model.decoder import Yarn

Tensor = torch.Tensor


def fields_with_sinks(a: Architecture) -> dict[str, Any]:
    """Fields of Megatron's configuration for the sinks, windows and activation of ``a``; empty where it has none."""
    fields: dict[str, Any] = {}
    if a.has_sinks:
        fields["softmax_type"] = "learnable"
    if any(a.windows):
        fields["window_size"] = (max(window for window in a.windows if window) - 1, 0)
        fields["window_attn_skip_freq"] = [int(window is not None) for window in a.windows]
    if a.clamped_gate:
        fields |= {"activation_func": quick_gelu, "activation_func_clamp_value": GATE_LIMIT}
        fields["glu_linear_offset"] = UP_OFFSET
    return fields


def state_yarn(config: TransformerConfig, yarn: Yarn) -> None:
    """Set what `GPTModel` reads of YaRN without latent attention, for which the configuration has no fields."""
    config.yarn_rotary_scaling_factor = float(yarn.factor)
    config.yarn_original_max_position_embeddings = yarn.original_max_position_embeddings
    config.yarn_beta_fast, config.yarn_beta_slow = yarn.beta_fast, yarn.beta_slow
    config.yarn_mscale, config.yarn_mscale_all_dim = yarn.mscale, yarn.mscale_all_dim
    config.yarn_correction_range_round_to_int = yarn.truncate


def attend_with_sinks(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, scale: float | None = None, window: int | None = None
) -> Tensor:
    """Causal attention of each token to the last ``window`` ones (None: to all), itself among them, and to a sink.

    Args:
        query: [S, H, M, D].
        key, value: [S, G, M, D].
        sinks: [H].

    Returns:
        [S, H, M, D]: Σⱼ exp(sⱼ)·vⱼ / (exp(sink) + Σⱼ exp(sⱼ)), where sⱼ is the product of query and key j times
        ``scale`` (None: 1 / √D).
    """
    (heads, length, width), groups = query.shape[1:], key.size(1)
    scale = width**-0.5 if scale is None else scale
    own = torch.eye(heads // groups, dtype=query.dtype, device=query.device).repeat(groups, 1)  # [H, P]
    query = torch.cat([query, own[:, None].expand(len(query), -1, length, -1)], dim=-1)
    key, value = (F.pad(x, (0, own.size(1))) for x in (key, value))
    sink = F.pad((sinks / scale).to(key.dtype).view(groups, 1, -1), (width, 0)).expand(len(key), -1, -1, -1)
    nothing = torch.zeros_like(sink)
    if window is None or length <= window:
        # A query in front, which nobody reads, keeps the diagonal of the causal mask in its place.
        first = query.new_zeros(len(query), heads, 1, query.size(-1))
        query, key, value = (torch.cat(pair, dim=2) for pair in ((first, query), (sink, key), (nothing, value)))
        return attend(query, key, value, scale, is_causal=True)[:, :, 1:, :width]
    query, key, value = (_in_pieces(x, window) for x in (query, key, value))
    pieces = query.size(2)
    mask = _window_mask(pieces, window, query.device).repeat(len(query), 1, 1, 1)
    key, value = (_with_piece_before(x, first) for x, first in ((key, sink), (value, nothing)))
    out = attend(query.transpose(1, 2).flatten(0, 1), key, value, scale, mask)
    return out.unflatten(0, (-1, pieces)).transpose(1, 2).flatten(2, 3)[:, :, :length, :width]


def _in_pieces(x: Tensor, window: int) -> Tensor:
    """[S, h, M, d] → [S, h, pieces, window, d]; zeros fill up the last piece."""
    return F.pad(x, (0, 0, 0, -x.size(2) % window)).unflatten(2, (-1, window))


def _with_piece_before(x: Tensor, first: Tensor) -> Tensor:
    """Keys [S, G, pieces, w, d] → [S · pieces, G, 1 + 2w, d]: ``first`` [S, G, 1, d], the piece before, and its own."""
    before = F.pad(x, (0, 0, 0, 0, 1, 0))[:, :, :-1]
    first = first[:, :, None].expand(-1, -1, x.size(2), -1, -1)
    return torch.cat([first, before, x], dim=3).transpose(1, 2).flatten(0, 1)


def _window_mask(pieces: int, window: int, device: torch.device) -> Tensor:
    """[pieces, 1, w, 1 + 2w], true where a query of a piece sees a key; nothing is before the first piece."""
    query = torch.arange(window, device=device)[:, None]
    key = torch.arange(-window, window, device=device)
    sees = (key <= query) & (key > query - window)
    sees = sees.expand(pieces, 1, -1, -1).clone()
    sees[0, :, :, :window] = False
    return F.pad(sees, (1, 0), value=True)


class SinkAttention(SDPACoreAttention):
    """Core attention with sinks; over a window in the layers that Megatron's configuration names."""

    def __init__(self, config: TransformerConfig, layer_number: int, *args: Any, **options: Any):
        super().__init__(config, layer_number, *args, **options)
        is_over_window = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)
        self.window = config.window_size[0] + 1 if is_over_window else None
        own_heads = config.num_attention_heads // config.tensor_model_parallel_size
        self.softmax_offset = torch.nn.Parameter(torch.zeros(own_heads, dtype=config.params_dtype))  # Megatron's name
        set_tensor_model_parallel_attributes(self.softmax_offset, True, 0, 1)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return attend_with_sinks(query, key, value, self.softmax_offset, self.softmax_scale, self.window)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: Any = None) -> dict:
        weights = self.state_dict(prefix="", keep_vars=True)
        return make_sharded_tensors_for_checkpoint(weights, prefix, {"softmax_offset": 0}, sharded_offsets)
