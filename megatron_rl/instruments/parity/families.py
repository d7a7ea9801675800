"""What each family takes for granted where its config.json does not say it, for the definition in float64.

This is on purpose not read from `megatron_rl.model.families`, whose files the learner follows: a fault there is found
as well. A family is added by a row of `FAMILIES`. Where it has operators that no other family has, it needs a class of
evaluation too (`evaluation_of` in `delta_net`), and perhaps taps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

Config = dict[str, Any]


@dataclass(frozen=True)
class Family:
    """``eps``: of norms. ``head_norms``: norms of queries and keys: of each head, of each head where `use_qk_norm` says
    so, of all heads of a token together, or none. ``turned``: share of a head that is turned.

    Of experts: ``experts``: the names of their number in config.json; none: a model without. ``top``: how many a token
    has. ``renormalised``: whether their weights add up to one, where `norm_topk_prob` does not say it. ``sigmoid``:
    whether a sigmoid scores them, and not a softmax. ``scale``: of their weights. ``dense``: layers
    in front that have none; None: `decoder_sparse_step` and `mlp_only_layers` say it. ``shared``: the name of the
    expert that every token passes. ``groups``: of experts, and of how many of them a token may choose.
    """

    eps: float = 1e-6
    head_norms: Literal["each", "use_qk_norm", "wide"] | None = None
    turned: float = 1.0
    is_latent: bool = False
    has_delta_nets: bool = False
    """Beside attention with a gate; its norms are those of layers, and all of these are centred at zero."""
    experts: tuple[str, ...] = ()
    top: int = 8
    renormalised: bool = False
    sigmoid: bool = False
    scale: float = 1.0
    dense: int | None = None
    shared: str | None = None
    groups: tuple[int, int] = (1, 1)
    names: tuple[tuple[str, str], ...] = ()
    """Parts of weights' names in other families, and what stands for them here."""
    packed: str | None = None
    """The layer that has queries, keys and values in one, behind each other; None: there are three."""


_AMONG_DELTA_NETS: dict[str, Any] = {
    "head_norms": "each",
    "turned": 0.25,
    "has_delta_nets": True,
    "experts": ("num_experts",),
    "renormalised": True,
    "shared": "shared_expert",
}
FAMILIES: dict[str, Family] = {
    "qwen3_moe": Family(head_norms="each", experts=("num_local_experts", "num_experts")),
    "qwen3_next": Family(**_AMONG_DELTA_NETS, top=10),
    "qwen3_5_moe_text": Family(**_AMONG_DELTA_NETS),
    "qwen2_moe": Family(experts=("num_experts",), top=4, shared="shared_expert"),
    "glm4_moe": Family(
        eps=1e-5,
        head_norms="use_qk_norm",
        turned=0.5,
        experts=("num_local_experts", "n_routed_experts"),
        sigmoid=True,
        dense=1,
        shared="shared_experts",
    ),
    "deepseek_v3": Family(
        is_latent=True,
        experts=("num_local_experts", "n_routed_experts"),
        sigmoid=True,
        scale=2.5,
        dense=3,
        shared="shared_experts",
        groups=(8, 4),
    ),
    "bailing_moe": Family(
        head_norms="use_qk_norm",
        turned=0.5,
        experts=("num_experts",),
        sigmoid=True,
        scale=2.5,
        dense=1,
        shared="shared_experts",
        groups=(8, 4),
        names=(
            ("embed_tokens", "word_embeddings"),
            ("self_attn.o_proj", "attention.dense"),
            ("self_attn.q_norm", "attention.query_layernorm"),
            ("self_attn.k_norm", "attention.key_layernorm"),
            ("e_score_correction_bias", "expert_bias"),
        ),
        packed="attention.query_key_value",
    ),
    "olmoe": Family(eps=1e-5, head_norms="wide", experts=("num_local_experts", "num_experts")),
    "qwen3": Family(head_norms="each"),
    "qwen2": Family(),
    "llama": Family(),
}


def has_experts(family: Family, config: Config, layer: int) -> bool:
    if not family.experts:
        return False
    if family.dense is not None:
        return layer >= config.get("first_k_dense_replace", family.dense)
    step, dense = config.get("decoder_sparse_step", 1), config.get("mlp_only_layers") or []
    return layer not in dense and (layer + 1) % step == 0
