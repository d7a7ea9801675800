"""Rope scaling (Llama 3's, and YaRN with latent attention): the learner's model is transformers' model; other kinds are
refused beforehand."""

import json

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from megatron_rl.model.architecture import KNOWN_MODELS, architecture_from, read_architecture
from megatron_rl.model.decoder import Yarn
from tests.parallel.gloo import run_ranks
from tests.support.families import YARN, save_family
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
    unscaled = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    tokens = torch.randint(3, 98, (1, LENGTH), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert (unscaled(tokens).logits[0] - double).abs().max() > bound  # the scaling is not lost in rounding


def test_yarn_is_transformers(tmp_path):
    """Further than the original length, and with two different mscales, so that softmax and cosines are both scaled."""
    folder = save_family(tmp_path, "deepseek_v3")
    assert read_architecture(folder).yarn == Yarn(32.0, 64, mscale=1.0, mscale_all_dim=0.8)
    ((ours, single, double),) = run_ranks(
        "tests.parallel.programs.rope", "logits_of_both", world_size=1, path=str(folder), length=LENGTH
    )
    bound = bound_from_double(single.numpy(), double.numpy(), longest_sum=LENGTH)
    assert (ours - double).abs().max() <= bound
    for change in ({"factor": 33.0}, {"mscale": 1.1}, {"mscale": 1.1, "mscale_all_dim": 0.88}, {"beta_fast": 2.0}):
        config = AutoConfig.from_pretrained(folder, rope_parameters=YARN | change)
        other = AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=torch.float32)
        with torch.no_grad():
            result = other(torch.randint(3, 98, (1, LENGTH), generator=torch.Generator().manual_seed(0))).logits[0]
        assert (result - double).abs().max() > bound, change


@pytest.mark.parametrize("change", [{"rope_type": "yarn"}, {"high_freq_factor": 8.0}, {"factor": 0}])
def test_other_scalings_are_refused(change):
    values = {**KNOWN_MODELS["OctoThinker-3B-Hybrid-Base"], "rope_scaling": {**LLAMA3, **change}}
    architecture = architecture_from(values)
    assert "rope scaling" in architecture.problems()[0]
    assert architecture.llama3_factor is None
