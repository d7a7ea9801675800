"""Faults planted in vLLM, for `parity_faults`: in its weights, by a weight update, and in its functions."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.nn.functional as F

from megatron_rl.checkpoint.hf_folder import HFFolder
from megatron_rl.instruments.parity import vllm_taps
from megatron_rl.instruments.parity.record import replaced
from tools.dev.parity_bench import (
    DECODE,
    LAYER,
    YARN,
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


def weights(pattern: str, change: Callable[[Tensor], Tensor]) -> Callable[[Bench], AbstractContextManager]:
    """A fault of vLLM's: weights whose names end with ``pattern`` are changed."""

    def plant(bench: Bench) -> AbstractContextManager:
        return updated(bench, lambda name, x, _: change(x) if name.endswith(pattern) else x)

    return plant


def exchanged(a: str, b: str) -> Callable[[Bench], AbstractContextManager]:
    """A fault of vLLM's: weights with ``a`` in their name are those with ``b``, and the other way round."""

    def change(name: str, x: Tensor, folder: HFFolder) -> Tensor:
        if a in name:
            return folder(name.replace(a, b))
        return folder(name.replace(b, a)) if b in name else x

    return lambda bench: updated(bench, change)


def low_rank(x: Tensor) -> Tensor:
    """Without an adapter of rank 2."""
    random = torch.Generator().manual_seed(3)
    a, b = (torch.randn(n, 2, generator=random) for n in x.shape)
    return x - 0.01 * a @ b.t()


def scaled_by_block(x: Tensor) -> Tensor:
    """Blocks of 32 × 32 scaled by each other's scales, transposed."""
    rows, columns = x.size(0) // 32, x.size(1) // 32
    blocks = x.view(rows, 32, columns, 32)
    scales = blocks.abs().amax((1, 3))
    other = scales.t().reshape(rows, columns)
    return (blocks * (other / scales)[:, None, :, None]).reshape(x.shape)


BLOCK = 64  # tokens of a block of vLLM's cache on a CPU
MLP = f"layers.{LAYER}.mlp"
ALL_FOUR = (0, 1, 2, 3)


def of_weights(name: str, tap: str, plant: Callable[[Bench], AbstractContextManager], **more: Any) -> None:
    fault(f"vLLM: {name}", tap, "vllm", **more)(plant)


def of_layer(name: str, tap: str, pattern: str, change: Callable[[Tensor], Tensor], **more: Any) -> None:
    """A changed weight of the layer."""
    of_weights(name, f"{LAYER}.{tap}", weights(f"layers.{LAYER}.{pattern}", change), **more)


of_layer("key heads in another order", "k", "self_attn.k_proj.weight", rows_exchanged)
of_layer("value heads in another order", "v", "self_attn.v_proj.weight", rows_exchanged)
of_layer("query heads in another order", "q", "self_attn.q_proj.weight", rows_exchanged)
of_layer("adapter not merged", "q", "self_attn.q_proj.weight", low_rank)
of_layer("output projection stale", "o_proj", "self_attn.o_proj.weight", noisy)
of_layer("fp8 scales transposed", "o_proj", "self_attn.o_proj.weight", scaled_by_block)
of_layer("second norm stale", "second_norm", "post_attention_layernorm.weight", noisy)
of_layer("router rows exchanged", "router_logits", "mlp.gate.weight", rows_exchanged)
of_layer("one expert stale", "expert", "mlp.experts.0.down_proj.weight", noisy, experts=(0,))
of_layer("fp8 scale late", "expert", "mlp.experts.3.up_proj.weight", lambda x: 1.05 * x, experts=(3,))
of_layer("key bias left out", "k", "self_attn.k_proj.bias", torch.zeros_like, model="qwen2")
of_layer("down projection stale", "mlp", "mlp.down_proj.weight", noisy, model="llama")
of_weights("embedding stale", "embedding", weights("embed_tokens.weight", noisy))
of_weights(
    "experts' weights in bf16", "0.expert", weights("down_proj.weight", lambda x: x.bfloat16()), experts=ALL_FOUR
)
of_weights("final norm stale", "final_norm", weights("model.norm.weight", noisy))
of_weights("head stale", "logits", weights("lm_head.weight", noisy))
of_weights("query bias left out", "0.q", weights("q_proj.bias", torch.zeros_like), model="qwen2")
of_weights(
    "two experts exchanged", f"{LAYER}.expert", exchanged(f"{MLP}.experts.1.", f"{MLP}.experts.3."), experts=(1, 3)
)
of_weights(
    "gate and up exchanged in one expert",
    f"{LAYER}.expert",
    exchanged(f"{MLP}.experts.2.gate_proj", f"{MLP}.experts.2.up_proj"),
    experts=(2,),
)
of_weights("gate and up exchanged", f"{LAYER}.gate", exchanged(f"{MLP}.gate_proj", f"{MLP}.up_proj"), model="llama")


