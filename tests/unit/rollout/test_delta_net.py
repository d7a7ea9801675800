"""The delta net that a CPU engine has in fp32 and fp16, against the recurrence of the paper token by token."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from megatron_rl.rollout import delta_net

KEY_HEADS, HEADS, KEY, VALUE, KERNEL, SLOTS = 2, 4, 8, 12, 4, 5
MIXED = 2 * KEY_HEADS * KEY + HEADS * VALUE


def layer(generator: torch.Generator) -> SimpleNamespace:
    """What vLLM's layer has of weights, and its caches: inputs of the convolution [slots, W - 1, D], states [slots,
    heads, V, K], which are read as [slots, heads, K, V]."""

    def split(mixed: torch.Tensor) -> list[torch.Tensor]:
        parts = mixed.split([KEY_HEADS * KEY, KEY_HEADS * KEY, HEADS * VALUE], -1)
        return [p.view(1, len(mixed), -1, w) for p, w in zip(parts, (KEY, KEY, VALUE), strict=True)]

    stale = torch.full((SLOTS, KERNEL - 1, MIXED), 7.0), torch.full((SLOTS, HEADS, VALUE, KEY), 7.0)
    weight = torch.randn(MIXED, 1, KERNEL, generator=generator)
    return SimpleNamespace(
        prefix="net",
        A_log=torch.randn(HEADS, generator=generator),
        dt_bias=torch.randn(HEADS, generator=generator),
        conv1d=SimpleNamespace(weight=weight, bias=None),
        kv_cache=stale,
        rearrange_mixed_qkv=split,
    )


def by_hand(net: SimpleNamespace, mixed: np.ndarray, b: np.ndarray, a: np.ndarray) -> np.ndarray:
    """[T, heads, V] of one whole sequence in float64: S ← e^g S, S ← S + β k (v − Sᵀk)ᵀ, o = Sᵀq / √K (Yang et al.)."""
    weight = net.conv1d.weight[:, 0].double().numpy()
    before = np.concatenate([np.zeros((KERNEL - 1, MIXED)), mixed])
    conv = sum(before[i : i + len(mixed)] * weight[:, i] for i in range(KERNEL))
    conv = conv / (1 + np.exp(-conv))
    state, outputs = np.zeros((HEADS, KEY, VALUE)), np.zeros((len(mixed), HEADS, VALUE))
    rate, bias = np.exp(net.A_log.double().numpy()), net.dt_bias.double().numpy()
    for t, row in enumerate(conv):
        q, k = (row[i * KEY_HEADS * KEY :][: KEY_HEADS * KEY].reshape(KEY_HEADS, KEY) for i in (0, 1))
        values = row[2 * KEY_HEADS * KEY :].reshape(HEADS, VALUE)
        for head in range(HEADS):
            query, key = (x[head // (HEADS // KEY_HEADS)] for x in (q, k))
            query, key = (x / np.sqrt((x * x).sum() + 1e-6) for x in (query, key))
            state[head] *= np.exp(-rate[head] * np.log1p(np.exp(a[t, head] + bias[head])))
            new = values[head] - state[head].T @ key
            state[head] += np.outer(key, new) / (1 + np.exp(-b[t, head]))
            outputs[t, head] = state[head].T @ query / np.sqrt(KEY)
    return outputs


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_prompts_and_single_tokens_go_on_where_their_sequences_are(dtype, monkeypatch):
    """Steps of an engine: prompts of 70, 1 and 3 tokens in used slots; a token of two and a prompt; then all four."""
    generator = torch.Generator().manual_seed(0)
    net, lengths, slots = layer(generator), (72, 3, 4, 6), (2, 4, 1, 3)
    steps = [[(0, 70), (1, 1), (2, 3)], [(1, 1), (0, 1), (3, 5)], [(2, 1), (3, 1), (0, 1), (1, 1)]]
    given = [[torch.randn(n, width, generator=generator).to(dtype) for width in (MIXED, HEADS, HEADS)] for n in lengths]
    net.conv1d.weight = net.conv1d.weight.to(dtype)
    done, outputs = [0] * 4, [[] for _ in lengths]
    context = SimpleNamespace(no_compile_layers={"net": net})
    monkeypatch.setattr(delta_net, "get_forward_context", lambda: context)
    for step in steps:
        ones = sum(done[i] > 0 for i, _ in step)
        rows = [[x[done[i] : done[i] + n] for x in given[i]] for i, n in step]
        mixed, b, a = (torch.cat(parts) for parts in zip(*rows, strict=True))
        ends = np.cumsum([0, *(n for _, n in step)])
        running = SimpleNamespace(
            num_actual_tokens=len(mixed),
            spec_sequence_masks=None,
            num_decodes=ones,
            num_prefills=len(step) - ones,
            non_spec_state_indices_tensor=torch.tensor([slots[i] for i, _ in step]),
            non_spec_query_start_loc=torch.tensor(ends),
            has_initial_state=torch.tensor([done[i] > 0 for i, _ in step]),
        )
        context.attn_metadata = {"net": running}
        out = torch.zeros(len(mixed), HEADS, VALUE, dtype=dtype)
        delta_net.attend(mixed, b, a, out, "net")
        for (i, n), part in zip(step, out.split([n for _, n in step]), strict=True):
            outputs[i].append(part)
            done[i] += n
    assert done == list(lengths)
    close = {torch.float32: 2e-5, torch.float16: 2e-2}[dtype]
    for own, parts in zip(given, outputs, strict=True):
        wanted = by_hand(net, *(x.double().numpy() for x in own))
        assert np.abs(torch.cat(parts).double().numpy() - wanted).max() <= close * max(1.0, np.abs(wanted).max())
    assert (net.kv_cache[0][0] == 7).all()
    assert (net.kv_cache[1][0] == 7).all(), "slots of nobody stay as they are"


def test_bf16_is_left_to_vllms_kernels(monkeypatch):
    calls = []
    monkeypatch.setattr(delta_net, "_attend", lambda *arguments: calls.append(arguments))
    monkeypatch.setattr(delta_net, "_pack", lambda weight: calls.append(weight))
    wide, weight = torch.ones(1, 2 * MIXED, dtype=torch.bfloat16), torch.zeros(MIXED, KERNEL)
    mixed = wide[:, :MIXED]  # a row of a larger tensor, as Qwen3.5's: its strides are not those that the kernel takes
    delta_net.attend(mixed, mixed, mixed, mixed, "net")
    delta_net.pack(weight.bfloat16())
    assert (calls[0][0].equal(mixed), calls[0][0].stride(), calls[1].dtype) == (True, (MIXED, 1), torch.bfloat16)
    assert delta_net.pack(weight).shape == (MIXED, 1, KERNEL)


def test_the_text_model_comes_without_the_vision_part():
    """Of vLLM's own module nothing is left behind, and tensors of the vision part have no place in the model."""
    import sys

    from vllm import ModelRegistry

    before = sys.modules.get("vllm.model_executor.models.qwen3_vl")
    delta_net.register_text_model(on_cpu=True)
    assert sys.modules.get("vllm.model_executor.models.qwen3_vl") is before
    model = ModelRegistry.models["Qwen3_5MoeForCausalLM"].load_model_cls()
    prefixes = model.hf_to_vllm_mapper.orig_to_new_prefix
    assert prefixes["model.language_model."] == "model."
    assert (prefixes["model.visual."], prefixes["mtp."]) == (None, None)
