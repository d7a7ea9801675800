"""The table of parameter names, against Megatron's and Hugging Face's own names written out."""

import pytest

from megatron_rl.model.architecture import KNOWN_MODELS, architecture_from
from megatron_rl.model.names import find_weight, stored_tensors

DENSE, MOE = (architecture_from(KNOWN_MODELS[name]) for name in ("Qwen3-4B-Base", "Qwen3-30B-A3B"))


@pytest.mark.parametrize(
    ("architecture", "key", "hf_names", "shape"),
    [
        (DENSE, "mlp.linear_fc1.weight_w", ("mlp.gate_proj.weight",), (9728, 2560)),
        (DENSE, "mlp.linear_fc1.weight_v", ("mlp.up_proj.weight",), (9728, 2560)),
        (DENSE, "mlp.linear_fc2.weight", ("mlp.down_proj.weight",), (2560, 9728)),
        (MOE, "mlp.experts.experts.5.linear_fc1.weight_w", ("mlp.experts.5.gate_proj.weight",), (768, 2048)),
        (MOE, "mlp.experts.experts.5.linear_fc1.weight_v", ("mlp.experts.5.up_proj.weight",), (768, 2048)),
        (MOE, "mlp.experts.experts.5.linear_fc2.weight", ("mlp.experts.5.down_proj.weight",), (2048, 768)),
        (MOE, "self_attention.linear_proj.weight", ("self_attn.o_proj.weight",), (2048, 4096)),
    ],
)
def test_tensors_on_disk(architecture, key, hf_names, shape):
    """Megatron stores the gate as `_w` and the up projection as `_v`: exchanged, every shape would still fit."""
    (stored,) = [entry for entry in stored_tensors(architecture) if entry.key == f"decoder.layers.3.{key}"]
    assert stored.hf_names == tuple(f"model.layers.3.{name}" for name in hf_names)
    assert stored.shape == shape


@pytest.mark.parametrize(
    ("parameter", "hf", "expert"),
    [
        ("mlp.linear_fc1.weight", ("mlp.gate_proj.weight", "mlp.up_proj.weight"), None),
        ("mlp.experts.linear_fc2.weight12", ("mlp.experts.{e}.down_proj.weight",), 12),
        ("mlp.experts.local_experts.3.linear_fc2.weight", ("mlp.experts.{e}.down_proj.weight",), 3),
        ("self_attention.linear_qkv.layer_norm_weight", ("input_layernorm.weight",), None),
    ],
)
def test_parameters_in_memory(parameter, hf, expert):
    weight, number = find_weight(parameter, MOE)
    assert (weight.hf, number) == (hf, expert)


def test_an_unknown_parameter_is_an_error():
    with pytest.raises(NotImplementedError, match=r"no Hugging Face name .* mlp.bias"):
        find_weight("mlp.bias", MOE)
