"""Faults planted in the learner, in exact mode, in transformers and in both engines, for `parity_faults`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F

from megatron_rl.exact.layers import PagedCache
from megatron_rl.exact.step import StepForward
from megatron_rl.instruments.parity import learner_taps
from megatron_rl.instruments.parity.record import replaced
from megatron_rl.layers import cpu_layers
from megatron_rl.layers.attention import attend
from tools.dev.parity_bench import (
    GENERATION,
    LAYER,
    Bench,
    changed,
    fault,
    gelu_and_mul,
    noisy,
    output_of,
    rows_exchanged,
    updated,
    valued,
)

Tensor = torch.Tensor
ALL_FOUR = (0, 1, 2, 3)


def of_learner(name: str, tap: str, **more: Any) -> Callable:
    """``plant(layer, module)`` → a context."""

    def add(plant: Callable) -> Callable:
        fault(f"learner: {name}", tap, "learner", **more)(
            lambda bench: plant(bench.learner.decoder.layers[LAYER], bench.learner)
        )
        return plant

    return add


def with_values(config: Any, **values: Any) -> Any:
    """A copy of Megatron's configuration, which its layers share."""
    return SimpleNamespace(**vars(config) | values)


@of_learner("rope base", "0.q_rope")
def _(layer: Any, module: Any) -> AbstractContextManager:
    frequencies = module.rotary_pos_emb.rotary.inv_freq
    return output_of(module.rotary_pos_emb, lambda out: _other_base(out, module, frequencies))


def _other_base(cos_sin: Tensor, module: Any, frequencies: Tensor) -> Tensor:
    share = torch.arange(len(frequencies)) / (2 * len(frequencies))
    angles = module.rotary_pos_emb.position_ids[:, None] * (frequencies * 10.0**-share)
    return torch.cat([angles.cos(), angles.sin()], -1).view_as(cos_sin)


@of_learner("positions of a packed row off by one", "0.q_rope")
def _(layer: Any, module: Any) -> AbstractContextManager:
    def make(forward: Callable) -> Callable:
        def late(*args: Any, **kwargs: Any) -> Tensor:
            rotary = module.rotary_pos_emb
            rotary.position_ids = rotary.position_ids.roll(1)
            return forward(*args, **kwargs)

        return late

    return replaced(module.rotary_pos_emb, "forward", make)


@of_learner("attention across packed sequences", f"{LAYER}.attention")
def _(layer: Any, module: Any) -> AbstractContextManager:
    make = lambda forward: lambda q, k, v, *a, packed_seq_params=None, **kw: forward(q, k, v, *a, **kw)  # noqa: E731
    return replaced(layer.self_attention.core_attention, "forward", make)


@of_learner("window off by one", f"{LAYER}.attention")
def _(layer: Any, module: Any) -> AbstractContextManager:
    def windowed(q: Tensor, k: Tensor, v: Tensor, scale: Any, mask: Any = None, is_causal: bool = False) -> Tensor:
        n = q.size(2)
        seen = torch.ones(n, n, dtype=torch.bool).tril().triu(-(n - 2))  # the first key is lost to the last query
        return attend(q, k, v, scale, seen)

    core = layer.self_attention.core_attention
    return replaced(core, "_attend", lambda own: lambda q, k, v: windowed(q, k, v, core.softmax_scale))


@of_learner("query norm epsilon", f"{LAYER}.q_norm")
def _(layer: Any, module: Any) -> AbstractContextManager:
    return valued(layer.self_attention, "config", with_values(layer.self_attention.config, layernorm_epsilon=1e-2))


@of_learner("norm epsilon", f"{LAYER}.input_norm")
def _(layer: Any, module: Any) -> AbstractContextManager:
    return valued(layer.input_layernorm, "eps", 1e-2)


@of_learner("final norm stale", "final_norm")
def _(layer: Any, module: Any) -> AbstractContextManager:
    weight = module.decoder.final_layernorm.weight
    return changed((weight, noisy(weight)))


@of_learner("shards of query, key and value exchanged", f"{LAYER}.q")
def _(layer: Any, module: Any) -> AbstractContextManager:
    weight = layer.self_attention.linear_qkv.weight
    return changed((weight, rows_exchanged(weight)))


@of_learner("bias left out", f"{LAYER}.q", model="qwen2")
def _(layer: Any, module: Any) -> AbstractContextManager:
    bias = layer.self_attention.linear_qkv.bias
    return changed((bias, torch.zeros_like(bias)))


@of_learner("columns of the output projection exchanged", f"{LAYER}.o_proj")
def _(layer: Any, module: Any) -> AbstractContextManager:
    weight = layer.self_attention.linear_proj.weight
    return changed((weight, rows_exchanged(weight.t()).t()))


@of_learner("softmax before the choice of experts", f"{LAYER}.weights")
def _(layer: Any, module: Any) -> AbstractContextManager:
    router = layer.mlp.router
    return valued(router, "config", with_values(router.config, moe_router_pre_softmax=True))


