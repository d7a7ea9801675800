"""The weights of a layer, a row each: their names in Hugging Face checkpoints, in Megatron's memory and on its disk.

A family lists the rows that its layers have. Letters in shapes: those of `Architecture`. No torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

from megatron_rl.model.decoder import Architecture, LatentAttention, LinearAttention

EXPERT = "{e}"  # stands for the number of an expert: local in memory, global on disk and in Hugging Face names

Sharding = Literal[
    *("replicated", "row", "column", "gated", "qkv", "packed_qkv", "vocab", "transposed", "interleaved"),
    *("delta", "delta_by_head"),
]
"""How tensor-parallel ranks share a weight.

replicated: each holds all of it. row: columns of the matrix (Megatron's RowParallelLinear). column: rows of the matrix
(ColumnParallelLinear). gated: rows of the gate and of the up projection, each by itself. qkv: rows, by groups of
queries with their key and value. packed_qkv: likewise, and Hugging Face has all queries, keys and values in one tensor,
behind each other. vocab: rows, padded to what the ranks share evenly. transposed: each holds all of it, and Hugging
Face has rows and columns the other way round. interleaved: likewise, and Hugging Face has the gate's columns at even
places and the up projection's at odd ones. delta: rows of the sections of `LinearAttention`, each by itself; Hugging
Face's tensors hold them behind each other. delta_by_head: likewise, and Hugging Face has for each head of keys the rows
of four sections behind each other, and those of the other two.
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
    linear: bool | None = None  # of layers with a gated delta net (True) or with attention (False) alone
    in_fp32: bool = False  # goes on as it is, whatever the weights are rounded to
    is_buffer: bool = False  # likewise, and not trained

    def is_of(self, a: Architecture, layer: int) -> bool:
        """Whether ``layer`` has it."""
        return self.is_in(a, a.moe_layers[layer]) and self.linear in (None, a.is_linear(layer))


def _norm(a: Architecture) -> Shapes:
    return ((a.hidden_size,),)


def qkv_rows(a: Architecture) -> tuple[int, int, int]:
    """The rows of all queries (with their gates, head by head), of all keys and of all values."""
    return (1 + a.output_gate) * a.num_heads * a.head_dim, a.num_kv_heads * a.head_dim, a.num_kv_heads * a.head_dim


def _matrix(a: Architecture) -> Shapes:
    return ((a.vocab_size, a.hidden_size),)


def row(
    hf: str, memory: str, sharding: Sharding, shapes: Callable[[Architecture], Shapes], disk: str = "", **more: Any
) -> Weight:
    """A row from texts of names, with blanks between them. ``disk``: where not given, the last one of ``memory``."""
    spellings = tuple(memory.split())
    return Weight(tuple(hf.split()), spellings, tuple(disk.split()) or spellings[-1:], sharding, shapes, **more)


OF_EXPERTS = {"is_in": lambda a, is_moe: is_moe}
OF_DENSE = {"is_in": lambda a, is_moe: not is_moe}

# -- outside of layers

EMBEDDING = row("model.embed_tokens.weight", "embedding.word_embeddings.weight", "vocab", _matrix)
FINAL_NORM = row("model.norm.weight", "decoder.final_layernorm.weight", "replicated", _norm)
HEAD = row("lm_head.weight", "output_layer.weight", "vocab", _matrix)

# -- attention

INPUT_NORM = row(
    "input_layernorm.weight",
    "input_layernorm.weight self_attention.linear_qkv.layer_norm_weight",
    "replicated",
    _norm,
)
QKV = row(
    "self_attn.q_proj.weight self_attn.k_proj.weight self_attn.v_proj.weight",
    "self_attention.linear_qkv.weight",
    "qkv",
    lambda a: tuple((rows, a.hidden_size) for rows in qkv_rows(a)),
)
QKV_BIAS = row(
    "self_attn.q_proj.bias self_attn.k_proj.bias self_attn.v_proj.bias",
    "self_attention.linear_qkv.bias",
    "qkv",
    lambda a: tuple((rows,) for rows in qkv_rows(a)),
    is_in=lambda a, is_moe: a.qkv_bias,
)


def _norms_of_heads(sharding: Sharding, width: Callable[[Architecture, int], int], **more: Any) -> tuple[Weight, ...]:
    """The norms of queries and of keys. ``width``: from the number of the two."""
    return tuple(
        row(
            f"self_attn.{which}_norm.weight",
            f"self_attention.{which}_layernorm.weight",
            sharding,
            lambda a, part=part: ((width(a, part),),),
            **more,
        )
        for part, which in enumerate("qk")
    )


Q_NORM, K_NORM = _norms_of_heads("replicated", lambda a, part: a.head_dim, is_in=lambda a, is_moe: a.qk_layernorm)
WIDE_Q_NORM, WIDE_K_NORM = _norms_of_heads("column", lambda a, part: qkv_rows(a)[part])
"""Over all heads of a token: each rank holds the part of its heads."""
ATTENTION_OUTPUT = row(
    "self_attn.o_proj.weight",
    "self_attention.linear_proj.weight",
    "row",
    lambda a: ((a.hidden_size, a.num_heads * a.head_dim),),
)
OUTPUT_BIAS = row("self_attn.o_proj.bias", "self_attention.linear_proj.bias", "replicated", _norm)
SINKS = row("self_attn.sinks", "self_attention.core_attention.softmax_offset", "column", lambda a: ((a.num_heads,),))
"""A score for each head that takes part in the softmax and has no value."""


def named(weight: Weight, *hf: str) -> Weight:
    """``weight`` under other names in Hugging Face checkpoints."""
    return replace(weight, hf=hf)


def packed_attention(qkv: str, output: str, norms: tuple[str, str]) -> tuple[Weight, ...]:
    """The rows of attention below ``attention``, with queries, keys and values in one tensor. Hugging Face's names."""
    packed = replace(
        named(QKV, f"attention.{qkv}.weight"),
        sharding="packed_qkv",
        shapes=lambda a: ((sum(qkv_rows(a)), a.hidden_size),),
    )
    q_norm, k_norm = (named(w, f"attention.{name}.weight") for w, name in zip((Q_NORM, K_NORM), norms, strict=True))
    return INPUT_NORM, packed, q_norm, k_norm, named(ATTENTION_OUTPUT, f"attention.{output}.weight")


# -- gated delta nets


def _delta(name: str, memory: str, sharding: Sharding, shapes: Callable[[LinearAttention, int], Shapes], **more: Any):
    """A row below ``linear_attn`` and ``self_attention``. ``shapes``: from the widths and the hidden size."""
    names = " ".join(f"linear_attn.{part}" for part in name.split())
    return row(
        names, f"self_attention.{memory}", sharding, lambda a: shapes(a.linear, a.hidden_size), linear=True, **more
    )


DELTA_SECTIONS = ("query", "key", "value", "z", "beta", "alpha")  # Megatron's names on disk


def _on_disk(name: str, sections: int) -> str:
    return " ".join(f"self_attention.{name}.weight.{section}" for section in DELTA_SECTIONS[:sections])


def delta_net(names: str, sharding: Sharding, shapes: Callable[[LinearAttention, int], Shapes]) -> tuple[Weight, ...]:
    """The rows of a gated delta net. ``names``, ``sharding`` and ``shapes``: of the projection into it."""
    return (
        row(
            "input_layernorm.weight",
            "input_layernorm.weight self_attention.in_proj.layer_norm_weight",
            "replicated",
            _norm,
            linear=True,
        ),
        _delta(names, "in_proj.weight", sharding, shapes, disk=_on_disk("in_proj", 6)),
        _delta(
            "conv1d.weight",
            "conv1d.weight",
            "delta",
            lambda m, h: ((sum(m.sections[:3]), 1, m.kernel),),
            disk=_on_disk("conv1d", 3),
        ),
        _delta("dt_bias", "dt_bias", "column", lambda m, h: ((m.value_heads,),)),
        _delta("A_log", "A_log", "column", lambda m, h: ((m.value_heads,),), in_fp32=True),
        _delta("norm.weight", "out_norm.weight", "replicated", lambda m, h: ((m.value_width,),)),
        _delta("out_proj.weight", "out_proj.weight", "row", lambda m, h: ((h, m.value_heads * m.value_width),)),
    )


# -- latent attention


def _latent(
    name: str, memory: str, shape: Callable[[LatentAttention, Architecture], tuple[int, ...]], **more: Any
) -> Weight:
    """A row of latent attention below ``self_attn`` and ``self_attention``, cut by heads where it has any."""
    spellings = " ".join(f"self_attention.{spelling}" for spelling in memory.split())
    return row(f"self_attn.{name}", spellings, more.pop("sharding", "column"), lambda a: (shape(a.latent, a),), **more)


def _queries(m: LatentAttention, a: Architecture) -> int:
    return a.num_heads * (m.plain_width + m.rotary_width)


_WITH_RANK = {"is_in": lambda a, is_moe: a.latent.query_rank is not None}
_WITHOUT = {"is_in": lambda a, is_moe: a.latent.query_rank is None}
LATENT_ATTENTION = (
    row("input_layernorm.weight", "input_layernorm.weight", "replicated", _norm),
    _latent("q_proj.weight", "linear_q_proj.weight", lambda m, a: (_queries(m, a), a.hidden_size), **_WITHOUT),
    _latent("q_a_proj.weight", "linear_q_down_proj.weight", lambda m, a: (m.query_rank, a.hidden_size), **_WITH_RANK),
    _latent(
        "q_a_layernorm.weight",
        "q_layernorm.weight linear_q_up_proj.layer_norm_weight",
        lambda m, a: (m.query_rank,),
        sharding="replicated",
        **_WITH_RANK,
    ),
    _latent("q_b_proj.weight", "linear_q_up_proj.weight", lambda m, a: (_queries(m, a), m.query_rank), **_WITH_RANK),
    _latent(
        "kv_a_proj_with_mqa.weight",
        "linear_kv_down_proj.weight",
        lambda m, a: (m.rank + m.rotary_width, a.hidden_size),
    ),
    _latent(
        "kv_a_layernorm.weight",
        "kv_layernorm.weight linear_kv_up_proj.layer_norm_weight",
        lambda m, a: (m.rank,),
        sharding="replicated",
    ),
    _latent(
        "kv_b_proj.weight",
        "linear_kv_up_proj.weight",
        lambda m, a: (a.num_heads * (m.plain_width + m.value_width), m.rank),
    ),
    _latent(
        "o_proj.weight",
        "linear_proj.weight",
        lambda m, a: (a.hidden_size, a.num_heads * m.value_width),
        sharding="row",
    ),
)
"""The down projections are cut over ranks in Megatron's own layers, and whole in TransformerEngine's."""

# -- a layer without experts

MLP_NORM = row(
    "post_attention_layernorm.weight",
    "pre_mlp_layernorm.weight mlp.linear_fc1.layer_norm_weight",
    "replicated",
    _norm,
    **OF_DENSE,
)


def _gate_and_up(hf: str, memory: str, disk: str, width: Callable[[Architecture], int], when: dict[str, Any]) -> Weight:
    """Gate and up projection, which Megatron has in one tensor in memory, and in two on disk."""
    names = f"{hf}.gate_proj.weight {hf}.up_proj.weight"
    return row(
        names, memory, "gated", lambda a: ((width(a), a.hidden_size),) * 2, f"{disk}.weight_w {disk}.weight_v", **when
    )


MLP_GATE_AND_UP = _gate_and_up("mlp", "mlp.linear_fc1.weight", "mlp.linear_fc1", lambda a: a.ffn_hidden_size, OF_DENSE)
MLP_DOWN = row(
    "mlp.down_proj.weight",
    "mlp.linear_fc2.weight",
    "row",
    lambda a: ((a.hidden_size, a.ffn_hidden_size),),
    **OF_DENSE,
)

# -- a layer with experts

EXPERTS_NORM = row("post_attention_layernorm.weight", "pre_mlp_layernorm.weight", "replicated", _norm, **OF_EXPERTS)
ROUTER = row(
    "mlp.gate.weight",
    "mlp.router.weight",
    "replicated",
    lambda a: ((a.num_experts, a.hidden_size),),
    **OF_EXPERTS,
)
EXPERT_GATE_AND_UP = _gate_and_up(
    "mlp.experts.{e}",
    "mlp.experts.local_experts.{e}.linear_fc1.weight mlp.experts.linear_fc1.weight{e}",
    "mlp.experts.experts.{e}.linear_fc1",
    lambda a: a.moe_ffn_hidden_size,
    OF_EXPERTS,
)
EXPERT_DOWN = row(
    "mlp.experts.{e}.down_proj.weight",
    "mlp.experts.local_experts.{e}.linear_fc2.weight mlp.experts.linear_fc2.weight{e}",
    "row",
    lambda a: ((a.hidden_size, a.moe_ffn_hidden_size),),
    "mlp.experts.experts.{e}.linear_fc2.weight",
    **OF_EXPERTS,
)


def shared_experts(name: str) -> tuple[Weight, Weight]:
    """The rows of the experts that every token passes; Megatron keeps them as one. ``name``: Hugging Face's."""
    layers = "mlp.shared_experts.linear_fc1", "mlp.shared_experts.linear_fc2"
    gate_and_up = _gate_and_up(
        f"mlp.{name}", f"{layers[0]}.weight", layers[0], lambda a: a.shared_ffn_hidden_size, OF_EXPERTS
    )
    down = row(
        f"mlp.{name}.down_proj.weight",
        f"{layers[1]}.weight",
        "row",
        lambda a: ((a.hidden_size, a.shared_ffn_hidden_size),),
        **OF_EXPERTS,
    )
    return gate_and_up, down


ROUTER_BIAS = row(
    "mlp.gate.e_score_correction_bias",
    "mlp.router.expert_bias",
    "replicated",
    lambda a: ((a.num_experts,),),
    in_fp32=True,
    is_buffer=True,
    **OF_EXPERTS,
)
"""Added to the scores where experts are chosen, not to their weights."""

ROUTER_WITH_BIAS = (
    named(ROUTER, "mlp.router.weight"),
    row("mlp.router.bias", "mlp.router.bias", "replicated", lambda a: ((a.num_experts,),)),
)
"""The bias is trained, and part of the scores."""


def _of_experts(name: str, layer: str, sharding: Sharding, shape: Callable[[Architecture], tuple[int, ...]]) -> Weight:
    """A row of the experts whose tensors a checkpoint holds in one for all (see `HFFolder`)."""
    parts = ("_w", "_v") if sharding == "interleaved" else ("",)
    disk = " ".join(f"mlp.experts.experts.{{e}}.{layer}{part}" for part in parts)
    return row(
        f"mlp.experts.{{e}}.{name}", f"mlp.experts.local_experts.{{e}}.{layer}", sharding, lambda a: (shape(a),), disk
    )


EXPERTS_IN_ONE = (
    _of_experts(
        "gate_up_proj", "linear_fc1.weight", "interleaved", lambda a: (a.hidden_size, 2 * a.moe_ffn_hidden_size)
    ),
    _of_experts("gate_up_proj_bias", "linear_fc1.bias", "interleaved", lambda a: (2 * a.moe_ffn_hidden_size,)),
    _of_experts("down_proj", "linear_fc2.weight", "transposed", lambda a: (a.moe_ffn_hidden_size, a.hidden_size)),
    _of_experts("down_proj_bias", "linear_fc2.bias", "replicated", lambda a: (a.hidden_size,)),
)

SHARED_EXPERT_GATE = row(
    "mlp.shared_expert_gate.weight",
    "mlp.shared_experts.gate_weight",
    "replicated",
    lambda a: ((1, a.hidden_size),),
    **OF_EXPERTS,
)

ATTENTION = (INPUT_NORM, QKV, QKV_BIAS, Q_NORM, K_NORM, ATTENTION_OUTPUT)
DENSE_LAYER = (*ATTENTION, MLP_NORM, MLP_GATE_AND_UP, MLP_DOWN)
"""A layer of a model without experts."""
MOE_BLOCK = (
    EXPERTS_NORM,
    MLP_NORM,
    ROUTER,
    MLP_GATE_AND_UP,
    MLP_DOWN,
    EXPERT_GATE_AND_UP,
    EXPERT_DOWN,
)
"""Behind the attention of a model with experts; some of its layers may have none."""
MOE_LAYER = (*ATTENTION, *MOE_BLOCK)
ATTENTION_AMONG_DELTA_NETS = tuple(replace(weight, linear=False) for weight in ATTENTION)
