"""Llama 3's rope scaling: the learner's model is transformers' model; other kinds are refused beforehand."""

from __future__ import annotations

import json

import pytest
import torch

from megatron_rl.model.architecture import architecture_from, read_architecture
from megatron_rl.model.known_models import KNOWN_MODELS
from tests.parallel.gloo import run_ranks
from tests.support.rounding import bound_from_double
from tools.dev.make_tiny_checkpoint import build_model, build_tiny_config, save_checkpoint

LLAMA3 = KNOWN_MODELS["OctoThinker-3B-Hybrid-Base"]["rope_scaling"]

LENGTH = 700


def test_scaled_model_is_transformers(tmp_path):
    config = build_tiny_config("llama", "nano", rope_parameters={**LLAMA3, "rope_theta": 5e5})
    save_checkpoint(build_model(config), tmp_path)
    assert read_architecture(tmp_path).llama3_factor == 32.0
    ((ours, single, double),) = run_ranks(
        "tests.parallel.programs.rope", "logits_of_both", world_size=1, path=str(tmp_path), length=LENGTH
    )
    bound = bound_from_double(single.numpy(), double.numpy(), longest_sum=LENGTH)  # attention's over all positions
    assert (ours - double).abs().max() <= bound

    plain = json.loads((tmp_path / "config.json").read_text())
    plain["rope_parameters"] = {"rope_theta": 5e5, "rope_type": "default"}
    (tmp_path / "config.json").write_text(json.dumps(plain))
    from transformers import AutoModelForCausalLM

    unscaled = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    tokens = torch.randint(3, 98, (1, LENGTH), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert (unscaled(tokens).logits[0] - double).abs().max() > bound  # the scaling is not lost in rounding


@pytest.mark.parametrize("change", [{"rope_type": "yarn"}, {"high_freq_factor": 8.0}, {"factor": 0}])
def test_other_scalings_are_refused(change):
    values = {**KNOWN_MODELS["OctoThinker-3B-Hybrid-Base"], "rope_scaling": {**LLAMA3, **change}}
    architecture = architecture_from(values)
    assert "rope scaling" in architecture.problems()[0]
    assert architecture.llama3_factor is None