@of_learner("router in bf16", f"{LAYER}.router_logits")
def _(layer: Any, module: Any) -> AbstractContextManager:
    return replaced(layer.mlp.router, "gating", lambda gate: lambda x: gate(x).bfloat16().float())


@of_learner("gate and up exchanged in one expert", f"{LAYER}.expert", experts=(1,))
def _(layer: Any, module: Any) -> AbstractContextManager:
    weight = layer.mlp.experts.local_experts[1].linear_fc1.weight
    return changed((weight, rows_exchanged(weight)))


@of_learner("two experts exchanged", f"{LAYER}.expert", experts=(0, 2))
def _(layer: Any, module: Any) -> AbstractContextManager:
    first, second = (layer.mlp.experts.local_experts[i] for i in (0, 2))
    pairs = [(getattr(first, n).weight, getattr(second, n).weight) for n in ("linear_fc1", "linear_fc2")]
    return changed(*pairs, *((b, a) for a, b in pairs))


@of_learner("one expert stale", f"{LAYER}.expert", experts=(3,))
def _(layer: Any, module: Any) -> AbstractContextManager:
    weight = layer.mlp.experts.local_experts[3].linear_fc2.weight
    return changed((weight, noisy(weight)))


@of_learner("another activation of experts", "0.expert", experts=ALL_FOUR)
def _(layer: Any, module: Any) -> AbstractContextManager:
    def gelu(hidden: Tensor, probs: Tensor) -> Tensor:
        return gelu_and_mul(hidden) * probs[:, None]

    return valued(cpu_layers, "gated_silu", gelu)


@of_learner("another activation", f"{LAYER}.activation", model="llama")
def _(layer: Any, module: Any) -> AbstractContextManager:
    return valued(layer.mlp, "config", with_values(layer.mlp.config, activation_func=F.gelu))


@of_learner("one expert's part lost in the sum", f"{LAYER}.mlp")
def _(layer: Any, module: Any) -> AbstractContextManager:
    dispatcher = layer.mlp.token_dispatcher

    def make(combine: Callable) -> Callable:
        def lossy(rows: Tensor) -> Tensor:
            rows = rows.clone()
            rows[: int(dispatcher._counts[0])] = 0
            return combine(rows)

        return lossy

    return replaced(dispatcher, "combine_preprocess", make)


@of_learner("tied head stale", "logits", model="qwen3")
def _(layer: Any, module: Any) -> AbstractContextManager:
    stale = noisy(module.embedding.word_embeddings.weight.detach())
    return valued(module, "shared_embedding_or_output_weight", lambda: stale)


@of_learner("shared expert left out", f"{LAYER}.mlp", model="glm4_moe")
def _(layer: Any, module: Any) -> AbstractContextManager:
    make = lambda combine: lambda output, shared: combine(output, None)  # noqa: E731
    return replaced(layer.mlp, "postprocess", make)


@of_learner("latent norm left out", f"{LAYER}.kv_latent_norm", model="deepseek_v3")
def _(layer: Any, module: Any) -> AbstractContextManager:
    return valued(layer.self_attention.kv_layernorm, "forward", lambda x: x)


@of_learner("rope on the plain part of latent attention", f"{LAYER}.q_rope", model="deepseek_v3")
def _(layer: Any, module: Any) -> AbstractContextManager:
    return _first_part_turned(layer)


@of_learner("bias of the choice in the weights", f"{LAYER}.weights", model="deepseek_v3")
def _(layer: Any, module: Any) -> AbstractContextManager:
    router = layer.mlp.router

    def biased(out: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        probs, chosen = out
        scores = (probs + 0.1 * router.expert_bias) * chosen
        return scores / scores.sum(-1, keepdim=True) * probs.sum(-1, keepdim=True), chosen

    return output_of(router, biased)


@of_learner("shared experts of DeepSeek left out", f"{LAYER}.mlp", model="deepseek_v3")
def _(layer: Any, module: Any) -> AbstractContextManager:
    make = lambda combine: lambda output, shared: combine(output, None)  # noqa: E731
    return replaced(layer.mlp, "postprocess", make)


@of_learner("another routed scale", f"{LAYER}.weights", model="glm4_moe")
def _(layer: Any, module: Any) -> AbstractContextManager:
    return output_of(layer.mlp.router, lambda out: (out[0] * 1.01, out[1]))


SCALED = "deepseek_v3 yarn"


@of_learner("yarn left out", "0.q_rope", model=SCALED)
def _(layer: Any, module: Any) -> AbstractContextManager:
    rotary = module.rotary_pos_emb
    plain = rotary.rotary.inv_freq_extra

    def unscaled(out: tuple[Tensor, float]) -> tuple[Tensor, float]:
        angles = rotary.position_ids[:, None] * plain
        return torch.cat([angles, angles], -1).view_as(out[0]), out[1]

    return output_of(rotary, unscaled)


@of_learner("yarn's mscale of cosine and sine left out", "0.q_rope", model=SCALED)
def _(layer: Any, module: Any) -> AbstractContextManager:
    return output_of(module.rotary_pos_emb, lambda out: (out[0], 1.0))


@of_learner("yarn's mscale of scores left out", f"{LAYER}.attention", model=SCALED)
def _(layer: Any, module: Any) -> AbstractContextManager:
    config = layer.self_attention.config
    width = config.qk_head_dim + config.qk_pos_emb_head_dim
    return valued(layer.self_attention.core_attention, "softmax_scale", width**-0.5)


@of_learner("latent query norm left out", f"{LAYER}.q_latent_norm", model=SCALED)
def _(layer: Any, module: Any) -> AbstractContextManager:
    return valued(layer.self_attention.q_layernorm, "forward", lambda x: x)


@of_learner("norm of each query head", f"{LAYER}.q_norm", model="olmoe")
def _(layer: Any, module: Any) -> AbstractContextManager:
    norm = layer.self_attention.q_layernorm

    def each(x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], None, norm.eps) * norm.weight.view(x.shape[-3:])

    return valued(norm, "forward", each)


