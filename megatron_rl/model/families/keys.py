"""Keys of config.json: what values one may have, what is done with it, and the keys that families share.

A key is one of three things. It is implemented: the learner computes what it says. It has no effect on the function
that the model computes (`WithoutEffect`, with the reason). Or it changes the function in a way that the learner, or
vLLM, does not follow: then only its neutral values pass (`Neutral`).

Read in transformers 5.19 and vLLM 0.30; tests/unit/model/test_architecture.py walks over both and fails
where a key of theirs is not listed here or in a family's file. No torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

REQUIRED = object()  # in the place of a default: the key has to be there


@dataclass(frozen=True)
class Kind:
    """What values a key may have. ``words``: for a message."""

    words: str
    fits: Callable[[Any], bool]


@dataclass(frozen=True)
class Implemented:
    """A key that the learner follows. ``default``: transformers' own where the key is absent, or `REQUIRED`."""

    kind: Kind
    default: Any


@dataclass(frozen=True)
class Neutral:
    """A key that only has to be at rest. ``values``: those that change nothing. ``reason``: what others would do."""

    values: tuple[Any, ...]
    reason: str


@dataclass(frozen=True)
class WithoutEffect:
    """A key that does not change the function. ``kind``: what transformers accepts."""

    kind: Kind
    reason: str


def whole(low: int, high: int) -> Kind:
    return Kind(f"a whole number from {low} to {high}", lambda value: type(value) is int and low <= value <= high)


def real(low: float, high: float, words: str) -> Kind:
    return Kind(words, lambda value: type(value) in (int, float) and math.isfinite(value) and low <= value <= high)


def only(value: Any, why: str) -> Kind:
    """The one ``value``, of its own type. ``why``: a clause for the message."""
    return Kind(f"{value!r}, {why}", lambda given: type(given) is type(value) and given == value)


FIXED_IN_VLLM = "which vLLM has whatever it says"  # the reason of `only` where vLLM does not read a key


def or_null(kind: Kind) -> Kind:
    return Kind(f"{kind.words}, or null", lambda value: value is None or kind.fits(value))


YES_OR_NO = Kind("true or false", lambda value: type(value) is bool)
TEXT = Kind("text", lambda value: type(value) is str)
ANYTHING = Kind("anything", lambda value: True)
LAYERS, WIDTH, HEADS, EXPERTS = whole(1, 1024), whole(1, 2**20), whole(1, 4096), whole(1, 4096)
VOCABULARY, POSITIONS = whole(1, 2**24), whole(1, 2**27)
TOKEN = or_null(whole(-(2**24), 2**24))
EPSILON = Kind("a number above 0 and below 1", lambda value: type(value) is float and 0 < value < 1)
SHARE = Kind("a number from 0.0 to 1.0", lambda value: type(value) is float and 0 <= value <= 1)
OBJECT = Kind("an object of keys", lambda value: type(value) is dict)
FRACTION = real(0, 1, "a number from 0 to 1")
NUMBER = real(0, 1e12, "a number that is not negative")
THETA = Kind("a number above 0", lambda value: NUMBER.fits(value) and value > 0)
SCALE = Kind("a number above 0 with a decimal point", lambda value: type(value) is float and THETA.fits(value))
DTYPE = Kind(
    "float32, float16, bfloat16 or float64", lambda value: value in ("float32", "float16", "bfloat16", "float64")
)
LAYER_NUMBERS = Kind(
    "a list of numbers of layers, from 0 to num_hidden_layers − 1",
    lambda value: type(value) is list and all(type(item) is int and 0 <= item < 1024 for item in value),
)
TOKENS = Kind(
    "the number of a token, or a list of them",
    lambda value: all(type(t) is int and t >= 0 for t in (value if type(value) is list else [value])) and value != [],
)

