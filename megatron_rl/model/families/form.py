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
class Wrapper:
    """A model that also reads pictures, of which the family is the part that reads text (`text_config`)."""

    model_type: str
    hf_class: str
    prefix: str  # of the text model's tensors, in the place of "model."
    others: dict[str, Neutral | WithoutEffect]  # keys beside `text_config`


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
    layer_types: Callable[[int], list[str]] | None = lambda layers: ["full_attention"] * layers
    """From the number of layers to the only value of `layer_types` beside null. None: `relate` reads the key."""
    rope_theta: float = ROPE_DEFAULT_THETA  # default of the key, and of rope_scaling
    rope_scaling: Values | None = None
    rope_idle: tuple[str, ...] = ()  # keys of the rotary embedding that mean nothing for text
    rotary_fraction: float | None = None  # default of `partial_rotary_factor`; None: another value than 1 is refused
    ignored: dict[str, str] = field(default_factory=dict)
    """Beginnings of names of tensors that a checkpoint may hold beside the model's, and what they are."""
    wrapper: Wrapper | None = None
    known: dict[str, Values] = field(default_factory=dict)  # config.json of checkpoints by their name on the hub
