"""Gated delta nets in vLLM: what its CPU backend lacks, and Qwen3.5 without its vision part.

vLLM 0.30 has a delta net for CPUs in C++, in bf16 alone, for keys and values of 64 or 128 numbers. In fp32 and fp16
transformers' PyTorch form takes its place, with vLLM's caches: the last tokens before the convolution, and a state in
fp32. Prompts are read one by one, so that a response does not depend on its batch. vLLM also packs the convolution's
weight for its kernel: in these types it stays as it is.

vLLM takes a prompt of one token for a step of decoding. It would go on from the state that the last sequence in its
place left, which nothing clears. Here it is a prompt. CUDA graphs are made for vLLM's own way: there such prompts are
refused (`generator.check_lengths`).

vLLM's file of Qwen3.5 imports the vision part, and with it torchvision. Only the text model is used here, so a stand-in
takes the place of the vision part.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch.nn import functional
from transformers.models.qwen3_next.modeling_qwen3_next import (
    torch_chunk_gated_delta_rule,
    torch_recurrent_gated_delta_rule,
)
from vllm import ModelRegistry, _custom_ops
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention
from vllm.utils.torch_utils import _resolve_layer_name
from vllm.v1.attention.backends import gdn_attn

# Without what transformers puts around them: kernels of other packages.
_of_prompt, _of_token = inspect.unwrap(torch_chunk_gated_delta_rule), inspect.unwrap(torch_recurrent_gated_delta_rule)
_split = gdn_attn.split_decodes_and_prefills
_attend, _pack = gdn_attention.cpu_gdn_attention_core, _custom_ops.causal_conv1d_weight_pack  # vLLM's


def tell_prompts_apart() -> None:
    """Let vLLM read prompts of one token as prompts. Call it in a process whose engines have no CUDA graphs."""
    gdn_attn.split_decodes_and_prefills = partial(_split, treat_short_extends_as_decodes=False)


def install() -> None:
    """Put this before vLLM's kernels. Call it before a model is built in this process."""
    gdn_attention.cpu_gdn_attention_core = attend
    _custom_ops.causal_conv1d_weight_pack = pack


def pack(weight: torch.Tensor) -> torch.Tensor:
    """``weight`` [D, W] as the kernel for its type takes it: packed, or [D, 1, W]."""
    return _pack(weight) if weight.dtype == torch.bfloat16 else weight.unsqueeze(1)


def attend(
    mixed_qkv: torch.Tensor,
    b: torch.Tensor,
    a: torch.Tensor,
    core_attn_out: torch.Tensor,
    layer_name: gdn_attention.LayerNameType,
) -> None:
    """vLLM's ``cpu_gdn_attention_core``; writes ``core_attn_out`` [N, heads, V].

    ``mixed_qkv`` [N, D]: queries, keys and values of the running sequences, one behind the other, before the
    convolution. ``b``, ``a`` [N, heads]: what the strength of a write and the decay are made of.
    """
    if mixed_qkv.dtype == torch.bfloat16:
        # Of one row vLLM's kernel wants strides, too, that are those of a tensor of its own.
        _attend(mixed_qkv.flatten().view(mixed_qkv.shape), b, a, core_attn_out, layer_name)
        return
    context = get_forward_context()
    layer = context.no_compile_layers[_resolve_layer_name(layer_name)]
    running = (context.attn_metadata or {}).get(layer.prefix)
    if running is None or running.num_actual_tokens == 0:
        return
    assert running.spec_sequence_masks is None
    decay = -layer.A_log.float().exp() * functional.softplus(a.float() + layer.dt_bias.float())
    strength = b.float().sigmoid()
    one_by_one, slots = running.num_decodes, running.non_spec_state_indices_tensor
    starts = running.non_spec_query_start_loc.tolist()
    if one_by_one:  # a token each
        _advance(layer, mixed_qkv, decay, strength, core_attn_out, slice(0, one_by_one), slots[:one_by_one], True)
    for i in range(one_by_one, one_by_one + running.num_prefills):
        tokens, goes_on = slice(starts[i], starts[i + 1]), bool(running.has_initial_state[i])
        _advance(layer, mixed_qkv, decay, strength, core_attn_out, tokens, slots[i : i + 1], goes_on)


