"""Attention sinks in an engine: written after a weight update, each rank its part, and given to the kernel in bf16."""

from __future__ import annotations

import pytest
import torch

from megatron_rl.rollout import cpu_engine, worker_extension

HEADS = 4


def engine(own_heads: int) -> torch.nn.Module:
    """Two layers with the names that vLLM's model has."""
    layers = [torch.nn.ModuleDict({"attn": torch.nn.Module()}) for _ in range(2)]
    for layer in layers:
        layer["attn"].sinks = torch.nn.Parameter(torch.zeros(own_heads, dtype=torch.bfloat16), requires_grad=False)
    return torch.nn.ModuleDict({"model": torch.nn.ModuleDict({"layers": torch.nn.ModuleList(layers)})})


@pytest.mark.parametrize(("rank", "own"), [(0, slice(0, 4)), (0, slice(0, 2)), (1, slice(2, 4))])
def test_each_rank_keeps_its_heads(rank, own, monkeypatch):
    monkeypatch.setattr(worker_extension, "get_tensor_model_parallel_rank", lambda: rank)
    sent = [(f"model.layers.{i}.self_attn.sinks", torch.arange(HEADS) + 10.0 * i) for i in range(2)]
    others = [("model.norm.weight", torch.ones(2)), ("model.layers.0.self_attn.o_proj.bias", torch.ones(2))]
    held: dict[str, torch.Tensor] = {}
    stream = worker_extension.without_sinks(iter([sent[0], *others, sent[1]]), held)
    assert [name for name, _ in stream] == [name for name, _ in others]
    for _, tensor in sent:
        tensor.zero_()  # a sender may use its buffer again
    model = engine(len(range(HEADS)[own]))
    worker_extension.write_sinks(model, held)
    for i, layer in enumerate(model["model"]["layers"]):
        assert layer["attn"].sinks.tolist() == (torch.arange(HEADS) + 10.0 * i)[own].tolist()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_kernel_gets_sinks_in_bf16(dtype, monkeypatch):
    given = []
    monkeypatch.setattr(cpu_engine, "_attend", lambda **options: given.append(options))
    cpu_engine.attend(s_aux=torch.tensor([1.0, 2.0], dtype=dtype), scale=0.5)
    cpu_engine.attend(s_aux=None, scale=0.5)
    assert [(options["s_aux"] is None, options["scale"]) for options in given] == [(False, 0.5), (True, 0.5)]
    assert given[0]["s_aux"].dtype == torch.bfloat16