IN_ALL = {
    "vocab_size": Implemented(VOCABULARY, REQUIRED),
    "hidden_size": Implemented(WIDTH, REQUIRED),
    "intermediate_size": Implemented(WIDTH, REQUIRED),
    "num_hidden_layers": Implemented(LAYERS, REQUIRED),
    "num_attention_heads": Implemented(HEADS, REQUIRED),
    "rms_norm_eps": Implemented(EPSILON, 1e-6),
    "tie_word_embeddings": Implemented(YES_OR_NO, False),
    "eos_token_id": Implemented(or_null(TOKENS), None),
}
"""Keys that the learner follows in every family, with transformers' usual defaults."""
# Read together, by `rope_of`.
ROPE_KEYS = ("rope_parameters", "rope_scaling", "rope_theta")
ROPE_DEFAULT_THETA = 10000.0

_NO_BIAS = "biases that the learner, or vLLM, does not add"
WINDOW = "attention over a window; the learner attends to all positions"
OTHER_ROPE = "another rotary embedding than the learner's"
_OTHER_NAME = "vLLM reads it in the place of a key that the learner reads"
_OTHER_MODEL = "parts of a model that the learner does not have"
_QUANTIZED = "weights in another format; the learner reads 16 or 32 bit ones. Use the unquantized checkpoint"
_LATER = "attention to later tokens"
_NO_EXPERTS = "experts, which this model does not have"
LENGTH = "vLLM takes it for the longest sequence"

# Keys at rest in one way, with what other values would do.
_AT_REST: tuple[tuple[str, tuple[Any, ...], str], ...] = (
    ("hidden_act", ("silu",), "another activation; the learner and vLLM have SiLU"),
    ("attention_bias mlp_bias qkv_bias bias", (False,), _NO_BIAS),
    ("use_sliding_window", (False,), WINDOW),
    ("attention_chunk_size rswa_window dual_chunk_attention_config", (None,), WINDOW),
    ("is_causal", (True,), _LATER),
    ("use_bidirectional_attention", (None, False), _LATER),
    ("is_mm_prefix_lm", (False,), _LATER),
    ("qk_norm", (False,), "norms that the learner does not have in this model"),
    ("logit_scale", (1, None), "scaled logits"),
    ("head_dtype", (None,), "vLLM computes the head in it; use precision.fp32_head"),
    ("shared_expert_intermediate_size", (0,), "a shared expert, which the learner does not have"),
    ("position_embedding_type", (None, "rope", "rotary"), OTHER_ROPE),
    ("partial_rotary_factor rotary_pct rotary_emb_fraction", (1, None), OTHER_ROPE),
    ("original_max_position_embeddings", (8192, None), OTHER_ROPE),
    ("rotary_emb_base mrope_section xdrope_section", (None,), OTHER_ROPE),
    ("quantization_config compression_config", (None,), _QUANTIZED),
    ("n_head_kv num_kv_heads multi_query_group_num num_attention_groups", (None,), _OTHER_NAME),
    ("num_experts_per_token top_k_experts moe_topk moe_top_k", (None, 0), _OTHER_NAME),
    ("num_experts num_local_experts num_experts_per_tok moe_num_experts n_routed_experts", (None, 0), _NO_EXPERTS),
    ("is_encoder_decoder", (False,), _OTHER_MODEL),
    ("per_layer_config block_configs layers_block_type attn_type_list attn_config", (None,), _OTHER_MODEL),
    ("compress_ratios hidden_size_per_head kv_lora_rank qk_rope_head_dim qk_nope_head_dim", (None,), _OTHER_MODEL),
    ("text_config decoder generator text_encoder encoder encoder_config vision_config", (None,), _OTHER_MODEL),
    ("thinker_config model embedding_size canvas_length", (None,), _OTHER_MODEL),
    ("sub_configs attribute_map", (), "names of the class that transformers makes of the file"),
    ("projection_dim projection_size", (None,), _OTHER_MODEL),
    ("mamba_chunk_size chunk_size engram_layer_ids index_topk target_layer_count", (None,), _OTHER_MODEL),
)
NEUTRAL = {key: Neutral(values, reason) for keys, values, reason in _AT_REST for key in keys.split()}

