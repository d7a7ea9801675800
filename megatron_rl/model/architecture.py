"""What a checkpoint's config.json says of its model: the numbers that layouts, conversion and plans need. No torch.

Which keys there are, and what each may say, stands in `families`. Other keys are named by `check`.

`KNOWN_MODELS` has the shapes of the checkpoints that recipes name, so that `plan` and `check --offline` work where none
is at hand: the keys of each checkpoint's own config.json that `read_architecture` reads, under the folder name that the
checkpoint has on the hub. A family's file holds them. Where the checkpoint is at hand, its config.json counts alone.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_rl.errors import InputError
from megatron_rl.model.decoder import Architecture
from megatron_rl.model.families import FAMILIES
from megatron_rl.model.families.keys import (
    FRACTION,
    LENGTH,
    LENGTH_KEYS,
    NEUTRAL,
    NUMBER,
    OTHER_ROPE,
    REQUIRED,
    ROPE_KEYS,
    THETA,
    WINDOW,
    WITHOUT_EFFECT,
    Neutral,
    WithoutEffect,
    or_null,
    shown,
    whole,
)


def neutral(model_type: str) -> dict[str, Neutral]:
    """The keys that have to be at rest, beside `layer_types`, `architectures` and `LENGTH_KEYS` (see `read_keys`)."""
    return {key: rule for key, rule in _others(model_type).items() if isinstance(rule, Neutral)}


def _others(model_type: str) -> dict[str, Neutral | WithoutEffect]:
    rules = {**NEUTRAL, **WITHOUT_EFFECT, **FAMILIES[model_type].others}
    return {key: rule for key, rule in rules.items() if key not in FAMILIES[model_type].implemented}


def listed(model_type: str) -> set[str]:
    """All keys that are known of this family."""
    by_hand = {"model_type", "architectures", "layer_types", *ROPE_KEYS, *LENGTH_KEYS}
    return {*FAMILIES[model_type].implemented, *_others(model_type), *by_hand}


def unknown_keys(config: dict[str, Any]) -> list[str]:
    """Keys of ``config`` that no engine here is known to read."""
    return sorted(set(config) - listed(config["model_type"]))


def read_keys(config: dict[str, Any]) -> dict[str, Any]:
    """The implemented keys of ``config`` with transformers' defaults for those that are absent.

    ``config["model_type"]`` is one of `FAMILIES`. Raises `InputError` that names every key whose value is not allowed:
    key, value, values allowed.
    """
    model_type = config["model_type"]
    keys, problems = FAMILIES[model_type].implemented, []
    for key, rule in keys.items():
        if key not in config and rule.default is REQUIRED:
            problems.append(f"lacks the key {key!r} ({rule.kind.words})")
        elif key in config and not rule.kind.fits(config[key]):
            problems.append(f"{key}: {shown(config[key])}; allowed: {rule.kind.words}")
    for key, rule in _others(model_type).items():
        if key not in config:
            continue
        if isinstance(rule, Neutral) and not _is_one_of(config[key], rule.values):
            allowed = " or ".join(shown(value) for value in rule.values) or "no such key"
            problems.append(f"{key}: {shown(config[key])} is not supported ({rule.reason}); allowed: {allowed}")
        elif isinstance(rule, WithoutEffect) and not rule.kind.fits(config[key]):
            problems.append(f"{key}: {shown(config[key])}; allowed: {rule.kind.words}")
    values = {key: config.get(key, rule.default) for key, rule in keys.items()}
    if not problems:  # what follows takes types for granted
        problems = _lengths(config, values) + _layer_types(config, values) + _related(config, values)
    if problems:
        raise InputError("; ".join(problems))
    return values


def _lengths(config: dict[str, Any], values: dict[str, Any]) -> list[str]:
    least = values["max_position_embeddings"]
    kind = or_null(whole(least, 10**30))
    return [
        f"{key}: {shown(config[key])} ({LENGTH}); allowed: at least max_position_embeddings ({least}), or null"
        for key in LENGTH_KEYS
        if key in config and not kind.fits(config[key])
    ]


def _layer_types(config: dict[str, Any], values: dict[str, Any]) -> list[str]:
    """Kinds of layers by number: those of the family."""
    types, number = config.get("layer_types"), values["num_hidden_layers"]
    family = FAMILIES[config["model_type"]]
    allowed = None if family.layer_types is None else family.layer_types(number)
    if types is None or allowed is None or types == allowed:
        return []
    words = f"{number} × {allowed[0]}" if len(set(allowed)) == 1 else f"{allowed[0]}, {allowed[1]} and so on in turn"
    return [f"layer_types: {shown(types)} is not supported ({WINDOW}); allowed: null, or {words}"]


def _related(config: dict[str, Any], values: dict[str, Any]) -> list[str]:
    """What two keys say together. Fills in the values that follow from others."""
    problems, heads, hidden = [], values["num_attention_heads"], values["hidden_size"]
    if values["head_dim"] is None and hidden % heads:
        problems.append(f"num_attention_heads: {heads} does not divide hidden_size {hidden}; allowed: what does")
    if values["head_dim"] is None:
        values["head_dim"] = hidden // heads
    problems += FAMILIES[config["model_type"]].relate(config, values)
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
    return problems


@dataclass(frozen=True)
class Rope:
    """The rotary embedding. ``scaling``: its keys as the file has them, None for the plain one."""

    theta: float
    scaling: dict[str, Any] | None
    fraction: float = 1.0  # of a head's width that is turned


_ROPE_NUMBERS = (
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "original_max_position_embeddings",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
)


def rope_of(config: dict[str, Any]) -> Rope:
    """What `ROPE_KEYS` say, as transformers reads them. Raises `InputError` as `read_keys` does.

    transformers 5 writes rope_parameters, earlier releases rope_theta and rope_scaling.
    """
    for key in ("rope_parameters", "rope_scaling"):
        if not isinstance(config.get(key), dict | type(None)):
            raise InputError(f"{key}: {shown(config[key])}; allowed: an object of keys, or null")
    first, second = config.get("rope_scaling"), config.get("rope_parameters")
    if first and second and first != second:
        raise InputError("rope_scaling and rope_parameters differ; allowed: one of the two")
    family = FAMILIES[config["model_type"]]
    absent = (family.rope_scaling if first is None and second is None else None) or {}
    rope = dict(first or second or absent)
    theta = rope.pop("rope_theta", config.get("rope_theta", family.rope_theta))
    if not THETA.fits(theta):
        raise InputError(f"rope_theta: {shown(theta)}; allowed: {THETA.words}")
    fraction = _rotary_fraction(config, rope)
    names = [rope[key] for key in ("rope_type", "type") if key in rope]
    if any(type(name) is not str for name in names) or len(set(names)) > 1:
        raise InputError(f"rope_type: {shown(names)}; allowed: one text, default, llama3 or yarn")
    kind = names[0] if names else "default"
    if kind != "default":
        numbers = {key: rope[key] for key in _ROPE_NUMBERS if key in rope}
        if bad := [key for key, value in numbers.items() if not NUMBER.fits(value)]:
            raise InputError(f"{bad[0]}: {shown(numbers[bad[0]])}; allowed: {NUMBER.words}")
        return Rope(float(theta), rope, fraction)
    if others := sorted(set(rope) - {"rope_type", "type", *family.rope_idle}):
        raise InputError(
            f"{others[0]}: {shown(rope[others[0]])} beside the rotary embedding of type default; allowed: rope_theta, "
            "rope_type"
        )
    return Rope(float(theta), None, fraction)


def _rotary_fraction(config: dict[str, Any], rope: dict[str, Any]) -> float:
    """The share of a head that is turned. Takes the key from ``rope``, the rotary embedding's keys."""
    key, default = "partial_rotary_factor", FAMILIES[config["model_type"]].rotary_fraction
    if default is None:
        if not _is_one_of(rope.pop(key, None), (1, None)):
            raise InputError(f"partial_rotary_factor is not supported ({OTHER_ROPE}); allowed: 1, or no such key")
        return 1.0
    value = rope.pop(key, config.get(key, default))
    width = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    if not (FRACTION.fits(value) and value > 0 and (value * width) % 2 == 0):
        raise InputError(
            f"partial_rotary_factor: {shown(value)}; allowed: a number above 0 up to 1 that turns an even part of the "
            f"{width} numbers of a head"
        )
    return float(value)


