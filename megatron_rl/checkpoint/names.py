"""The tensors of a Megatron checkpoint on disk, in Hugging Face terms: one table, computed from the architecture.

`weights.WeightMap` is the like for parameters of a model in memory, cut up by a layout. On disk every tensor is whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megatron_rl.checkpoint.architecture import Architecture

EXTRA_STATE = "._extra_state"


@dataclass(frozen=True)
class Stored:
    """One tensor of a Megatron checkpoint, in Hugging Face terms."""

    key: str
    hf_names: tuple[str, ...]
    hf_shapes: tuple[tuple[int, ...], ...]
    kind: str = "plain"  # plain | qkv (per key/value group: queries, key, value) | vocab (rows padded at the end)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the Megatron tensor, without padding of the vocabulary."""
        return (sum(shape[0] for shape in self.hf_shapes), *self.hf_shapes[0][1:])


def stored_tensors(a: Architecture) -> list[Stored]:
    """Every weight of ``a`` in the order of the forward pass."""
    width = a.hidden_size
    matrix = ((a.vocab_size, width),)
    found = [Stored("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), matrix, "vocab")]
    for layer in range(a.num_layers):
        ours, theirs = f"decoder.layers.{layer}.", f"model.layers.{layer}."
        for key, names, shapes, kind in _layer(a, a.moe_layers[layer]):
            found.append(Stored(ours + key, tuple(theirs + name for name in names), shapes, kind))
    found.append(Stored("decoder.final_layernorm.weight", ("model.norm.weight",), ((width,),)))
    if not a.tie_embeddings:
        found.append(Stored("output_layer.weight", ("lm_head.weight",), matrix, "vocab"))
    return found


def _layer(a: Architecture, is_moe: bool) -> Iterator[tuple[str, tuple[str, ...], tuple[tuple[int, ...], ...], str]]:
    width, rows = a.hidden_size, (a.num_heads * a.head_dim, a.num_kv_heads * a.head_dim, a.num_kv_heads * a.head_dim)
    yield "self_attention.linear_qkv.layer_norm_weight", ("input_layernorm.weight",), ((width,),), "plain"
    names = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    yield (
        "self_attention.linear_qkv.weight",
        tuple(f"{name}.weight" for name in names),
        tuple((row, width) for row in rows),
        "qkv",
    )
    if a.qkv_bias:
        biases = tuple(f"{name}.bias" for name in names)
        yield "self_attention.linear_qkv.bias", biases, tuple((row,) for row in rows), "qkv"
    if a.qk_layernorm:
        for which in "qk":
            norm = (f"self_attn.{which}_norm.weight",)
            yield f"self_attention.{which}_layernorm.weight", norm, ((a.head_dim,),), "plain"
    yield "self_attention.linear_proj.weight", ("self_attn.o_proj.weight",), ((width, rows[0]),), "plain"
    norm = "pre_mlp_layernorm.weight" if is_moe else "mlp.linear_fc1.layer_norm_weight"
    yield norm, ("post_attention_layernorm.weight",), ((width,),), "plain"
    if is_moe:
        yield "mlp.router.weight", ("mlp.gate.weight",), ((a.num_experts, width),), "plain"
        for e in range(a.num_experts):
            yield from _gated_mlp(f"mlp.experts.experts.{e}.", f"mlp.experts.{e}.", width, a.moe_ffn_hidden_size)
    else:
        yield from _gated_mlp("mlp.", "mlp.", width, a.ffn_hidden_size)


def _gated_mlp(ours: str, theirs: str, width: int, inner: int) -> Iterator[tuple]:
    # Megatron stores its fused gate and up projections apart, as `_w` and `_v`: each shards by itself.
    yield f"{ours}linear_fc1.weight_w", (f"{theirs}gate_proj.weight",), ((inner, width),), "plain"
    yield f"{ours}linear_fc1.weight_v", (f"{theirs}up_proj.weight",), ((inner, width),), "plain"
    yield f"{ours}linear_fc2.weight", (f"{theirs}down_proj.weight",), ((width, inner),), "plain"


def extra_states(a: Architecture) -> list[str]:
    """Keys of the empty objects that Megatron's linear layers save, and want back when they load."""
    keys = []
    for layer in range(a.num_layers):
        modules = ["self_attention.linear_qkv", "self_attention.linear_proj"]
        parts = [f"experts.experts.{e}." for e in range(a.num_experts)] if a.moe_layers[layer] else [""]
        modules += [f"mlp.{part}linear_fc{i}" for part in parts for i in (1, 2)]
        keys += [f"decoder.layers.{layer}.{module}{EXTRA_STATE}/shard_0_1" for module in modules]
    return keys
