"""Every key of config.json that transformers or vLLM reads of a supported model, and what is done with it.

A key is one of three things. It is implemented: the learner computes what it says (`implemented`). It has no effect on
the function that the model computes (`without_effect`, with the reason). Or it changes the function in a way that the
learner, or vLLM, does not follow: then only its neutral values pass (`neutral`). Other keys are named by `check`.

Read in transformers 5.19 and vLLM 0.30; tests/unit/model/test_config_keys.py walks over both and fails where a key
of theirs is not listed here. No torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron_rl.errors import InputError

FAMILIES = {  # model_type → the class that `architectures` has to name
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "llama": "LlamaForCausalLM",
}
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


def or_null(kind: Kind) -> Kind:
    return Kind(f"{kind.words}, or null", lambda value: value is None or kind.fits(value))


YES_OR_NO = Kind("true or false", lambda value: type(value) is bool)
TEXT = Kind("text", lambda value: type(value) is str)
TEXTS = Kind("a list of texts", lambda value: type(value) is list and all(type(item) is str for item in value))
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

_ALL = {
    "vocab_size": Implemented(VOCABULARY, REQUIRED),
    "hidden_size": Implemented(WIDTH, REQUIRED),
    "intermediate_size": Implemented(WIDTH, REQUIRED),
    "num_hidden_layers": Implemented(LAYERS, REQUIRED),
    "num_attention_heads": Implemented(HEADS, REQUIRED),
    "rms_norm_eps": Implemented(EPSILON, 1e-6),
    "tie_word_embeddings": Implemented(YES_OR_NO, False),
    "eos_token_id": Implemented(or_null(TOKENS), None),
}
_QWEN = {
    **_ALL,
    "max_position_embeddings": Implemented(POSITIONS, 32768),
    "num_key_value_heads": Implemented(or_null(HEADS), 32),  # null: as many as heads
}
_IMPLEMENTED: dict[str, dict[str, Implemented]] = {
    "qwen3_moe": {
        **_QWEN,
        "num_key_value_heads": Implemented(HEADS, 4),
        "head_dim": Implemented(HEADS, None),  # absent: hidden_size / num_attention_heads
        "num_experts": Implemented(EXPERTS, 128),
        "num_local_experts": Implemented(EXPERTS, None),  # another name for num_experts
        "num_experts_per_tok": Implemented(EXPERTS, 8),
        "moe_intermediate_size": Implemented(WIDTH, 768),
        "norm_topk_prob": Implemented(YES_OR_NO, False),
        "decoder_sparse_step": Implemented(LAYERS, 1),
        "mlp_only_layers": Implemented(or_null(LAYER_NUMBERS), None),
    },
    "qwen3": {**_QWEN, "head_dim": Implemented(HEADS, 128)},
    "qwen2": {**_QWEN, "head_dim": Implemented(HEADS, None)},
    "llama": {
        **_ALL,
        "max_position_embeddings": Implemented(POSITIONS, 2048),
        "num_key_value_heads": Implemented(or_null(HEADS), None),
        "head_dim": Implemented(or_null(HEADS), None),
    },
}
# Read together, by `rope_of`.
ROPE_KEYS = ("rope_parameters", "rope_scaling", "rope_theta")
ROPE_DEFAULT_THETA = 10000.0

_NO_BIAS = "biases that the learner, or vLLM, does not add"
_WINDOW = "attention over a window; the learner attends to all positions"
_OTHER_ROPE = "another rotary embedding than the learner's"
_OTHER_NAME = "vLLM reads it in the place of a key that the learner reads"
_OTHER_MODEL = "parts of a model that the learner does not have"
_QUANTIZED = "weights in another format; the learner reads 16 or 32 bit ones. Use the unquantized checkpoint"
_LATER = "attention to later tokens"
_NO_EXPERTS = "experts, which this model does not have"
_LENGTH = "vLLM takes it for the longest sequence"

# Keys at rest in one way, with what other values would do.
_AT_REST: tuple[tuple[str, tuple[Any, ...], str], ...] = (
    ("hidden_act", ("silu",), "another activation; the learner and vLLM have SiLU"),
    ("attention_bias mlp_bias qkv_bias bias", (False,), _NO_BIAS),
    ("use_sliding_window", (False,), _WINDOW),
    ("attention_chunk_size rswa_window dual_chunk_attention_config", (None,), _WINDOW),
    ("is_causal", (True,), _LATER),
    ("use_bidirectional_attention", (None, False), _LATER),
    ("is_mm_prefix_lm", (False,), _LATER),
    ("qk_norm", (False,), "norms that the learner does not have in this model"),
    ("logit_scale", (1, None), "scaled logits"),
    ("head_dtype", (None,), "vLLM computes the head in it; use precision.fp32_head"),
    ("shared_expert_intermediate_size", (0,), "a shared expert, which the learner does not have"),
    ("position_embedding_type", (None, "rope", "rotary"), _OTHER_ROPE),
    ("partial_rotary_factor rotary_pct rotary_emb_fraction", (1, None), _OTHER_ROPE),
    ("original_max_position_embeddings", (8192, None), _OTHER_ROPE),
    ("rotary_emb_base mrope_section xdrope_section", (None,), _OTHER_ROPE),
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
_NEUTRAL = {key: Neutral(values, reason) for keys, values, reason in _AT_REST for key in keys.split()}

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
_POOLING = "for models that embed whole texts"
_WITHOUT_EFFECT: dict[str, WithoutEffect] = {
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
    "dtype": WithoutEffect(or_null(DTYPE), "the recipe says in which type each engine computes"),
    "torch_dtype": WithoutEffect(or_null(DTYPE), "the recipe says in which type each engine computes"),
    "_name_or_path": WithoutEffect(ANYTHING, _WRITTEN_BY),
    "name_or_path": WithoutEffect(ANYTHING, _WRITTEN_BY),
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
    "matryoshka_dimensions": WithoutEffect(ANYTHING, _POOLING),
    "is_matryoshka": WithoutEffect(ANYTHING, _POOLING),
    "use_pad_token": WithoutEffect(ANYTHING, _POOLING),
    "use_sep_token": WithoutEffect(ANYTHING, _POOLING),
    "num_nextn_predict_layers": WithoutEffect(ANYTHING, "for guesses of later tokens, which no engine here makes"),
}  # fmt: skip
_QWEN_WINDOW = WithoutEffect(or_null(whole(0, 2**27)), "read where use_sliding_window is true, which is refused")
_OF_FAMILY: dict[str, dict[str, Neutral | WithoutEffect]] = {
    "qwen3_moe": {"sliding_window": _QWEN_WINDOW, "qk_norm": Neutral((True, False), "")},
    "qwen3": {"sliding_window": _QWEN_WINDOW, "qk_norm": Neutral((True, False), "")},
    "qwen2": {
        "sliding_window": _QWEN_WINDOW,
        "attention_bias": WithoutEffect(YES_OR_NO, "q, k and v of this family have biases, whatever it says"),
    },
    "llama": {"sliding_window": Neutral((None,), _WINDOW)},
}


def implemented(model_type: str) -> dict[str, Implemented]:
    """The keys that the learner follows, but for the rotary embedding's (`ROPE_KEYS`)."""
    return _IMPLEMENTED[model_type]