def architectures_problem(config: dict[str, Any]) -> str | None:
    """Why vLLM would start another model than the learner's; None where it would not."""
    wanted = FAMILIES[config["model_type"]].hf_class
    if config.get("architectures") == [wanted]:
        return None
    return f"architectures: {shown(config.get('architectures'))} (vLLM goes by it); allowed: [{wanted!r}]"


def _is_one_of(value: Any, allowed: tuple[Any, ...]) -> bool:
    """``value in allowed`` without taking true for 1."""
    return any(value == other and isinstance(value, bool) == isinstance(other, bool) for other in allowed)


def read_architecture(path: Path) -> Architecture:
    """Read ``path/config.json``. Raises `InputError` where it is missing, broken, of another architecture, or asks for
    something that the learner or vLLM would not do."""
    file = Path(path) / "config.json"
    config = _read(file)
    try:
        architecture = architecture_from(config)
        problem = architectures_problem(config)
    except InputError as error:
        raise InputError(f"model.path: {file}: {error}") from error
    if problem:
        raise InputError(f"model.path: {file}: {problem}")
    return architecture


def unknown_config_keys(path: Path) -> list[str]:
    """Keys of ``path/config.json`` that neither the learner nor an engine is known to read."""
    file = Path(path) / "config.json"
    text, whole_file = _read(file), read_object(file)
    family = FAMILIES[text["model_type"]]
    if family.wrapper is None or whole_file["model_type"] != family.wrapper.model_type:
        return unknown_keys(text)
    beside = {*WITHOUT_EFFECT, *NEUTRAL, *family.wrapper.others, "model_type", "architectures", "tie_word_embeddings"}
    return sorted(set(whole_file) - beside) + [f"text_config.{key}" for key in unknown_keys(text)]