# Longest sequences under other names: at least max_position_embeddings, or vLLM would refuse longer ones.
LENGTH_KEYS = (
    "n_positions",
    "max_seq_len",
    "seq_length",
    "model_max_length",
    "max_target_positions",
    "max_sequence_length",
    "max_seq_length",
    "seq_len",
)

_TRAINING = "for training by transformers; the learner has its own"
_WRITTEN_BY = "says how the file came to be"
_OUTPUTS = "which outputs transformers returns"
_CLASSIFIER = "for classifiers"
WITHOUT_EFFECT: dict[str, WithoutEffect] = {
    "initializer_range": WithoutEffect(SHARE, "for new weights; those of a checkpoint are read"),
    "attention_dropout": WithoutEffect(FRACTION, _TRAINING),
    "output_router_logits": WithoutEffect(YES_OR_NO, _OUTPUTS),
    "router_aux_loss_coef": WithoutEffect(Kind("a number", lambda v: type(v) is float), _TRAINING),
    "use_cache": WithoutEffect(YES_OR_NO, "whether transformers keeps keys and values"),
    "pad_token_id": WithoutEffect(TOKEN, "sequences are packed, not padded"),
    "bos_token_id": WithoutEffect(TOKEN, "the tokenizer's file says which tokens begin a prompt"),
    "pretraining_tp": WithoutEffect(or_null(whole(1, 2**20)), "how a product was cut into parts"),
    "max_window_layers": WithoutEffect(whole(0, 2**20), "read where use_sliding_window is true, which is refused"),
    "transformers_version": WithoutEffect(or_null(TEXT), _WRITTEN_BY),
    **dict.fromkeys(
        ("dtype", "torch_dtype"), WithoutEffect(or_null(DTYPE), "the recipe says in which type each engine computes")),
    **dict.fromkeys(("_name_or_path", "name_or_path"), WithoutEffect(ANYTHING, _WRITTEN_BY)),
    "auto_map": WithoutEffect(OBJECT, "no code of a checkpoint is run"),
    "output_hidden_states": WithoutEffect(or_null(YES_OR_NO), _OUTPUTS),
    "output_attentions": WithoutEffect(Kind("false or null", lambda v: v is None or v is False), _OUTPUTS),
    "return_dict": WithoutEffect(Kind("true", lambda v: v is True), _OUTPUTS),
    "tie_last_hidden_states": WithoutEffect(or_null(YES_OR_NO), _OUTPUTS),
    "chunk_size_feed_forward": WithoutEffect(whole(0, 2**20), "read by no model of these families"),
    "id2label": WithoutEffect(or_null(Kind("names by number", lambda v: type(v) is dict and all(
        k.isdecimal() and type(name) is str for k, name in v.items()))), _CLASSIFIER),
    "label2id": WithoutEffect(or_null(Kind("numbers by name", lambda v: type(v) is dict and all(
        type(number) is int for number in v.values()))), _CLASSIFIER),
    "num_labels": WithoutEffect(whole(0, 1024), _CLASSIFIER),
    "problem_type": WithoutEffect(Kind("null", lambda v: v is None), _CLASSIFIER),
    **dict.fromkeys(
        ("matryoshka_dimensions", "is_matryoshka", "use_pad_token", "use_sep_token"),
        WithoutEffect(ANYTHING, "for models that embed whole texts")),
    "num_nextn_predict_layers": WithoutEffect(ANYTHING, "for guesses of later tokens, which no engine here makes"),
}  # fmt: skip
UNUSED_WINDOW = WithoutEffect(or_null(whole(0, 2**27)), "read where use_sliding_window is true, which is refused")


def shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:80] + " …"