def neutral(model_type: str) -> dict[str, Neutral]:
    """The keys that have to be at rest, beside `layer_types`, `architectures` and `LENGTH_KEYS` (see `read_keys`)."""
    return {key: rule for key, rule in _others(model_type).items() if isinstance(rule, Neutral)}


def without_effect(model_type: str) -> dict[str, WithoutEffect]:
    """The keys that do not change what the model computes."""
    return {key: rule for key, rule in _others(model_type).items() if isinstance(rule, WithoutEffect)}


def _others(model_type: str) -> dict[str, Neutral | WithoutEffect]:
    rules = {**_NEUTRAL, **_WITHOUT_EFFECT, **_OF_FAMILY[model_type]}
    return {key: rule for key, rule in rules.items() if key not in _IMPLEMENTED[model_type]}


def listed(model_type: str) -> set[str]:
    """All keys that are known of this family."""
    by_hand = {"model_type", "architectures", "layer_types", *ROPE_KEYS, *LENGTH_KEYS}
    return {*implemented(model_type), *_others(model_type), *by_hand}


def unknown_keys(config: dict[str, Any]) -> list[str]:
    """Keys of ``config`` that no engine here is known to read."""
    return sorted(set(config) - listed(config["model_type"]))


def read_keys(config: dict[str, Any]) -> dict[str, Any]:
    """The implemented keys of ``config`` with transformers' defaults for those that are absent.

    ``config["model_type"]`` is one of `FAMILIES`. Raises `InputError` that names every key whose value is not allowed:
    key, value, values allowed.
    """
    model_type = config["model_type"]
    keys, problems = implemented(model_type), []
    for key, rule in keys.items():
        if key not in config and rule.default is REQUIRED:
            problems.append(f"lacks the key {key!r} ({rule.kind.words})")
        elif key in config and not rule.kind.fits(config[key]):
            problems.append(f"{key}: {_shown(config[key])}; allowed: {rule.kind.words}")
    for key, rule in _others(model_type).items():
        if key not in config:
            continue
        if isinstance(rule, Neutral) and not _is_one_of(config[key], rule.values):
            allowed = " or ".join(_shown(value) for value in rule.values) or "no such key"
            problems.append(f"{key}: {_shown(config[key])} is not supported ({rule.reason}); allowed: {allowed}")
        elif isinstance(rule, WithoutEffect) and not rule.kind.fits(config[key]):
            problems.append(f"{key}: {_shown(config[key])}; allowed: {rule.kind.words}")
    values = {key: config.get(key, rule.default) for key, rule in keys.items()}
    if not problems:  # what follows takes types for granted
        problems = _lengths(config, values) + _layer_types(config, values) + _related(model_type, config, values)
    if problems:
        raise InputError("; ".join(problems))
    return values


