"""What a model with attention sinks asks of Megatron, and where it is not built."""

from __future__ import annotations

import pytest
import torch

from megatron_rl.config.learner import LearnerConfig, PrecisionConfig
from megatron_rl.errors import InputError
from megatron_rl.learner import model
from megatron_rl.model.architecture import KNOWN_MODELS, architecture_from

GPT_OSS = architecture_from(KNOWN_MODELS["gpt-oss-20b-bf16"])
CPU = torch.device("cpu")


def test_transformer_engines_layers_are_refused(monkeypatch):
    monkeypatch.setattr(model, "use_transformer_engine", lambda device, exact=False: True)
    with pytest.raises(InputError, match=r"gpt_oss has attention sinks.* uninstall transformer-engine"):
        model.build_model(GPT_OSS, LearnerConfig(), CPU)


def test_megatrons_fields_say_windows_sinks_biases_and_activation():
    config = model.transformer_config(GPT_OSS, LearnerConfig(), CPU, PrecisionConfig())
    assert config.window_size == (127, 0)
    assert config.window_attn_skip_freq == [1, 0] * 12
    assert (config.softmax_type, config.add_bias_linear, config.add_qkv_bias) == ("learnable", True, True)
    assert (config.activation_func_clamp_value, config.glu_linear_offset) == (7.0, 1.0)
    assert torch.equal(config.activation_func(torch.ones(1)), torch.sigmoid(torch.tensor([1.702])))
    assert (config.yarn_rotary_scaling_factor, config.yarn_correction_range_round_to_int) == (32.0, False)
    plain = architecture_from(KNOWN_MODELS["Qwen3-30B-A3B"])
    others = model.transformer_config(plain, LearnerConfig(), CPU, PrecisionConfig())
    assert (others.softmax_type, others.window_size, others.add_bias_linear) == ("vanilla", None, False)
    assert not hasattr(others, "yarn_rotary_scaling_factor")
