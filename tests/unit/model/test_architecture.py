"""A model's shape from its config.json: every key that transformers or vLLM reads, and bad ones."""

import ast
import dataclasses
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from megatron_rl.errors import InputError
from megatron_rl.model.architecture import (
    _is_one_of,
    architecture_from,
    listed,
    neutral,
    read_architecture,
    shape_of,
    unknown_config_keys,
)
from megatron_rl.model.families import FAMILIES
from tests.support.families import NEEDED, SIZES
from tests.support.tiny import MODEL


def config_of(model_type: str, **change: Any) -> dict[str, Any]:
    named = {"model_type": model_type, "architectures": [FAMILIES[model_type].hf_class]}
    return named | SIZES | NEEDED.get(model_type, {}) | change


def test_a_required_key_is_missed():
    config = config_of("qwen3")
    del config["vocab_size"]
    with pytest.raises(InputError, match=r"lacks the key 'vocab_size' \(a whole number from 1"):
        architecture_from(config)


def test_all_bad_keys_are_named_at_once():
    with pytest.raises(InputError, match=r"vocab_size: 'x'.*; .*hidden_act: 'gelu'"):
        architecture_from(config_of("qwen3", vocab_size="x", hidden_act="gelu"))


def test_unknown_keys_are_told(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config_of("qwen3", my_note=1, temperature=0.6)))
    assert unknown_config_keys(tmp_path) == ["my_note", "temperature"]
    assert unknown_config_keys(MODEL) == []


OWN_HEADS = ("qwen2", "qwen2_moe", "deepseek_v3", "olmoe")  # families whose widths of heads follow from other keys

TEXT_CONFIGS = {"hf_config", "hf_text_config", "text_config"}

# vLLM's files of each family.
MODELS = {family: [family] for family in FAMILIES}

MODELS |= {"qwen3_5_moe_text": ["qwen3_5", "qwen3_next"], "qwen3": ["qwen3", "qwen2"], "deepseek_v3": ["deepseek_v2"]}

VLLM_READS = {  # file beside the model's own → names of variables that hold the config; for a class, of it alone
    "config/model.py": TEXT_CONFIGS,
    "config/vllm.py": TEXT_CONFIGS,
    "transformers_utils/config.py": {*TEXT_CONFIGS, "config"},
    "transformers_utils/model_arch_config_convertor.py:ModelArchConfigConvertorBase": TEXT_CONFIGS,
}

METHODS = {"get_text_config", "update", "to_dict", "to_diff_dict", "keys", "items", "get", "standardize_rope_params"}

METHODS |= {"validate_rope", "is_heterogeneous"}


def theirs(config: dict[str, Any]) -> Any:
    values = dict(config)
    FAMILIES[config["model_type"]].register()
    return AutoConfig.for_model(values.pop("model_type"), **values)


def keys_read(tree: ast.AST, names: set[str]) -> set[str]:
    """Attributes that code reads of variables called ``names``: x.key, getattr(x, "key"), getattr_iter(x, [...])."""
    lists: dict[str, set[str]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.List | ast.Tuple):
            for target in node.targets:
                lists.setdefault(getattr(target, "id", ""), set()).update(texts(node.value))
    keys: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and last_name(node.value) in names:
            keys.add(node.attr)
        is_call = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and len(node.args) > 1
        if is_call and node.func.id in ("getattr", "hasattr", "getattr_iter") and last_name(node.args[0]) in names:
            key = node.args[1]
            keys |= lists.get(key.id, set()) if isinstance(key, ast.Name) else texts(key)
    return keys


def texts(node: ast.AST) -> set[str]:
    return {c.value for c in ast.walk(node) if isinstance(c, ast.Constant) and isinstance(c.value, str)}


def last_name(node: ast.AST) -> str | None:
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", None)


def keys_of_vllm(model_type: str) -> set[str]:
    root, keys = Path(importlib.util.find_spec("vllm").submodule_search_locations[0]), set()
    models = {f"model_executor/models/{name}.py": {"config"} for name in MODELS[model_type]}
    for place, names in (models | VLLM_READS).items():
        file, _, of_class = place.partition(":")
        tree: ast.AST = ast.parse((root / file).read_text())
        if of_class:
            tree = next(n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == of_class)
        keys |= keys_read(tree, names)
    return {key for key in keys if not key.startswith("__")} - METHODS


