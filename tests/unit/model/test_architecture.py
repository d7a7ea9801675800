"""The shape of a model from its config.json: keys that are missing, wrong or unknown."""

from __future__ import annotations

import json
from typing import Any

import pytest

from megatron_rl.errors import InputError
from megatron_rl.model.architecture import architecture_from, unknown_config_keys
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