def _advance(
    layer: Any,
    mixed: torch.Tensor,
    decay: torch.Tensor,
    strength: torch.Tensor,
    out: torch.Tensor,
    tokens: slice,
    slots: torch.Tensor,
    goes_on: bool,
) -> None:
    """Read ``tokens``, as many of each of the sequences whose states are in ``slots``.

    ``goes_on``: whether the states hold what was read before; else they are empty.
    """
    cache, states = layer.kv_cache
    cache = cache if is_conv_state_dim_first() else cache.transpose(-1, -2)  # [slots, D, W - 1]
    count = len(slots)

    def of_sequences(x: torch.Tensor) -> torch.Tensor:
        return x[tokens].unflatten(0, (count, -1))

    own = of_sequences(mixed).transpose(1, 2)  # [sequences, D, tokens]
    before = cache[slots].to(own.dtype) if goes_on else own.new_zeros(count, *cache.shape[1:])
    own = torch.cat([before, own], dim=-1)
    cache[slots] = own[..., -cache.shape[-1] :].to(cache.dtype)
    weight, bias = layer.conv1d.weight, layer.conv1d.bias
    own = functional.silu(functional.conv1d(own, weight, bias, groups=len(weight)))
    parts = layer.rearrange_mixed_qkv(own.transpose(1, 2).flatten(0, 1))
    query, key, value = (part.squeeze(0).unflatten(0, (count, -1)) for part in parts)
    rule = _of_token if query.shape[1] == 1 else _of_prompt
    repeat = value.shape[2] // query.shape[2]
    slots_heads_keys_values = (len(states), states.shape[1], states.shape[3], states.shape[2])
    states = states.view(slots_heads_keys_values)
    outputs, last = rule(
        query.repeat_interleave(repeat, dim=2),
        key.repeat_interleave(repeat, dim=2),
        value,
        g=of_sequences(decay),
        beta=of_sequences(strength),
        initial_state=states[slots].float() if goes_on else None,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    states[slots] = last.to(states.dtype)
    out[tokens] = outputs.flatten(0, 1).to(out.dtype)


# -- Qwen3.5

_VISION = "vllm.model_executor.models.qwen3_vl"


@contextmanager
def without_vision() -> Iterator[None]:
    """Inside, vLLM's files of models find a stand-in for the vision part of Qwen3-VL."""
    from vllm.model_executor.models.utils import WeightsMapper
    from vllm.multimodal import MULTIMODAL_REGISTRY

    stand_in, registers = ModuleType(_VISION), MULTIMODAL_REGISTRY.register_processor
    names = "_VisionTransformer VLDummyInputsBuilder VLMultiModalProcessor VLProcessingInfo VLForConditionalGeneration"
    members = {"hf_to_vllm_mapper": WeightsMapper(), "packed_modules_mapping": {}}
    for name in names.split():
        setattr(stand_in, f"Qwen3{name}", type(f"Qwen3{name}", (), members))
    own = sys.modules.get(_VISION)
    sys.modules[_VISION] = stand_in
    MULTIMODAL_REGISTRY.register_processor = lambda *_, **__: lambda model: model
    try:
        yield
    finally:
        MULTIMODAL_REGISTRY.register_processor = registers
        del sys.modules[_VISION]
        if own is not None:
            sys.modules[_VISION] = own


TEXT_MODEL = "Qwen3_5MoeForCausalLM"


def register_text_model(on_cpu: bool) -> None:
    """Make vLLM know Qwen3.5's text model as one that leaves out the vision part of a checkpoint."""
    # By its name vLLM looks at it in a process of its own: seconds, but no kernel is made before the GPU is chosen.
    ModelRegistry.register_model(TEXT_MODEL, text_model() if on_cpu else f"{__name__}:{TEXT_MODEL}")


def text_model() -> type:
    with without_vision():
        from vllm.model_executor.models import qwen3_5
    from vllm.model_executor.models.utils import WeightsMapper

    own = qwen3_5.Qwen3_5MoeForCausalLM
    left_out = WeightsMapper(orig_to_new_prefix={"model.visual.": None})
    return type(TEXT_MODEL, (own,), {"hf_to_vllm_mapper": own.hf_to_vllm_mapper | left_out})


def __getattr__(name: str) -> type:
    if name == TEXT_MODEL:
        return text_model()
    raise AttributeError(f"module {__name__} has no attribute {name}")