def text_part(config: dict[str, Any]) -> dict[str, Any]:
    """The config.json of the model that reads text: ``config`` itself, or of a model that also reads pictures its part.

    Raises `InputError` that names a key beside that part whose value is not allowed.
    """
    by_wrapper = {family.wrapper.model_type: family for family in FAMILIES.values() if family.wrapper}
    family = by_wrapper.get(str(config.get("model_type")))
    if family is None:
        return config
    text, wrapper = config.get("text_config"), family.wrapper
    kinds = (None, family.model_type)
    if not isinstance(text, dict) or text.get("model_type") not in kinds:
        raise InputError(f"text_config: {shown(text)}; allowed: the keys of a {family.model_type}")
    if config.get("architectures") != [wrapper.hf_class]:
        found = shown(config.get("architectures"))
        raise InputError(f"architectures: {found} (vLLM goes by it); allowed: [{wrapper.hf_class!r}]")
    rules = {**NEUTRAL, **WITHOUT_EFFECT, **wrapper.others}
    for key in sorted(set(config) & set(rules) - {"text_config"}):
        rule = rules[key]
        fits = _is_one_of(config[key], rule.values) if isinstance(rule, Neutral) else rule.kind.fits(config[key])
        if not fits:
            raise InputError(f"{key}: {shown(config[key])} is not supported ({rule.reason}) beside text_config")
    tied = [part.get("tie_word_embeddings", False) for part in (config, text)]
    if tied[0] != tied[1]:  # vLLM reads that in text_config
        raise InputError(f"tie_word_embeddings: {tied[0]}, but {tied[1]} in text_config; allowed: one of the two")
    named = {"model_type": family.model_type, "architectures": [family.hf_class], "tie_word_embeddings": tied[0]}
    return {**text, **named}


