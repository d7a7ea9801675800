"""Ling's classes in transformers: names of weights, and that GLM-4.5's modules get them as they were written."""

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from megatron_rl.model.architecture import KNOWN_MODELS
from megatron_rl.model.families import FAMILIES
from megatron_rl.model.transformers_classes import BailingMoeConfig
from tests.support.families import save_family

PUBLISHED = {  # of a layer with experts of Ling-mini-2.0, those of one expert
    "input_layernorm.weight",
    "attention.query_key_value.weight",
    "attention.query_layernorm.weight",
    "attention.key_layernorm.weight",
    "attention.dense.weight",
    "post_attention_layernorm.weight",
    "mlp.gate.weight",
    "mlp.gate.expert_bias",
    "mlp.experts.0.gate_proj.weight",
    "mlp.experts.0.up_proj.weight",
    "mlp.experts.0.down_proj.weight",
    "mlp.shared_experts.gate_proj.weight",
    "mlp.shared_experts.up_proj.weight",
    "mlp.shared_experts.down_proj.weight",
}


def test_weights_have_the_published_names_and_are_read_back(tmp_path):
    folder = save_family(tmp_path / "first", "bailing_moe")
    tensors = load_file(folder / "model.safetensors")
    start = "model.layers.1."
    names = {name.removeprefix(start) for name in tensors if name.startswith(start)}
    assert {name for name in names if ".experts." not in name or ".experts.0." in name} == PUBLISHED
    assert {"model.word_embeddings.weight", "model.norm.weight", "lm_head.weight"} <= tensors.keys()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    attention, packed = model.model.layers[1].self_attn, tensors[f"{start}attention.query_key_value.weight"]
    parts = [getattr(attention, f"{part}_proj").weight for part in "qkv"]
    assert torch.equal(torch.cat(parts), packed)
    assert [len(part) for part in parts] == [4 * 32, 2 * 32, 2 * 32]  # heads, key and value heads, of 32 numbers
    model.save_pretrained(tmp_path / "second")
    again = load_file(tmp_path / "second" / "model.safetensors")
    assert again.keys() == tensors.keys()
    assert all(torch.equal(again[name], tensors[name]) for name in tensors)


def test_defaults_are_those_of_the_published_model():
    config, known = BailingMoeConfig(), KNOWN_MODELS["Ling-mini-2.0"]
    assert {key: getattr(config, key) for key in known if hasattr(config, key)} == {
        key: value for key, value in known.items() if hasattr(config, key)
    }
    for key, rule in FAMILIES["bailing_moe"].implemented.items():
        assert not hasattr(config, key) or rule.default is None or rule.kind.fits(getattr(config, key)), key