def _lengths(config: dict[str, Any], values: dict[str, Any]) -> list[str]:
    least = values["max_position_embeddings"]
    kind = or_null(whole(least, 10**30))
    return [
        f"{key}: {_shown(config[key])} ({_LENGTH}); allowed: at least max_position_embeddings ({least}), or null"
        for key in LENGTH_KEYS
        if key in config and not kind.fits(config[key])
    ]


def _layer_types(config: dict[str, Any], values: dict[str, Any]) -> list[str]:
    """Kinds of layers by number: all of them have to attend to all positions."""
    types, number = config.get("layer_types"), values["num_hidden_layers"]
    if types is None or types == ["full_attention"] * number:
        return []
    return [f"layer_types: {_shown(types)} is not supported ({_WINDOW}); allowed: null, or {number} × full_attention"]


def _related(model_type: str, config: dict[str, Any], values: dict[str, Any]) -> list[str]:
    """What two keys say together. Fills in the values that follow from others."""
    problems, heads, hidden = [], values["num_attention_heads"], values["hidden_size"]
    if (model_type == "llama" or values["head_dim"] is None) and hidden % heads:
        problems.append(f"num_attention_heads: {heads} does not divide hidden_size {hidden}; allowed: what does")
    if values["head_dim"] is None:
        values["head_dim"] = hidden // heads
    if model_type == "qwen2" and values["head_dim"] != hidden // heads:
        problems.append(
            f"head_dim: {values['head_dim']}; vLLM gives this family hidden_size / num_attention_heads = "
            f"{hidden // heads}; allowed: that"
        )
    if values["head_dim"] % 2:
        problems.append(f"head_dim: {values['head_dim']}; rotary embeddings turn pairs; allowed: even numbers")
    groups = values["num_key_value_heads"] = values["num_key_value_heads"] or heads
    if heads % groups:
        problems.append(
            f"num_key_value_heads: {groups} does not divide num_attention_heads {heads}; allowed: what does"
        )
    pad = config.get("pad_token_id")
    if pad is not None and not -values["vocab_size"] <= pad < values["vocab_size"]:
        problems.append(f"pad_token_id: {pad}; allowed: below vocab_size ({values['vocab_size']}), or null")
    if model_type == "qwen3_moe":
        problems += _experts(config, values)
    return problems