@of_learner("width of the norm of queries", f"{LAYER}.q_norm", model="olmoe")
def _(layer: Any, module: Any) -> AbstractContextManager:
    norm = layer.self_attention.q_layernorm
    return valued(norm, "width", norm.width // 2)


@of_learner("weights of OLMoE renormalised", f"{LAYER}.weights", model="olmoe")
def _(layer: Any, module: Any) -> AbstractContextManager:
    return output_of(layer.mlp.router, lambda out: (out[0] / out[0].sum(-1, keepdim=True), out[1]))


def _first_part_turned(layer: Any) -> AbstractContextManager:
    """The first numbers of a head are turned, not the last ones."""

    def make(get: Callable) -> Callable:
        def turned(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
            query, key, *rest = get(*args, **kwargs)
            width = layer.self_attention.config.qk_head_dim
            return (query.roll(width, -1), key.roll(width, -1), *rest)

        return turned

    return replaced(layer.self_attention, "get_query_key_value_tensors", make)


@fault("learner: temperature on one side", "logprob", "learner")
def _(bench: Bench) -> AbstractContextManager:
    make = lambda function: lambda *args, **kw: function(*args, **kw | {"temperature": 0.9})  # noqa: E731
    return replaced(learner_taps, "token_logprobs", make)


# -- of exact mode, of transformers, and of both engines


@fault("exact generation: cached keys in bf16", "0.output", "exact", found=(GENERATION,))
def _(bench: Bench) -> AbstractContextManager:
    def make(write: Callable) -> Callable:
        return lambda self, layer, pages, offsets, key, value: write(
            self, layer, pages, offsets, key.bfloat16().to(key), value
        )

    return replaced(PagedCache, "write", make)


@fault("exact generation: positions of steps off by one", "0.output", "exact", found=(GENERATION,))
def _(bench: Bench) -> AbstractContextManager:
    def make(begin: Callable) -> Callable:
        def shifted(self: StepForward, longest: int) -> None:
            begin(self, longest + 1)
            self._cos, self._sin = self._cos[1:], self._sin[1:]

        return shifted

    return replaced(StepForward, "begin", make)


@fault("transformers: norm epsilon", f"{LAYER}.second_norm", "transformers")
def _(bench: Bench) -> AbstractContextManager:
    return valued(bench.transformers.model.layers[LAYER].post_attention_layernorm, "variance_epsilon", 1e-2)


@fault("transformers: yarn's mscale of scores left out", f"{LAYER}.attention", "transformers", model=SCALED)
def _(bench: Bench) -> AbstractContextManager:
    attention = bench.transformers.model.layers[LAYER].self_attn
    return valued(attention, "scaling", attention.qk_head_dim**-0.5)


@fault("both engines: another activation", f"{LAYER}.activation", "vllm", "learner", model="llama")
@contextmanager
def _(bench: Bench) -> Iterator[None]:
    of_engine = valued(bench.vllm.model.layers[LAYER].mlp.act_fn, "forward", gelu_and_mul)
    mlp = bench.learner.decoder.layers[LAYER].mlp
    of_learner = valued(mlp, "config", with_values(mlp.config, activation_func=F.gelu))
    with of_engine, of_learner:
        yield


@fault("both engines: biases left out", "0.q", "vllm", "learner", model="qwen2")
@contextmanager
def _(bench: Bench) -> Iterator[None]:
    edits = [(layer.self_attention.linear_qkv.bias, torch.zeros(1)) for layer in bench.learner.decoder.layers]
    of_learner = changed(*((bias, zero.expand_as(bias)) for bias, zero in edits))
    with of_learner, updated(bench, lambda name, x, _: torch.zeros_like(x) if name.endswith(".bias") else x):
        yield
