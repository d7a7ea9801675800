"""What a family of models is: one object, which a file beside this one fills in for each family. No torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from megatron_rl.model.families.keys import ROPE_DEFAULT_THETA, Implemented, Neutral, WithoutEffect
from megatron_rl.model.families.weights import EMBEDDING, Weight

Values = dict[str, Any]


def shape(
    layers: int,
    hidden: int,
    ffn: int,
    heads: int,
    kv_heads: int,
    vocab: int,
    longest: int,
    theta: float,
    *,
    tied: bool = False,
    eps: float = 1e-6,
    **more: Any,
) -> Values:
    """The keys that every config.json has, and ``more``."""
    return {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        "max_position_embeddings": longest,
        "rms_norm_eps": eps,
        "rope_theta": theta,
        "tie_word_embeddings": tied,
        **more,
    }


@dataclass(frozen=True)
class Family:
    """All that is known of a family. `families.FAMILIES` holds each under its ``model_type``."""

    model_type: str  # in config.json
    hf_class: str  # what `architectures` of config.json has to name: vLLM goes by it
    implemented: dict[str, Implemented]  # the keys that the learner follows, but for the rotary embedding's
    layer: tuple[Weight, ...]  # weights of a layer in the order of the forward pass
    embedding: Weight = EMBEDDING
    others: dict[str, Neutral | WithoutEffect] = field(default_factory=dict)  # keys that it reads in its own way
    features: Callable[[Values], Values] = lambda values: {}
    """From the values of implemented keys to the fields of `Architecture` that a plain dense model leaves at rest."""
    relate: Callable[[Values, Values], list[str]] = lambda config, values: []
    """What keys say together: takes config.json and the values of implemented keys, fills in values that follow from
    others, and returns what is wrong."""
    register: Callable[[], None] = lambda: None  # adds its classes to transformers, where it has none
    layer_types: Callable[[int], list[str]] = lambda layers: ["full_attention"] * layers
    """From the number of layers to the only value of `layer_types` beside null."""
    rope_theta: float = ROPE_DEFAULT_THETA  # default of the key, and of rope_scaling
    rope_scaling: Values | None = None
    rotary_fraction: float | None = None  # default of `partial_rotary_factor`; None: another value than 1 is refused
    known: dict[str, Values] = field(default_factory=dict)  # config.json of checkpoints by their name on the hub