@pytest.mark.parametrize("model_type", FAMILIES)
def test_every_key_of_transformers_class_is_listed(model_type):
    """Its fields and those that it inherits, and what its code takes from keys that are no fields."""
    kept = {field.name for field in dataclasses.fields(theirs(config_of(model_type)))}
    also = {"rope_scaling", "rope_theta", "partial_rotary_factor", "torch_dtype", "per_layer_config", "name_or_path"}
    assert not (kept | also) - listed(model_type)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_every_key_that_vllm_reads_is_listed(model_type):
    assert sorted(keys_of_vllm(model_type) - listed(model_type)) == []


def test_a_key_that_vllm_reads_is_found():
    assert {"bias", "is_causal", "logit_scale", "n_head_kv", "rotary_pct", "rswa_window"} <= keys_of_vllm("llama")


@pytest.mark.parametrize("model_type", FAMILIES)
def test_absent_keys_are_transformers_defaults(model_type):
    for sizes in ({}, {"num_key_value_heads": 2, "head_dim": 8} if model_type not in OWN_HEADS else {}):
        config = config_of(model_type, **sizes)
        ours, model = architecture_from(config), theirs(config)
        widths = getattr(model, "qk_head_dim", None) or getattr(model, "head_dim", None)
        head_dim = widths or model.hidden_size // model.num_attention_heads
        assert (ours.head_dim, ours.num_kv_heads) == (head_dim, model.num_key_value_heads)
        assert (ours.rms_norm_eps, ours.tie_embeddings) == (model.rms_norm_eps, model.tie_word_embeddings)
        assert ours.rope_theta == model.rope_parameters["rope_theta"]
        assert ours.max_position_embeddings == model.max_position_embeddings
        if ours.is_moe:
            num_experts = getattr(model, "num_experts", None) or model.n_routed_experts
            assert (ours.num_experts, ours.experts_per_token) == (num_experts, model.num_experts_per_tok)
            assert (ours.moe_ffn_hidden_size, ours.norm_topk_prob) == (
                getattr(model, "moe_intermediate_size", model.intermediate_size),
                getattr(model, "norm_topk_prob", True),
            )
            assert ours.moe_layers == (getattr(model, "first_k_dense_replace", 0) == 0, True)
        for key, rule in neutral(model_type).items():
            assert key not in vars(model) or _is_one_of(vars(model)[key], rule.values), key


