"""The one table of parameter names: Hugging Face, Megatron in memory, Megatron's checkpoint on disk.

`shards` reads it for a model in memory, cut up by a layout. `conversion` reads it for a checkpoint on disk, where every
tensor is whole. Letters in shapes: those of `Architecture`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from megatron_rl.model.architecture import Architecture

EXTRA_STATE = "._extra_state"
EXPERT = "{e}"  # stands for the number of an expert: local in memory, global on disk and in Hugging Face names

Sharding = Literal["replicated", "row", "gated", "qkv", "vocab"]
"""How tensor-parallel ranks share a weight.

replicated: each holds all of it. row: columns of the matrix (Megatron's RowParallelLinear). gated: rows of the gate and
of the up projection, each by itself. qkv: rows, by groups of queries with their key and value. vocab: rows, padded to
what the ranks share evenly.
"""
Shapes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Weight:
    """A row of the table. Names stand below ``decoder.layers.{i}.`` and ``model.layers.{i}.``, or are whole."""

    hf: tuple[str, ...]
    memory: tuple[str, ...]  # the spellings of the local layers, TransformerEngine's, and grouped experts
    disk: tuple[str, ...]  # one key, or one for each Hugging Face name where Megatron stores the parts separately
    sharding: Sharding
    shapes: Callable[[Architecture], Shapes]  # of the Hugging Face tensors
    is_in: Callable[[Architecture, bool], bool] = lambda a, is_moe: True  # is_moe: of the layer


def _norm(a: Architecture) -> Shapes:
    return ((a.hidden_size,),)


def _head_norm(a: Architecture) -> Shapes:
    return ((a.head_dim,),)


def _qkv_rows(a: Architecture) -> tuple[int, int, int]:
    return a.num_heads * a.head_dim, a.num_kv_heads * a.head_dim, a.num_kv_heads * a.head_dim


def _gate_and_up(inner: int, a: Architecture) -> Shapes:
    return ((inner, a.hidden_size),) * 2


def _matrix(a: Architecture) -> Shapes:
    return ((a.vocab_size, a.hidden_size),)


_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
EMBEDDING = Weight(
    ("model.embed_tokens.weight",),
    ("embedding.word_embeddings.weight",),
    ("embedding.word_embeddings.weight",),
    "vocab",
    _matrix,
)
FINAL_NORM = Weight(
    ("model.norm.weight",),
    ("decoder.final_layernorm.weight",),
    ("decoder.final_layernorm.weight",),
    "replicated",
    _norm,
)
HEAD = Weight(("lm_head.weight",), ("output_layer.weight",), ("output_layer.weight",), "vocab", _matrix)
LAYER: tuple[Weight, ...] = (  # in the order of the forward pass
    Weight(
        ("input_layernorm.weight",),
        ("input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight"),
        ("self_attention.linear_qkv.layer_norm_weight",),
        "replicated",
        _norm,
    ),
    Weight(
        tuple(f"{name}.weight" for name in _QKV),
        ("self_attention.linear_qkv.weight",),
        ("self_attention.linear_qkv.weight",),
        "qkv",
        lambda a: tuple((rows, a.hidden_size) for rows in _qkv_rows(a)),
    ),
    Weight(
        tuple(f"{name}.bias" for name in _QKV),
        ("self_attention.linear_qkv.bias",),
        ("self_attention.linear_qkv.bias",),
        "qkv",
        lambda a: tuple((rows,) for rows in _qkv_rows(a)),
        lambda a, is_moe: a.qkv_bias,
    ),
    *(
        Weight(
            (f"self_attn.{which}_norm.weight",),
            (f"self_attention.{which}_layernorm.weight",),
            (f"self_attention.{which}_layernorm.weight",),
            "replicated",
            _head_norm,
            lambda a, is_moe: a.qk_layernorm,
        )
        for which in "qk"
    ),
    Weight(
        ("self_attn.o_proj.weight",),
        ("self_attention.linear_proj.weight",),
        ("self_attention.linear_proj.weight",),
        "row",
        lambda a: ((a.hidden_size, a.num_heads * a.head_dim),),
    ),
    Weight(
        ("post_attention_layernorm.weight",),
        ("pre_mlp_layernorm.weight",),
        ("pre_mlp_layernorm.weight",),
        "replicated",
        _norm,
        lambda a, is_moe: is_moe,
    ),
    Weight(
        ("post_attention_layernorm.weight",),
        ("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight"),
        ("mlp.linear_fc1.layer_norm_weight",),
        "replicated",
        _norm,
        lambda a, is_moe: not is_moe,
    ),
    Weight(
        ("mlp.gate.weight",),
        ("mlp.router.weight",),
        ("mlp.router.weight",),
        "replicated",
        lambda a: ((a.num_experts, a.hidden_size),),
        lambda a, is_moe: is_moe,
    ),
    Weight(
        ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
        ("mlp.linear_fc1.weight",),
        ("mlp.linear_fc1.weight_w", "mlp.linear_fc1.weight_v"),
        "gated",
        lambda a: _gate_and_up(a.ffn_hidden_size, a),
        lambda a, is_moe: not is_moe,
    ),
    Weight(
        ("mlp.down_proj.weight",),
        ("mlp.linear_fc2.weight",),
        ("mlp.linear_fc2.weight",),
        "row",
        lambda a: ((a.hidden_size, a.ffn_hidden_size),),
        lambda a, is_moe: not is_moe,
    ),
    Weight(
        ("mlp.experts.{e}.gate_proj.weight", "mlp.experts.{e}.up_proj.weight"),
        ("mlp.experts.local_experts.{e}.linear_fc1.weight", "mlp.experts.linear_fc1.weight{e}"),
        ("mlp.experts.experts.{e}.linear_fc1.weight_w", "mlp.experts.experts.{e}.linear_fc1.weight_v"),
        "gated",
        lambda a: _gate_and_up(a.moe_ffn_hidden_size, a),
        lambda a, is_moe: is_moe,
    ),
    Weight(
        ("mlp.experts.{e}.down_proj.weight",),
        ("mlp.experts.local_experts.{e}.linear_fc2.weight", "mlp.experts.linear_fc2.weight{e}"),
        ("mlp.experts.experts.{e}.linear_fc2.weight",),
        "row",
        lambda a: ((a.hidden_size, a.moe_ffn_hidden_size),),
        lambda a, is_moe: is_moe,
    ),
)


# -- in memory


def find_weight(parameter: str) -> tuple[Weight, int | None]:
    """The row of a parameter in memory, and the number of its expert among this rank's; None where it has none.

    ``parameter``: its name below ``decoder.layers.{i}.``, or whole for those outside of layers. Raises
    NotImplementedError where the table has no row for it.
    """
    for weight in (EMBEDDING, *LAYER, FINAL_NORM, HEAD):
        for spelling in weight.memory:
            match = re.fullmatch(re.escape(spelling).replace(re.escape(EXPERT), r"(\d+)"), parameter)
            if match:
                return weight, int(match[1]) if match.groups() else None
    raise NotImplementedError(f"no Hugging Face name for Megatron's parameter {parameter}")


# -- on disk


@dataclass(frozen=True)
class Stored:
    """One tensor of a Megatron checkpoint on disk, whole, in Hugging Face terms."""

    key: str
    hf_names: tuple[str, ...]
    hf_shapes: Shapes
    sharding: Sharding

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the Megatron tensor, without padding of the vocabulary."""
        return (sum(shape[0] for shape in self.hf_shapes), *self.hf_shapes[0][1:])


def stored_tensors(a: Architecture) -> list[Stored]:
    """Every weight of ``a`` in the order of the forward pass."""
    tensors = list(_stored(EMBEDDING, a))
    for layer, is_moe in enumerate(a.moe_layers):
        for experts, weights in _experts_together(a, is_moe):
            for expert in experts:
                for weight in weights:
                    tensors += _stored(weight, a, layer, expert)
    tensors += _stored(FINAL_NORM, a)
    return tensors if a.tie_embeddings else tensors + list(_stored(HEAD, a))


def _experts_together(a: Architecture, is_moe: bool) -> list[tuple[list[int | None], list[Weight]]]:
    """The rows of a layer: those without experts, then all rows of one expert, and so on."""
    rows = [weight for weight in LAYER if weight.is_in(a, is_moe)]
    of_experts = [weight for weight in rows if EXPERT in weight.hf[0]]
    return [([None], [w for w in rows if w not in of_experts]), (list(range(a.num_experts)), of_experts)]


def _stored(weight: Weight, a: Architecture, layer: int | None = None, expert: int | None = None) -> Iterator[Stored]:
    ours, theirs = ("", "") if layer is None else (f"decoder.layers.{layer}.", f"model.layers.{layer}.")
    keys = [ours + key.replace(EXPERT, str(expert)) for key in weight.disk]
    names = [theirs + name.replace(EXPERT, str(expert)) for name in weight.hf]
    shapes = weight.shapes(a)
    if len(keys) == 1:
        yield Stored(keys[0], tuple(names), shapes, weight.sharding)
    else:
        for key, name, shape in zip(keys, names, shapes, strict=True):
            yield Stored(key, (name,), (shape,), weight.sharding)


def extra_states(a: Architecture) -> list[str]:
    """Keys of the empty objects that Megatron's linear layers save, and want back when they load."""
    keys = []
    for layer in range(a.num_layers):
        modules = ["self_attention.linear_qkv", "self_attention.linear_proj"]
        parts = [f"experts.experts.{e}." for e in range(a.num_experts)] if a.moe_layers[layer] else [""]
        modules += [f"mlp.{part}linear_fc{i}" for part in parts for i in (1, 2)]
        keys += [f"decoder.layers.{layer}.{module}{EXTRA_STATE}/shard_0_1" for module in modules]
    return keys