# -- of vLLM's functions


def rotary_cache(change: Callable[[Tensor, int], Tensor]) -> Callable[[Bench], AbstractContextManager]:
    """``change(angles [positions, R/2], R)`` → angles, of R numbers that are turned."""

    def plant(bench: Bench) -> AbstractContextManager:
        rotary = bench.vllm.model.layers[0].self_attn.rotary_emb
        half = rotary.cos_sin_cache.size(1) // 2
        positions = torch.arange(len(rotary.cos_sin_cache)).double()[:, None]
        rotation = bench.checkpoint.rotation
        angles = change(positions * rotation.frequencies, 2 * half)
        return changed((rotary.cos_sin_cache, rotation.scale * torch.cat([angles.cos(), angles.sin()], 1)))

    return plant


def _yarn(angles: Tensor, width: int) -> Tensor:
    """Low frequencies slowed by a factor of 4, as yarn does."""
    share = torch.linspace(0, 1, width // 2, dtype=torch.float64)
    return angles * (1 - share + share / 4)


fault("vLLM: rope base", "0.q_rope", "vllm")(rotary_cache(lambda a, d: a * 10.0 ** -(torch.arange(d // 2) / d)))
fault("vLLM: partial rotary", "0.q_rope", "vllm")(rotary_cache(lambda a, d: a * (torch.arange(d // 2) < d // 4)))
fault("vLLM: scaled rope where there is none", "0.q_rope", "vllm")(rotary_cache(_yarn))


@fault("vLLM: cosines in bf16", "0.q_rope", "vllm")
def _(bench: Bench) -> AbstractContextManager:
    cache = bench.vllm.model.layers[0].self_attn.rotary_emb.cos_sin_cache
    return changed((cache, cache.bfloat16().float()))


@fault("vLLM: position off by one in decode", "0.q_rope", "vllm", found=(DECODE,))
def _(bench: Bench) -> AbstractContextManager:
    return _late(bench, lambda tokens, positions: len(tokens) == 1)


@fault("vLLM: position off by one after a prefix hit", "0.q_rope", "vllm", found=(DECODE,))
def _(bench: Bench) -> AbstractContextManager:
    """Only behind the first block of the cache."""
    return _late(bench, lambda tokens, positions: len(tokens) == 1 and int(positions) >= BLOCK)


def _late(bench: Bench, when: Callable[[Tensor, Tensor], bool]) -> AbstractContextManager:
    """Positions are one too many in passes that ``when(tokens, positions)`` chooses."""

    def make(forward: Callable) -> Callable:
        def shifted(tokens: Tensor, positions: Tensor, *args: Any, **kwargs: Any) -> Any:
            late = positions + 1 if when(tokens, positions) else positions
            return forward(tokens, late, *args, **kwargs)

        return shifted

    return replaced(bench.vllm.model, "forward", make)


@fault("vLLM: turned pairs are halves", "0.q_rope", "vllm", model="deepseek_v3")
def _(bench: Bench) -> AbstractContextManager:
    rotary = bench.vllm.model.layers[0].self_attn.rotary_emb

    def make(forward: Callable) -> Callable:
        def halves(positions: Tensor, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
            with valued(rotary, "is_neox_style", True):
                return type(rotary).forward_native(rotary, positions, query, key)

        return halves

    return replaced(rotary, "forward", make)


def of_vllm(name: str, tap: str, find: Callable[[Any], tuple[Any, str, Any]], **more: Any) -> None:
    """A fault of vLLM's: a value. ``find(layer)`` → owner, name, value."""
    fault(f"vLLM: {name}", f"{LAYER}.{tap}", "vllm", **more)(
        lambda bench: valued(*find(bench.vllm.model.layers[LAYER]))
    )


of_vllm("norm epsilon", "input_norm", lambda layer: (layer.input_layernorm, "variance_epsilon", 1e-2))
of_vllm("key norm epsilon", "k_norm", lambda layer: (layer.self_attn.k_norm, "variance_epsilon", 1e-2))
of_vllm("query norm left out", "q_norm", lambda layer: (layer.self_attn.q_norm, "forward", lambda x: x))
of_vllm("scale of attention", "attention", lambda layer: (layer.self_attn.attn.impl, "scale", 0.2))
of_vllm("attention over a window", "attention", lambda layer: (layer.self_attn.attn.impl, "sliding_window", 60))
of_vllm(
    "weights of experts not renormalised", "weights", lambda layer: (layer.mlp.experts.router, "renormalize", False)
)
of_vllm("another activation", "activation", lambda layer: (layer.mlp.act_fn, "forward", gelu_and_mul), model="llama")


@fault("vLLM: another activation of experts", f"{LAYER}.expert", "vllm", experts=ALL_FOUR)
def _(bench: Bench) -> AbstractContextManager:
    experts = bench.vllm.model.layers[LAYER].mlp.experts.routed_experts

    def make(apply: Callable) -> Callable:
        def other(*args: Any, **kwargs: Any) -> Any:
            kinds = type(kwargs["activation"] if "activation" in kwargs else args[6])
            if "activation" in kwargs:
                kwargs["activation"] = kinds.GELU
                return apply(*args, **kwargs)
            return apply(*args[:6], kinds.GELU, *args[7:], **kwargs)

        return other

    return replaced(experts.quant_method.moe_kernel.fused_experts, "apply", make)


@fault("vLLM: one expert takes every token", f"{LAYER}.chosen", "vllm")
def _(bench: Bench) -> AbstractContextManager:
    def make(compute: Callable) -> Callable:
        def biased(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
            weights, chosen = compute(*args, **kwargs)
            has = (chosen == 0).any(1)
            chosen[~has, -1] = 0
            return weights, chosen

        return biased

    return replaced(bench.vllm.model.layers[LAYER].mlp.experts.router, "_compute_routing", make)


@fault("vLLM: bias of the router's choice left out", f"{LAYER}.chosen", "vllm", model="glm4_moe")
def _(bench: Bench) -> AbstractContextManager:
    bias = bench.vllm.model.layers[LAYER].mlp.gate.e_score_correction_bias
    return changed((bias, torch.zeros_like(bias)))


@fault("vLLM: routed scale left out", f"{LAYER}.weights", "vllm", model="glm4_moe")
def _(bench: Bench) -> AbstractContextManager:
    return valued(bench.vllm.model.layers[LAYER].mlp.experts, "routed_scaling_factor", 1.0)


# Of latent attention and the router beside it. The latent vector's norm and what makes heads of it are weights.
of_layer(
    "norm of latent vectors stale", "kv_latent_norm", "self_attn.kv_a_layernorm.weight", noisy, model="deepseek_v3"
)
of_layer(
    "projection to latent vectors stale", "kv_latent", "self_attn.kv_a_proj_with_mqa.weight", noisy, model="deepseek_v3"
)
of_layer(
    "keys and values of other heads", "attention", "self_attn.kv_b_proj.weight", rows_exchanged, model="deepseek_v3"
)
of_layer("shared experts stale", "shared", "mlp.shared_experts.down_proj.weight", noisy, model="deepseek_v3")
of_vllm(
    "latent norm left out",
    "kv_latent_norm",
    lambda layer: (layer.self_attn.kv_a_layernorm, "forward", lambda x: x),
    model="deepseek_v3",
)
of_vllm(
    "routed scale of DeepSeek left out",
    "weights",
    lambda layer: (layer.mlp.experts, "routed_scaling_factor", 1.0),
    model="deepseek_v3",
)


@fault("vLLM: scale of latent attention in decode", f"{LAYER}.attention", "vllm", found=(DECODE,), model="deepseek_v3")
def _(bench: Bench) -> AbstractContextManager:
    attention = vllm_taps.attention_of(bench.vllm.model.layers[LAYER].self_attn)
    return valued(attention.impl, "scale", attention.qk_nope_head_dim**-0.5)  # without the width that is turned


@fault("vLLM: bias of the choice in the weights", f"{LAYER}.weights", "vllm", model="deepseek_v3")
def _(bench: Bench) -> AbstractContextManager:
    moe = bench.vllm.model.layers[LAYER].mlp
    bias = moe.gate.e_score_correction_bias

    def make(compute: Callable) -> Callable:
        def biased(hidden: Tensor, logits: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
            weights, chosen = compute(hidden, logits, *args, **kwargs)
            scores = (logits.float().sigmoid() + bias).gather(1, chosen.long())
            return (scores / scores.sum(-1, keepdim=True)).to(weights), chosen

        return biased

    return replaced(moe.experts.router, "_compute_routing", make)


@fault("vLLM: shared experts left out", f"{LAYER}.mlp", "vllm", model="deepseek_v3")
def _(bench: Bench) -> AbstractContextManager:
    mlp, shared = bench.vllm.model.layers[LAYER].mlp, []

    def make(forward: Callable) -> Callable:
        def without(hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            handle = mlp.shared_experts.register_forward_hook(lambda _module, _inputs, out: shared.append(out.clone()))
            try:
                return forward(hidden, *args, **kwargs) - shared.pop()
            finally:
                handle.remove()

        return without

    return replaced(mlp, "forward", make)


# Of YaRN, of latent queries and of groups of experts.
SCALED = "deepseek_v3 yarn"


def _plain(angles: Tensor, width: int) -> Tensor:
    """The angles that the base alone gives."""
    positions = torch.arange(len(angles)).double()[:, None]
    return positions * YARN["rope_theta"] ** -(torch.arange(0, width, 2).double() / width)


def _other_factor(angles: Tensor, width: int) -> Tensor:
    """Every part of an angle that the factor divided, divided by half of it."""
    plain = _plain(angles, width)
    divided = (plain - angles) / (1 - 1 / YARN["factor"])
    return plain - divided * (1 - 2 / YARN["factor"])


fault("vLLM: yarn left out", "0.q_rope", "vllm", model=SCALED)(rotary_cache(_plain))
fault("vLLM: yarn factor", "0.q_rope", "vllm", model=SCALED)(rotary_cache(_other_factor))


@fault("vLLM: yarn's mscale of cosine and sine left out", "0.q_rope", "vllm", model=SCALED)
def _(bench: Bench) -> AbstractContextManager:
    cache = bench.vllm.model.layers[0].self_attn.rotary_emb.cos_sin_cache
    return changed((cache, cache / bench.checkpoint.rotation.scale))


@fault("vLLM: yarn's mscale of scores left out in decode", f"{LAYER}.attention", "vllm", found=(DECODE,), model=SCALED)
def _(bench: Bench) -> AbstractContextManager:
    attention = vllm_taps.attention_of(bench.vllm.model.layers[LAYER].self_attn)
    return valued(attention.impl, "scale", bench.checkpoint.head_dim**-0.5)


of_layer("norm of latent queries stale", "q_latent_norm", "self_attn.q_a_layernorm.weight", noisy, model=SCALED)
of_layer("projection to latent queries stale", "q_latent", "self_attn.q_a_proj.weight", noisy, model=SCALED)
of_layer("queries of other heads", "q", "self_attn.q_b_proj.weight", rows_exchanged, model=SCALED)
of_vllm(
    "groups of experts left out",
    "chosen",
    lambda layer: (layer.mlp.experts.router, "topk_group", layer.mlp.experts.router.num_expert_group),
    model=SCALED,
)


# Of norms over all heads, and of weights of experts that stay as they are.
of_vllm("norm of each query head", "q_norm", lambda layer: _of_each_head(layer, "q"), model="olmoe")
of_vllm("norm of each key head", "k_norm", lambda layer: _of_each_head(layer, "k"), model="olmoe")
of_vllm(
    "epsilon of the wide norm",
    "q_norm",
    lambda layer: (layer.self_attn.q_norm, "variance_epsilon", 1e-2),
    model="olmoe",
)
of_vllm(
    "weights of OLMoE renormalised",
    "weights",
    lambda layer: (layer.mlp.experts.router, "renormalize", True),
    model="olmoe",
)


@fault("vLLM: norm of keys with the weight of queries", f"{LAYER}.k_norm", "vllm", model="olmoe")
def _(bench: Bench) -> AbstractContextManager:
    attention = bench.vllm.model.layers[LAYER].self_attn
    return changed((attention.k_norm.weight, attention.q_norm.weight[: attention.kv_size]))


def _of_each_head(layer: Any, which: str) -> tuple[Any, str, Any]:
    norm, width = getattr(layer.self_attn, f"{which}_norm"), layer.self_attn.head_dim

    def each(x: Tensor) -> Tensor:
        heads = x.unflatten(-1, (-1, width))
        return F.rms_norm(heads, (width,), None, norm.variance_epsilon).flatten(-2) * norm.weight

    return norm, "forward", each


@fault("vLLM: gate of the shared expert left out", f"{LAYER}.shared", "vllm", model="qwen2_moe")
def _(bench: Bench) -> AbstractContextManager:
    return valued(bench.vllm.model.layers[LAYER].mlp.shared_expert, "expert_gate", None)


@fault("vLLM: router in bf16", f"{LAYER}.router_logits", "vllm")
def _(bench: Bench) -> AbstractContextManager:
    return output_of(bench.vllm.model.layers[LAYER].mlp.gate, lambda out: (out[0].bfloat16().float(), out[1]))


@fault("vLLM: weights of experts applied twice", f"{LAYER}.mlp", "vllm")
def _(bench: Bench) -> AbstractContextManager:
    return output_of(bench.vllm.model.layers[LAYER].mlp, lambda out: out * 0.5)


@fault("vLLM: residual without the embedding's part", f"{LAYER}.residual", "vllm")
def _(bench: Bench) -> AbstractContextManager:
    norm = bench.vllm.model.layers[LAYER].post_attention_layernorm
    return replaced(norm, "forward", lambda forward: lambda x, residual: forward(x, residual * 0.99))


@fault("vLLM: cache in bf16", f"{LAYER}.attention", "vllm")
def _(bench: Bench) -> AbstractContextManager:
    attention = bench.vllm.model.layers[LAYER].self_attn.attn
    make = lambda forward: lambda q, k, v, *a, **kw: forward(q, k.bfloat16().float(), v, *a, **kw)  # noqa: E731
    return replaced(attention, "forward", make)


@fault("vLLM: a cached key lost in decode", f"{LAYER}.attention", "vllm", found=(DECODE,))
def _(bench: Bench) -> AbstractContextManager:
    attention, calls = bench.vllm.model.layers[LAYER].self_attn.attn, []

    def make(forward: Callable) -> Callable:
        def lossy(q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> Any:
            calls.append(len(q))
            return forward(q, k * 0 if len(q) == 1 and len(calls) == 6 else k, v, *args, **kwargs)

        return lossy

    return replaced(attention, "forward", make)


@fault("vLLM: padding of the vocabulary in the softmax", "logprob", "vllm")
def _(bench: Bench) -> AbstractContextManager:
    processor, V = bench.vllm.logits_processor, bench.architecture.vocab_size

    def make(get: Callable) -> Callable:
        def padded(*args: Any, **kwargs: Any) -> Tensor:
            logits = get(*args, **kwargs)
            return F.pad(logits, (0, -V % 64))

        return padded

    return replaced(processor, "_get_logits", make)


@fault("vLLM: head in bf16", "logits", "vllm")
def _(bench: Bench) -> AbstractContextManager:
    make = lambda get: lambda *args, **kwargs: get(*args, **kwargs).bfloat16().float()  # noqa: E731
    return replaced(bench.vllm.logits_processor, "_get_logits", make)


@fault("vLLM: temperature on one side", "logprob", "vllm", found=(DECODE,))
def _(bench: Bench) -> AbstractContextManager:
    def make(generate: Callable) -> Callable:
        return lambda *args, **kw: generate(*args, **kw | ({"temperature": 0.9} if "logprobs" in kw else {}))

    return replaced(vllm_taps, "_generate", make)