BAD: list[tuple[dict[str, Any], str]] = [
    ({"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}, "use_sliding_window: True"),
    ({"rope_parameters": {"rope_theta": 1e4, "rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor: 0.5"),
    ({"hidden_act": "gelu"}, "hidden_act: 'gelu'"),
    ({"hidden_act": 5}, "hidden_act: 5"),
    ({"shared_expert_intermediate_size": 64}, "shared_expert_intermediate_size: 64"),
    ({"dual_chunk_attention_config": {"chunk_size": 8}}, "dual_chunk_attention_config"),
    ({"layer_types": ["sliding_attention"] * 2}, "layer_types"),
    ({"layer_types": ["full_attention"]}, "2 × full_attention"),
    ({"qkv_bias": True}, "qkv_bias: True"),
    ({"bias": True}, "bias: True"),
    ({"mlp_bias": True}, "mlp_bias: True"),
    ({"is_causal": False}, "is_causal: False"),
    ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
    ({"quantization_config": 5}, "quantization_config: 5"),
    ({"per_layer_config": {"0": {"intermediate_size": 8}}}, "per_layer_config"),
    ({"text_config": {}}, "text_config"),
    ({"num_hidden_layers": 10**9}, "num_hidden_layers: 1000000000; allowed: a whole number from 1 to 1024"),
    ({"num_hidden_layers": True}, "num_hidden_layers: True"),
    ({"num_hidden_layers": 2.0}, "num_hidden_layers: 2.0"),
    ({"vocab_size": [64]}, "vocab_size"),
    ({"num_key_value_heads": "2"}, "num_key_value_heads: '2'"),
    ({"num_key_value_heads": 3}, "num_key_value_heads: 3 does not divide"),
    ({"head_dim": "a"}, "head_dim: 'a'"),
    ({"max_position_embeddings": None}, "max_position_embeddings: None"),
    ({"rms_norm_eps": "a"}, "rms_norm_eps: 'a'"),
    ({"rms_norm_eps": float("nan")}, "rms_norm_eps: nan"),
    ({"tie_word_embeddings": "false"}, "tie_word_embeddings: 'false'"),
    ({"tie_word_embeddings": 1}, "tie_word_embeddings: 1"),
    ({"dtype": "evil"}, "dtype: 'evil'"),
    ({"eos_token_id": "x"}, "eos_token_id: 'x'"),
    ({"pad_token_id": 64}, "pad_token_id: 64"),
    ({"use_cache": "yes"}, "use_cache: 'yes'"),
    ({"attention_dropout": 2.0}, "attention_dropout: 2.0"),
    ({"rope_theta": None}, "rope_theta: None"),
    ({"rope_theta": True}, "rope_theta: True"),
    ({"rope_scaling": {"rope_type": "default", "factor": 2.0}}, "factor: 2.0"),
    ({"rope_scaling": {"rope_type": "llama3", "factor": "8"}}, "factor: '8'"),
    ({"rope_scaling": {"rope_type": "default"}, "rope_parameters": {"rope_theta": 5.0}}, "differ"),
    ({"rope_scaling": {"rope_type": "default", "type": "linear"}}, "rope_type"),
    ({"rope_parameters": {"full_attention": {"rope_theta": 5.0}}}, "full_attention"),
    ({"mrope_section": [1, 2]}, "mrope_section"),
    ({"num_kv_heads": 2}, "num_kv_heads: 2"),
    ({"model_max_length": 16}, "model_max_length: 16"),
    ({"architectures": ["LlamaModel"]}, "architectures"),
    ({"architectures": None}, "architectures: None"),
]

_OF_DELTA_NETS = ("partial_rotary", "partial_rotary_factor: 0.5", "shared_expert_intermediate_size: 64")
_OF_DELTA_NETS += ("2 × full_attention",)

OBEYED = {  # what these families have
    ("qwen2_moe", "shared_expert_intermediate_size: 64"),
    ("qwen2_moe", "qkv_bias: True"),
    ("glm4_moe", "partial_rotary"),
    ("glm4_moe", "partial_rotary_factor: 0.5"),
    ("bailing_moe", "partial_rotary"),
    ("bailing_moe", "partial_rotary_factor: 0.5"),
    ("gpt_oss", "2 × full_attention"),
    *((family, said) for family in ("qwen3_next", "qwen3_5_moe_text") for said in _OF_DELTA_NETS),
}


@pytest.mark.parametrize(
    ("model_type", "change", "said"),
    [
        pytest.param(family, change, said, id=f"{family}-{next(iter(change))}-{i}")
        for family in FAMILIES
        for i, (change, said) in enumerate(BAD)
        if (family, said) not in OBEYED
    ],
)
def test_a_value_that_an_engine_would_obey_and_the_learner_not_is_refused(model_type, change, said, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config_of(model_type, **change)))
    with pytest.raises(InputError) as refused:
        read_architecture(tmp_path)
    assert said in str(refused.value)
    assert "allowed" in str(refused.value)


@pytest.mark.parametrize(
    ("model_type", "change", "said"),
    [
        ("llama", {"sliding_window": 8}, "sliding_window: 8"),
        ("gpt_oss", {"layer_types": ["full_attention"] * 2}, "sliding_attention, full_attention and so on in turn"),
        ("gpt_oss", {"sliding_window": None}, "sliding_window: None"),
        ("gpt_oss", {"attention_bias": False}, "attention_bias: False"),
        ("gpt_oss", {"swiglu_limit": 8.0}, "swiglu_limit: 8.0"),
        ("gpt_oss", {"rms_norm_eps": 1e-6}, "rms_norm_eps: 1e-06"),
        ("llama", {"attention_bias": True}, "attention_bias: True"),
        ("qwen3_moe", {"attention_bias": True}, "attention_bias: True"),
        ("qwen2", {"head_dim": 16}, "head_dim: 16; vLLM"),
        ("qwen2_moe", {"head_dim": 16}, "head_dim: 16; vLLM"),
        ("qwen2_moe", {"qkv_bias": False}, "qkv_bias: False"),
        ("qwen2_moe", {"shared_expert_intermediate_size": 0}, "shared_expert_intermediate_size: 0"),
        ("qwen3_moe", {"num_experts": 8, "num_local_experts": 4}, "num_local_experts is 4"),
        ("qwen3_moe", {"num_experts": "8"}, "num_experts: '8'"),
        ("qwen3_moe", {"norm_topk_prob": "x"}, "norm_topk_prob: 'x'"),
        ("qwen3_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step: 0"),
        ("qwen3_moe", {"mlp_only_layers": [2]}, "mlp_only_layers: [2]"),
        ("qwen3_moe", {"mlp_only_layers": 1}, "mlp_only_layers: 1"),
        ("qwen3", {"num_experts": 8}, "num_experts: 8"),
        ("qwen3", {"head_dim": 33}, "head_dim: 33"),
        ("bailing_moe", {"rotary_dim": 16}, "rotary_dim: 16"),
        ("bailing_moe", {"norm_head": True}, "norm_head: True"),
        ("bailing_moe", {"use_rmsnorm": False}, "use_rmsnorm: False"),
        ("bailing_moe", {"router_dtype": "bf16"}, "router_dtype: 'bf16'"),
        ("bailing_moe", {"score_function": "softmax"}, "score_function: 'softmax'"),
        ("bailing_moe", {"topk_group": 4}, "topk_group: 4"),
        ("bailing_moe", {"moe_shared_expert_intermediate_size": 64}, "moe_shared_expert_intermediate_size: 64"),
        ("bailing_moe", {"num_nextn_predict_layers": 1}, "num_nextn_predict_layers: 1"),
        ("bailing_moe", {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 1.0}}, "two values"),
        ("qwen3_next", {"linear_conv_kernel_dim": 3}, "linear_conv_kernel_dim: 3"),
        ("qwen3_next", {"linear_num_key_heads": 3}, "linear_num_key_heads: 3 does not divide"),
        ("qwen3_next", {"layer_types": ["linear_attention"] * 2}, "each at least once"),
        ("qwen3_next", {"layer_types": ["full_attention", "linear_attention"]}, "layer_types says otherwise"),
        ("qwen3_next", {"layer_types": []}, "layer_types: []"),
        ("qwen3_next", {"rope_parameters": {"partial_rotary_factor": None}}, "partial_rotary_factor: None"),
        ("qwen3_next", {"output_gate_type": "sigmoid"}, "output_gate_type: 'sigmoid'"),
        ("qwen3_5_moe_text", {"attn_output_gate": False}, "attn_output_gate: False"),
        ("qwen3_5_moe_text", {"mamba_ssm_dtype": "bfloat16"}, "mamba_ssm_dtype: 'bfloat16'"),
        ("qwen3_5_moe_text", {"norm_topk_prob": False}, "norm_topk_prob: False"),
        ("qwen3_5_moe_text", {"mlp_only_layers": [0]}, "mlp_only_layers: [0]"),
        ("llama", {"num_attention_heads": 24, "head_dim": 8}, "24 does not divide hidden_size 256"),
    ],
)
def test_a_value_of_one_family_is_refused(model_type, change, said):
    with pytest.raises(InputError) as refused:
        architecture_from(config_of(model_type, **change))
    assert said in str(refused.value)


def test_a_model_of_unknown_shape_is_refused():
    with pytest.raises(InputError, match="shapes known by folder name: Qwen3-30B-A3B"):
        shape_of(Path("models/nobody-knows"))
    assert shape_of(MODEL)[1] is False
    assert shape_of(Path("anywhere/Qwen3-8B-Base"))[1] is True