def _read(file: Path) -> dict[str, Any]:
    if not file.is_file():
        raise InputError(f"model.path: {file} does not exist; expected a checkpoint folder in Hugging Face layout")
    try:
        config = text_part(read_object(file))
    except InputError as error:
        raise InputError(f"model.path: {file}: {error}") from error
    model_type = config.get("model_type")
    if type(model_type) is not str or model_type not in FAMILIES:
        raise InputError(
            f"model.path: {file} has model_type {model_type!r}; supported architectures: {', '.join(FAMILIES)}"
        )
    return config


def read_object(file: Path) -> dict[str, Any]:
    """The object that the JSON file ``file`` of a model's folder holds. Raises `InputError` where it holds none."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError, OSError) as error:
        raise InputError(f"model.path: {file} is not valid JSON ({error}); is the download complete?") from error
    if not isinstance(value, dict):
        raise InputError(f"model.path: {file} holds a {type(value).__name__}; expected an object of keys")
    return value


def architecture_from(config: dict[str, Any]) -> Architecture:
    """The architecture that the keys of a config.json describe; absent keys are transformers' defaults.

    Raises `InputError` that names every key whose value is not allowed.
    """
    model_type = config["model_type"]
    values, rope = read_keys(config), rope_of(config)
    dense = {
        "qkv_bias": False,
        "qk_layernorm": False,
        "num_experts": 0,
        "experts_per_token": 0,
        "moe_ffn_hidden_size": 0,
        "norm_topk_prob": False,
        "moe_layers": (False,) * values["num_hidden_layers"],
    }
    return Architecture(
        model_type=model_type,
        num_layers=values["num_hidden_layers"],
        hidden_size=values["hidden_size"],
        ffn_hidden_size=values["intermediate_size"],
        num_heads=values["num_attention_heads"],
        num_kv_heads=values["num_key_value_heads"],
        head_dim=values["head_dim"],
        vocab_size=values["vocab_size"],
        max_position_embeddings=values["max_position_embeddings"],
        rms_norm_eps=values["rms_norm_eps"],
        rope_theta=rope.theta,
        rope_scaling=rope.scaling,
        tie_embeddings=values["tie_word_embeddings"],
        rotary_fraction=rope.fraction,
        **(dense | FAMILIES[model_type].features(values)),
    )


_ON_HUB = {name.rpartition("/")[2]: name for family in FAMILIES.values() for name in family.known}  # by folder name
KNOWN_MODELS: dict[str, dict[str, Any]] = {
    name.rpartition("/")[2]: {"model_type": family.model_type, **config}
    for family in FAMILIES.values()
    for name, config in family.known.items()
}


def how_to_get(path: Path) -> str:
    """The command that downloads the checkpoint that ``path`` is named after; "" where the name is not known."""
    name = _ON_HUB.get(path.name)
    if name is None:
        return ""
    return f"hf download {name}" + ("" if str(path) == name else f" --local-dir {path}")


def shape_of(path: Path) -> tuple[Architecture, bool]:
    """The architecture of the checkpoint at ``path``, and whether it came from this table by the folder's name.

    Raises `InputError` where neither the checkpoint nor its name is known.
    """
    if (path / "config.json").is_file() or path.name not in KNOWN_MODELS:
        try:
            return read_architecture(path), False
        except InputError as error:
            if (path / "config.json").is_file():
                raise
            raise InputError(f"{error}; shapes known by folder name: {', '.join(KNOWN_MODELS)}") from error
    return architecture_from(KNOWN_MODELS[path.name]), True