def _experts(config: dict[str, Any], values: dict[str, Any]) -> list[str]:
    problems, layers = [], values["num_hidden_layers"]
    other = values.pop("num_local_experts")
    if other is not None:
        if "num_experts" in config and config["num_experts"] != other:
            problems.append(
                f"num_experts: {config['num_experts']}, but num_local_experts is {other}; allowed: one number"
            )
        values["num_experts"] = other
    dense = values["mlp_only_layers"] = values["mlp_only_layers"] or []
    if any(layer >= layers for layer in dense):
        problems.append(f"mlp_only_layers: {_shown(dense)}; allowed: {LAYER_NUMBERS.words} ({layers - 1})")
    return problems


@dataclass(frozen=True)
class Rope:
    """The rotary embedding. ``scaling``: its keys as the file has them, None for the plain one."""

    theta: float
    scaling: dict[str, Any] | None


_ROPE_NUMBERS = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


def rope_of(config: dict[str, Any]) -> Rope:
    """What `ROPE_KEYS` say, as transformers reads them. Raises `InputError` as `read_keys` does.

    transformers 5 writes rope_parameters, earlier releases rope_theta and rope_scaling.
    """
    for key in ("rope_parameters", "rope_scaling"):
        if not isinstance(config.get(key), dict | type(None)):
            raise InputError(f"{key}: {_shown(config[key])}; allowed: an object of keys, or null")
    first, second = config.get("rope_scaling"), config.get("rope_parameters")
    if first and second and first != second:
        raise InputError("rope_scaling and rope_parameters differ; allowed: one of the two")
    rope = dict(first or second or {})
    theta = rope.pop("rope_theta", config.get("rope_theta", ROPE_DEFAULT_THETA))
    if not THETA.fits(theta):
        raise InputError(f"rope_theta: {_shown(theta)}; allowed: {THETA.words}")
    if not _is_one_of(rope.pop("partial_rotary_factor", 1), (1, None)):
        raise InputError(f"partial_rotary_factor is not supported ({_OTHER_ROPE}); allowed: 1, or no such key")
    names = [rope[key] for key in ("rope_type", "type") if key in rope]
    if any(type(name) is not str for name in names) or len(set(names)) > 1:
        raise InputError(f"rope_type: {_shown(names)}; allowed: one text, default or llama3")
    kind = names[0] if names else "default"
    if kind != "default":
        numbers = {key: rope[key] for key in _ROPE_NUMBERS if key in rope}
        if bad := [key for key, value in numbers.items() if not NUMBER.fits(value)]:
            raise InputError(f"{bad[0]}: {_shown(numbers[bad[0]])}; allowed: {NUMBER.words}")
        return Rope(float(theta), rope)
    if others := sorted(set(rope) - {"rope_type", "type"}):
        raise InputError(
            f"{others[0]}: {_shown(rope[others[0]])} beside the rotary embedding of type default; allowed: rope_theta, "
            "rope_type"
        )
    return Rope(float(theta), None)


def architectures_problem(config: dict[str, Any]) -> str | None:
    """Why vLLM would start another model than the learner's; None where it would not."""
    wanted = FAMILIES[config["model_type"]]
    if config.get("architectures") == [wanted]:
        return None
    return f"architectures: {_shown(config.get('architectures'))} (vLLM goes by it); allowed: [{wanted!r}]"


def _is_one_of(value: Any, allowed: tuple[Any, ...]) -> bool:
    """``value in allowed`` without taking true for 1."""
    return any(value == other and isinstance(value, bool) == isinstance(other, bool) for other in allowed)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:80] + " …"
