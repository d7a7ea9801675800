"""Whether `megatron-rl parity` names the operator in which a fault was planted.

    python -m tools.dev.parity_faults docs/parity.json [--only qwen3_moe]     # all: about two minutes of one core
    python -m tools.dev.parity_faults --show FILE.png --only "position off by one in decode"

Each fault is in one operator of one witness, of a small random model of its family. A fault counts as located if the
first operator beyond its bound is that operator, in that witness alone (or in those that share the fault). Faults of
vLLM's weights go in as a weight update, as in a run. All others replace a number or a function, and put it back.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F

from megatron_rl.exact.layers import PagedCache
from megatron_rl.exact.step import StepForward
from megatron_rl.instruments.parity import learner_taps, report, vllm_taps
from megatron_rl.instruments.parity.compare import compare
from megatron_rl.instruments.parity.record import replaced
from megatron_rl.layers import cpu_layers
from megatron_rl.layers.attention import attend
from megatron_rl.rollout import delta_net
from tools.dev.parity_bench import (
    DECODE,
    GENERATION,
    LAYER,
    PREFILL,
    YARN,
    Bench,
    changed,
    make_models,
    output_of,
    updated,
    valued,
)

Tensor = torch.Tensor
Plant = Callable[["Place"], AbstractContextManager]
ALL_FOUR = (0, 1, 2, 3)
BLOCK = 64  # tokens of a block of vLLM's cache on a CPU
WITNESSES = {
    "vllm": (PREFILL, DECODE),
    "learner": ("learner",),
    "transformers": ("transformers",),
    "exact": ("exact pass", GENERATION),
}


@dataclass(frozen=True)
class Place:
    """Where a fault goes in."""

    bench: Bench
    who: str

    @property
    def model(self) -> Any:
        return getattr(self.bench, self.who)

    @property
    def layer(self) -> Any:
        return (self.model.decoder if self.who == "learner" else self.model.model).layers[LAYER]

    @property
    def attention(self) -> Any:
        return self.layer.self_attention if self.who == "learner" else self.layer.self_attn

    @property
    def delta(self) -> Any:
        if self.who == "learner":
            return self.model.decoder.layers[0].self_attention
        return self.model.model.layers[0].linear_attn

    @property
    def core(self) -> Any:
        if self.who == "learner":
            return self.attention.core_attention
        return vllm_taps.attention_of(self.attention)

    @property
    def router(self) -> Any:
        return self.layer.mlp.router if self.who == "learner" else self.layer.mlp.experts.router

    @property
    def rotary(self) -> Any:
        if self.who == "learner":
            return self.model.rotary_pos_emb
        return self.model.model.layers[0].self_attn.rotary_emb


@dataclass(frozen=True)
class Fault:
    """``tap``: the operator that parity should name (of q and k, whose faults are one, the first). ``only``: the
    experts, or the witness, that it should name; empty: experts are not asked, and each of ``who`` should be named."""

    name: str
    tap: str
    plant: Plant
    model: str
    only: tuple[int | str, ...] = ()

    @property
    def who(self) -> tuple[str, ...]:
        owner = self.name.partition(":")[0]
        several = {"both engines": ("vllm", "learner"), "exact generation": ("exact",)}
        return several.get(owner, (owner.lower(),))

    @property
    def expected(self) -> list[str]:
        every = [name for who in self.who for name in WITNESSES[who]]
        return sorted(name for name in every if name in self.only) or sorted(every)

    @property
    def experts(self) -> list[int]:
        return [expert for expert in self.only if isinstance(expert, int)]

    def records(self, bench: Bench) -> list[Any]:
        """Records of the witnesses of the fault under it, and of sound others."""
        others = [who for who in ("transformers", "learner", "vllm") if who not in self.who]
        return bench.under(self.plant(Place(bench, self.who[0])), self.who, others)


# -- kinds of faults; ``path``: dotted names from a `Place`


def at_path(at: Place, path: str) -> Any:
    return attrgetter(path)(at)


def edit(path: str, change: Callable[[Tensor], Tensor]) -> Plant:
    """A tensor has other values."""
    return lambda at: changed((at_path(at, path), change(at_path(at, path).detach())))


def put(path: str, value: Any, of: str = "") -> Plant:
    """A name has ``value``, or what ``value`` makes of the one at the path ``of``."""

    def plant(at: Place) -> AbstractContextManager:
        owner, _, name = path.rpartition(".")
        return valued(at_path(at, owner), name, value(at_path(at, of)) if of else value)

    return plant


def wrap(path: str, make: Callable[[Callable], Callable]) -> Plant:
    """``make`` changes a function."""
    owner, _, name = path.rpartition(".")
    return lambda at: replaced(at_path(at, owner), name, make)


def out(path: str, change: Callable[[Any], Any]) -> Plant:
    """A module returns ``change`` of what it computes."""
    return lambda at: output_of(at_path(at, path), change)


def configured(path: str, **values: Any) -> Plant:
    """A module of Megatron's has a copy of its configuration, which all share, with other values."""
    return put(f"{path}.config", lambda config: SimpleNamespace(**vars(config) | values), of=f"{path}.config")


def weights(pattern: str, change: Callable[[Tensor], Tensor]) -> Plant:
    """vLLM's weights whose names end with ``pattern`` are changed."""
    return lambda at: updated(at.bench, lambda name, x, _: change(x) if name.endswith(pattern) else x)


def of_layer(pattern: str, change: Callable[[Tensor], Tensor]) -> Plant:
    return weights(f"layers.{LAYER}.{pattern}", change)


def exchanged(a: str, b: str) -> Plant:
    """vLLM's weights of the layer's MLP with ``a`` in their name are those with ``b``, and the other way round."""
    a, b = (f"layers.{LAYER}.mlp.{name}" for name in (a, b))

    def change(name: str, x: Tensor, folder: Any) -> Tensor:
        if a in name:
            return folder(name.replace(a, b))
        return folder(name.replace(b, a)) if b in name else x

    return lambda at: updated(at.bench, change)


def angles(change: Callable[[Tensor, int], Tensor]) -> Plant:
    """vLLM's rotary cache: ``change(angles [positions, R/2], R)`` → angles, of R numbers that are turned."""

    def plant(at: Place) -> AbstractContextManager:
        cache, rotation = at.rotary.cos_sin_cache, at.bench.checkpoint.rotation
        positions = torch.arange(len(cache)).double()[:, None]
        turned = change(positions * rotation.frequencies, cache.size(1))
        return changed((cache, rotation.scale * torch.cat([turned.cos(), turned.sin()], 1)))

    return plant


# -- what they change


def swapped(x: Tensor) -> Tensor:
    """Halves of the rows exchanged."""
    first, second = x.chunk(2)
    return torch.cat([second, first])


def turned(x: Tensor) -> Tensor:
    """Columns exchanged."""
    return swapped(x.t()).t()


def noisy(x: Tensor) -> Tensor:
    return x + 0.01 * x.abs().mean() * torch.randn(x.shape, generator=torch.Generator().manual_seed(2))


def in_bf16(x: Tensor) -> Tensor:
    return x.bfloat16().float()


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


def gelu_and_mul(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    return F.gelu(gate) * up


def plain_angles(turned: Tensor, width: int) -> Tensor:
    """The angles that the base alone gives."""
    positions = torch.arange(len(turned)).double()[:, None]
    return positions * YARN["rope_theta"] ** -(torch.arange(0, width, 2).double() / width)


def other_factor(turned: Tensor, width: int) -> Tensor:
    """Every part of an angle that the factor divided, divided by half of it."""
    plain = plain_angles(turned, width)
    divided = (plain - turned) / (1 - 1 / YARN["factor"])
    return plain - divided * (1 - 2 / YARN["factor"])


def slowed(turned: Tensor, width: int) -> Tensor:
    """Low frequencies slowed by a factor of 4, as yarn does."""
    share = torch.linspace(0, 1, width // 2, dtype=torch.float64)
    return turned * (1 - share + share / 4)


def other_base(at: Place) -> AbstractContextManager:
    frequencies = at.rotary.rotary.inv_freq
    slower = frequencies * 10.0 ** -(torch.arange(len(frequencies)) / (2 * len(frequencies)))

    def change(cos_sin: Tensor) -> Tensor:
        turned = at.rotary.position_ids[:, None] * slower
        return torch.cat([turned.cos(), turned.sin()], -1).view_as(cos_sin)

    return output_of(at.rotary, change)


def late_rows(at: Place) -> AbstractContextManager:
    def make(forward: Callable) -> Callable:
        def late(*args: Any, **kwargs: Any) -> Tensor:
            at.rotary.position_ids = at.rotary.position_ids.roll(1)
            return forward(*args, **kwargs)

        return late

    return replaced(at.rotary, "forward", make)


def window(at: Place) -> AbstractContextManager:
    core = at.core

    def windowed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        n = q.size(2)
        seen = torch.ones(n, n, dtype=torch.bool).tril().triu(-(n - 2))  # the first key is lost to the last query
        return attend(q, k, v, core.softmax_scale, seen)

    return replaced(core, "_attend", lambda own: lambda q, k, v: windowed(q, k, v))


def swapped_experts(at: Place) -> AbstractContextManager:
    first, second = (at.layer.mlp.experts.local_experts[i] for i in (0, 2))
    pairs = [(getattr(first, n).weight, getattr(second, n).weight) for n in ("linear_fc1", "linear_fc2")]
    return changed(*pairs, *((b, a) for a, b in pairs))


def lossy_sum(at: Place) -> AbstractContextManager:
    dispatcher = at.layer.mlp.token_dispatcher

    def make(combine: Callable) -> Callable:
        def lossy(rows: Tensor) -> Tensor:
            rows = rows.clone()
            rows[: int(dispatcher._counts[0])] = 0
            return combine(rows)

        return lossy

    return replaced(dispatcher, "combine_preprocess", make)


def stale_tied_head(at: Place) -> AbstractContextManager:
    stale = noisy(at.model.embedding.word_embeddings.weight.detach())
    return valued(at.model, "shared_embedding_or_output_weight", lambda: stale)


def first_part_turned(at: Place) -> AbstractContextManager:
    """The first numbers of a head are turned, not the last ones."""
    width = at.attention.config.qk_head_dim

    def change(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        query, key, *rest = tensors
        return (query.roll(width, -1), key.roll(width, -1), *rest)

    make = lambda get: lambda *args, **kwargs: change(get(*args, **kwargs))  # noqa: E731
    return replaced(at.attention, "get_query_key_value_tensors", make)


def biased_weights(at: Place) -> AbstractContextManager:
    router = at.layer.mlp.router

    def biased(result: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        probs, chosen = result
        scores = (probs + 0.1 * router.expert_bias) * chosen
        return scores / scores.sum(-1, keepdim=True) * probs.sum(-1, keepdim=True), chosen

    return output_of(router, biased)


def without_yarn(at: Place) -> AbstractContextManager:
    def unscaled(result: tuple[Tensor, float]) -> tuple[Tensor, float]:
        turned = at.rotary.position_ids[:, None] * at.rotary.rotary.inv_freq_extra
        return torch.cat([turned, turned], -1).view_as(result[0]), result[1]

    return output_of(at.rotary, unscaled)


def shifted_steps(at: Place) -> AbstractContextManager:
    def make(begin: Callable) -> Callable:
        def shifted(self: StepForward, longest: int) -> None:
            begin(self, longest + 1)
            self._cos, self._sin = self._cos[1:], self._sin[1:]

        return shifted

    return replaced(StepForward, "begin", make)


def cached_in_bf16(at: Place) -> AbstractContextManager:
    make = lambda write: lambda *args: write(*args[:4], in_bf16(args[4]), args[5])  # noqa: E731
    return replaced(PagedCache, "write", make)


def gelu_of_learners_experts(at: Place) -> AbstractContextManager:
    return valued(cpu_layers, "gated_silu", lambda hidden, probs: gelu_and_mul(hidden) * probs[:, None])


@contextmanager
def both_other_activation(at: Place) -> Iterator[None]:
    learner = Place(at.bench, "learner")
    of_learner = configured("layer.mlp", activation_func=F.gelu)(learner)
    with valued(at.layer.mlp.act_fn, "forward", gelu_and_mul), of_learner:
        yield


@contextmanager
def both_without_biases(at: Place) -> Iterator[None]:
    biases = [layer.self_attention.linear_qkv.bias for layer in at.bench.learner.decoder.layers]
    of_learner = changed(*((bias, torch.zeros_like(bias)) for bias in biases))
    with of_learner, weights(".bias", torch.zeros_like)(at):
        yield


def late_from(first: int) -> Plant:
    """vLLM's positions are one too many in decoding passes from position ``first`` on."""

    def make(forward: Callable) -> Callable:
        def shifted(tokens: Tensor, positions: Tensor, *args: Any, **kwargs: Any) -> Any:
            is_late = len(tokens) == 1 and int(positions) >= first
            return forward(tokens, positions + is_late, *args, **kwargs)

        return shifted

    return wrap("model.model.forward", make)


def halves(at: Place) -> AbstractContextManager:
    rotary = at.rotary

    def turned(positions: Tensor, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        with valued(rotary, "is_neox_style", True):
            return type(rotary).forward_native(rotary, positions, query, key)

    return valued(rotary, "forward", turned)


def gelu_experts(apply: Callable) -> Callable:
    def other(*args: Any, **kwargs: Any) -> Any:
        kinds = type(kwargs["activation"] if "activation" in kwargs else args[6])
        if "activation" in kwargs:
            return apply(*args, **kwargs | {"activation": kinds.GELU})
        return apply(*args[:6], kinds.GELU, *args[7:], **kwargs)

    return other


def to_one_expert(compute: Callable) -> Callable:
    def biased(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        weights_, chosen = compute(*args, **kwargs)
        chosen[~(chosen == 0).any(1), -1] = 0
        return weights_, chosen

    return biased


def biased_routing(at: Place) -> AbstractContextManager:
    moe = at.layer.mlp
    bias = moe.gate.e_score_correction_bias

    def make(compute: Callable) -> Callable:
        def biased(hidden: Tensor, logits: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
            weights_, chosen = compute(hidden, logits, *args, **kwargs)
            scores = (logits.float().sigmoid() + bias).gather(1, chosen.long())
            return (scores / scores.sum(-1, keepdim=True)).to(weights_), chosen

        return biased

    return replaced(moe.experts.router, "_compute_routing", make)


def without_shared(at: Place) -> AbstractContextManager:
    mlp, shared = at.layer.mlp, []

    def make(forward: Callable) -> Callable:
        def without(hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            handle = mlp.shared_experts.register_forward_hook(lambda _module, _inputs, x: shared.append(x.clone()))
            try:
                return forward(hidden, *args, **kwargs) - shared.pop()
            finally:
                handle.remove()

        return without

    return replaced(mlp, "forward", make)


def lost_key(forward: Callable) -> Callable:
    calls: list[int] = []

    def lossy(q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> Any:
        calls.append(len(q))
        return forward(q, k * 0 if len(q) == 1 and len(calls) == 6 else k, v, *args, **kwargs)

    return lossy


def padded_head(at: Place) -> AbstractContextManager:
    padding = (0, -at.bench.architecture.vocab_size % 64)
    return wrap("model.logits_processor._get_logits", then(lambda logits: F.pad(logits, padding)))(at)


def then(change: Callable[[Any], Any]) -> Callable[[Callable], Callable]:
    return lambda function: lambda *args, **kwargs: change(function(*args, **kwargs))


def cooler(function: Callable) -> Callable:
    return lambda *args, **kwargs: function(*args, **kwargs | {"temperature": 0.9})


def cooler_samples(at: Place) -> AbstractContextManager:
    """Where vLLM generates, not where it scores a prompt."""
    make = lambda f: lambda *args, **kw: (cooler(f) if "logprobs" in kw else f)(*args, **kw)  # noqa: E731
    return replaced(vllm_taps, "_generate", make)


def keys_in_bf16(forward: Callable) -> Callable:
    return lambda q, k, v, *args, **kwargs: forward(q, in_bf16(k), v, *args, **kwargs)


def less_residual(forward: Callable) -> Callable:
    return lambda x, residual: forward(x, residual * 0.99)


def rooted(width: int) -> float:
    return width**-0.5


def scaled_by(path: str) -> Plant:
    """The scale of vLLM's latent attention is that of another width."""
    return put("core.impl.scale", rooted, path)


def plain_scores(at: Place) -> AbstractContextManager:
    config = at.attention.config
    return valued(at.core, "softmax_scale", rooted(config.qk_head_dim + config.qk_pos_emb_head_dim))


def unscaled_cache(at: Place) -> AbstractContextManager:
    return edit("rotary.cos_sin_cache", lambda cache: cache / at.bench.checkpoint.rotation.scale)(at)


def other_norm(at: Place) -> AbstractContextManager:
    return edit("attention.k_norm.weight", lambda _: at.attention.q_norm.weight[: at.attention.kv_size])(at)


def renormalised(result: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return result[0] / result[0].sum(-1, keepdim=True), result[1]


def first_norm_of_heads(norm: Any) -> Callable[[Tensor], Tensor]:
    return lambda x: F.rms_norm(x, x.shape[-1:], None, norm.eps) * norm.weight.view(x.shape[-3:])


def norm_of_q_heads(attention: Any, which: str = "q_norm") -> Callable[[Tensor], Tensor]:
    norm, width = getattr(attention, which), attention.head_dim

    def each(x: Tensor) -> Tensor:
        heads = x.unflatten(-1, (-1, width))
        return F.rms_norm(heads, (width,), None, norm.variance_epsilon).flatten(-2) * norm.weight

    return each


def norm_of_k_heads(attention: Any) -> Callable[[Tensor], Tensor]:
    return norm_of_q_heads(attention, "k_norm")


def unpacked(forward: Callable) -> Callable:
    return lambda q, k, v, *a, packed_seq_params=None, **kw: forward(q, k, v, *a, **kw)


def identity(x: Tensor) -> Tensor:
    return x


def later(weight: Tensor) -> Tensor:
    return weight.roll(1, -1)


def uncentred(weight: Tensor) -> Tensor:
    return weight - 1


def one_sequence(rule: Callable) -> Callable:
    return lambda *args, cu_seqlens, **kwargs: rule(*args, cu_seqlens=cu_seqlens[[0, -1]], **kwargs)


def of_rule(name: str, change: Callable[[Tensor | None, list[Tensor]], Tensor | None]) -> Plant:
    """vLLM's rule ``name`` begins with ``change(state, states that it left before)``."""

    def make(rule: Callable) -> Callable:
        left: list[Tensor] = []

        def changed_rule(*args: Any, initial_state: Tensor | None, **kwargs: Any) -> tuple[Tensor, Tensor]:
            outputs, state = rule(*args, initial_state=change(initial_state, left), **kwargs)
            left.append(state)
            return outputs, state

        return changed_rule

    return lambda at: replaced(delta_net, name, make)


def last_left(state: Tensor | None, left: list[Tensor]) -> Tensor | None:
    return left[-1] if left else state


def lost_state(state: Tensor | None, left: list[Tensor]) -> Tensor | None:
    return None if len(left) == 6 else state


EXPERTS, GATE, SECOND_NORM = "layer.mlp.experts.local_experts", "layer.mlp.gate", "layer.post_attention_layernorm"
KERNEL = "layer.mlp.experts.routed_experts.quant_method.moe_kernel.fused_experts"
Q_NORM, WIDTH = "attention.q_layernorm", "attention.qk_head_dim"
NO_SHARED = wrap("layer.mlp.postprocess", lambda combine: lambda output, shared: combine(output, None))
NO_SCALE = put("layer.mlp.experts.routed_scaling_factor", 1.0)
OTHER_MLP = configured("layer.mlp", activation_func=F.gelu)
LEFT_OUT = torch.zeros_like
# Model → its faults: name, operator, how to plant it, and the experts or the witness that alone is named.
TABLE: dict[str, tuple[tuple, ...]] = {
    "qwen3_moe": (
        ("learner: rope base", "0.q_rope", other_base),
        ("learner: positions of a packed row off by one", "0.q_rope", late_rows),
        ("learner: attention across packed sequences", "1.attention", wrap("core.forward", unpacked)),
        ("learner: window off by one", "1.attention", window),
        ("learner: query norm epsilon", "1.q_norm", configured("attention", layernorm_epsilon=1e-2)),
        ("learner: norm epsilon", "1.input_norm", put("layer.input_layernorm.eps", 1e-2)),
        ("learner: final norm stale", "final_norm", edit("model.decoder.final_layernorm.weight", noisy)),
        ("learner: shards of query, key and value exchanged", "1.q", edit("attention.linear_qkv.weight", swapped)),
        (
            "learner: columns of the output projection exchanged",
            "1.o_proj",
            edit("attention.linear_proj.weight", turned),
        ),
        (
            "learner: softmax before the choice of experts",
            "1.weights",
            configured("router", moe_router_pre_softmax=True),
        ),
        ("learner: router in bf16", "1.router_logits", wrap("router.gating", then(in_bf16))),
        (
            "learner: gate and up exchanged in one expert",
            "1.expert",
            edit(f"{EXPERTS}.1.linear_fc1.weight", swapped),
            (1,),
        ),
        ("learner: two experts exchanged", "1.expert", swapped_experts, (0, 2)),
        ("learner: one expert stale", "1.expert", edit(f"{EXPERTS}.3.linear_fc2.weight", noisy), (3,)),
        ("learner: another activation of experts", "0.expert", gelu_of_learners_experts, ALL_FOUR),
        ("learner: one expert's part lost in the sum", "1.mlp", lossy_sum),
        ("learner: temperature on one side", "logprob", lambda at: replaced(learner_taps, "token_logprobs", cooler)),
        ("exact generation: cached keys in bf16", "0.output", cached_in_bf16, (GENERATION,)),
        ("exact generation: positions of steps off by one", "0.output", shifted_steps, (GENERATION,)),
        ("transformers: norm epsilon", "1.second_norm", put("layer.post_attention_layernorm.variance_epsilon", 1e-2)),
        ("vLLM: key heads in another order", "1.k", of_layer("self_attn.k_proj.weight", swapped)),
        ("vLLM: value heads in another order", "1.v", of_layer("self_attn.v_proj.weight", swapped)),
        ("vLLM: query heads in another order", "1.q", of_layer("self_attn.q_proj.weight", swapped)),
        ("vLLM: adapter not merged", "1.q", of_layer("self_attn.q_proj.weight", low_rank)),
        ("vLLM: output projection stale", "1.o_proj", of_layer("self_attn.o_proj.weight", noisy)),
        ("vLLM: fp8 scales transposed", "1.o_proj", of_layer("self_attn.o_proj.weight", scaled_by_block)),
        ("vLLM: second norm stale", "1.second_norm", of_layer("post_attention_layernorm.weight", noisy)),
        ("vLLM: router rows exchanged", "1.router_logits", of_layer("mlp.gate.weight", swapped)),
        ("vLLM: one expert stale", "1.expert", of_layer("mlp.experts.0.down_proj.weight", noisy), (0,)),
        ("vLLM: fp8 scale late", "1.expert", of_layer("mlp.experts.3.up_proj.weight", lambda x: 1.05 * x), (3,)),
        ("vLLM: embedding stale", "embedding", weights("embed_tokens.weight", noisy)),
        ("vLLM: experts' weights in bf16", "0.expert", weights("down_proj.weight", in_bf16), ALL_FOUR),
        ("vLLM: final norm stale", "final_norm", weights("model.norm.weight", noisy)),
        ("vLLM: head stale", "logits", weights("lm_head.weight", noisy)),
        ("vLLM: two experts exchanged", "1.expert", exchanged("experts.1.", "experts.3."), (1, 3)),
        ("vLLM: gate and up exchanged in one expert", "1.expert", exchanged("experts.2.gate_", "experts.2.up_"), (2,)),
        ("vLLM: rope base", "0.q_rope", angles(lambda a, d: a * 10.0 ** -(torch.arange(d // 2) / d))),
        ("vLLM: partial rotary", "0.q_rope", angles(lambda a, d: a * (torch.arange(d // 2) < d // 4))),
        ("vLLM: scaled rope where there is none", "0.q_rope", angles(slowed)),
        ("vLLM: cosines in bf16", "0.q_rope", edit("rotary.cos_sin_cache", in_bf16)),
        ("vLLM: position off by one in decode", "0.q_rope", late_from(0), (DECODE,)),
        ("vLLM: position off by one after a prefix hit", "0.q_rope", late_from(BLOCK), (DECODE,)),
        ("vLLM: norm epsilon", "1.input_norm", put("layer.input_layernorm.variance_epsilon", 1e-2)),
        ("vLLM: key norm epsilon", "1.k_norm", put("attention.k_norm.variance_epsilon", 1e-2)),
        ("vLLM: query norm left out", "1.q_norm", put("attention.q_norm.forward", identity)),
        ("vLLM: scale of attention", "1.attention", put("attention.attn.impl.scale", 0.2)),
        ("vLLM: attention over a window", "1.attention", put("attention.attn.impl.sliding_window", 60)),
        ("vLLM: weights of experts not renormalised", "1.weights", put("router.renormalize", False)),
        ("vLLM: another activation of experts", "1.expert", wrap(f"{KERNEL}.apply", gelu_experts), ALL_FOUR),
        ("vLLM: one expert takes every token", "1.chosen", wrap("router._compute_routing", to_one_expert)),
        ("vLLM: router in bf16", "1.router_logits", out("layer.mlp.gate", lambda x: (in_bf16(x[0]), x[1]))),
        ("vLLM: weights of experts applied twice", "1.mlp", out("layer.mlp", lambda x: x * 0.5)),
        ("vLLM: residual without the embedding's part", "1.residual", wrap(f"{SECOND_NORM}.forward", less_residual)),
        ("vLLM: cache in bf16", "1.attention", wrap("attention.attn.forward", keys_in_bf16)),
        ("vLLM: a cached key lost in decode", "1.attention", wrap("attention.attn.forward", lost_key), (DECODE,)),
        ("vLLM: padding of the vocabulary in the softmax", "logprob", padded_head),
        ("vLLM: head in bf16", "logits", wrap("model.logits_processor._get_logits", then(in_bf16))),
        ("vLLM: temperature on one side", "logprob", cooler_samples, (DECODE,)),
    ),
    "qwen3_next": (
        ("learner: decay with another bias", "0.decay", edit("delta.dt_bias", noisy)),
        ("learner: convolution one token late", "0.conv", edit("delta.conv1d.weight", later)),
        ("learner: state not reset between packed sequences", "0.delta", wrap("delta.gated_delta_rule", one_sequence)),
        (
            "learner: gate of a delta net lost",
            "0.delta_norm",
            put("delta._apply_gated_norm", lambda net: lambda x, _: net.out_norm(x.float()).to(x.dtype), "delta"),
        ),
        ("learner: norm not centred at zero", "1.input_norm", put("layer.input_layernorm.zero_centred", False)),
        ("learner: gate of attention lost", "1.gated", wrap("attention._apply_output_gate", lambda _: lambda x, _: x)),
        ("vLLM: decay with another bias", "0.decay", weights("dt_bias", noisy)),
        ("vLLM: convolution one token late", "0.conv", weights("conv1d.weight", later)),
        ("vLLM: state of the last prompt not reset", "0.delta", of_rule("_of_prompt", last_left), (PREFILL,)),
        ("vLLM: state lost in decode", "0.delta", of_rule("_of_token", lost_state), (DECODE,)),
        ("vLLM: gate of a delta net lost", "0.delta_norm", wrap("delta.norm.forward", lambda f: lambda x, _: f(x))),
        ("vLLM: norm not centred at zero", "1.input_norm", of_layer("input_layernorm.weight", uncentred)),
        (
            "vLLM: gate of attention lost",
            "1.gated",
            wrap("attention._project_qkv_gate", then(lambda parts: (*parts[:3], None))),
        ),
    ),
    "qwen3_5_moe_text": (
        ("learner: rate of decay stale", "0.decay", edit("delta.A_log", noisy)),
        ("vLLM: rate of decay in bf16", "0.decay", weights("A_log", in_bf16)),
        ("vLLM: projection of a delta net stale", "0.qkv", weights("in_proj_qkv.weight", noisy)),
    ),
    "qwen2": (
        ("learner: bias left out", "1.q", edit("attention.linear_qkv.bias", LEFT_OUT)),
        ("both engines: biases left out", "0.q", both_without_biases),
        ("vLLM: key bias left out", "1.k", of_layer("self_attn.k_proj.bias", LEFT_OUT)),
        ("vLLM: query bias left out", "0.q", weights("q_proj.bias", LEFT_OUT)),
    ),
    "llama": (
        ("learner: another activation", "1.activation", OTHER_MLP),
        ("both engines: another activation", "1.activation", both_other_activation),
        ("vLLM: down projection stale", "1.mlp", of_layer("mlp.down_proj.weight", noisy)),
        ("vLLM: gate and up exchanged", "1.gate", exchanged("gate_proj", "up_proj")),
        ("vLLM: another activation", "1.activation", put("layer.mlp.act_fn.forward", gelu_and_mul)),
    ),
    "qwen3": (("learner: tied head stale", "logits", stale_tied_head),),
    "qwen2_moe": (
        ("vLLM: gate of the shared expert left out", "1.shared", put("layer.mlp.shared_expert.expert_gate", None)),
    ),
    "glm4_moe": (
        ("learner: shared expert left out", "1.mlp", NO_SHARED),
        ("learner: another routed scale", "1.weights", out("router", lambda x: (x[0] * 1.01, x[1]))),
        ("vLLM: bias of the router's choice left out", "1.chosen", edit(f"{GATE}.e_score_correction_bias", LEFT_OUT)),
        ("vLLM: routed scale left out", "1.weights", NO_SCALE),
    ),
    "deepseek_v3": (
        ("learner: latent norm left out", "1.kv_latent_norm", put("attention.kv_layernorm.forward", identity)),
        ("learner: rope on the plain part of latent attention", "1.q_rope", first_part_turned),
        ("learner: bias of the choice in the weights", "1.weights", biased_weights),
        ("learner: shared experts of DeepSeek left out", "1.mlp", NO_SHARED),
        ("vLLM: turned pairs are halves", "0.q_rope", halves),
        ("vLLM: norm of latent vectors stale", "1.kv_latent_norm", of_layer("self_attn.kv_a_layernorm.weight", noisy)),
        (
            "vLLM: projection to latent vectors stale",
            "1.kv_latent",
            of_layer("self_attn.kv_a_proj_with_mqa.weight", noisy),
        ),
        ("vLLM: keys and values of other heads", "1.attention", of_layer("self_attn.kv_b_proj.weight", swapped)),
        ("vLLM: shared experts stale", "1.shared", of_layer("mlp.shared_experts.down_proj.weight", noisy)),
        ("vLLM: latent norm left out", "1.kv_latent_norm", put("attention.kv_a_layernorm.forward", identity)),
        ("vLLM: routed scale of DeepSeek left out", "1.weights", NO_SCALE),
        ("vLLM: scale of latent attention in decode", "1.attention", scaled_by("core.qk_nope_head_dim"), (DECODE,)),
        ("vLLM: bias of the choice in the weights", "1.weights", biased_routing),
        ("vLLM: shared experts left out", "1.mlp", without_shared),
    ),
    "deepseek_v3 yarn": (
        ("learner: yarn left out", "0.q_rope", without_yarn),
        ("learner: yarn's mscale of cosine and sine left out", "0.q_rope", out("rotary", lambda x: (x[0], 1.0))),
        ("learner: yarn's mscale of scores left out", "1.attention", plain_scores),
        ("learner: latent query norm left out", "1.q_latent_norm", put("attention.q_layernorm.forward", identity)),
        ("transformers: yarn's mscale of scores left out", "1.attention", put("attention.scaling", rooted, WIDTH)),
        ("vLLM: yarn left out", "0.q_rope", angles(plain_angles)),
        ("vLLM: yarn factor", "0.q_rope", angles(other_factor)),
        ("vLLM: yarn's mscale of cosine and sine left out", "0.q_rope", unscaled_cache),
        (
            "vLLM: yarn's mscale of scores left out in decode",
            "1.attention",
            scaled_by("bench.checkpoint.head_dim"),
            (DECODE,),
        ),
        ("vLLM: norm of latent queries stale", "1.q_latent_norm", of_layer("self_attn.q_a_layernorm.weight", noisy)),
        ("vLLM: projection to latent queries stale", "1.q_latent", of_layer("self_attn.q_a_proj.weight", noisy)),
        ("vLLM: queries of other heads", "1.q", of_layer("self_attn.q_b_proj.weight", swapped)),
        ("vLLM: groups of experts left out", "1.chosen", put("router.topk_group", identity, "router.num_expert_group")),
    ),
    "olmoe": (
        ("learner: norm of each query head", "1.q_norm", put(f"{Q_NORM}.forward", first_norm_of_heads, Q_NORM)),
        (
            "learner: width of the norm of queries",
            "1.q_norm",
            put(f"{Q_NORM}.width", lambda x: x // 2, f"{Q_NORM}.width"),
        ),
        ("learner: weights of OLMoE renormalised", "1.weights", out("router", renormalised)),
        ("vLLM: norm of each query head", "1.q_norm", put("attention.q_norm.forward", norm_of_q_heads, "attention")),
        ("vLLM: norm of each key head", "1.k_norm", put("attention.k_norm.forward", norm_of_k_heads, "attention")),
        ("vLLM: epsilon of the wide norm", "1.q_norm", put("attention.q_norm.variance_epsilon", 1e-2)),
        ("vLLM: weights of OLMoE renormalised", "1.weights", put("router.renormalize", True)),
        ("vLLM: norm of keys with the weight of queries", "1.k_norm", other_norm),
    ),
}
FAULTS = {
    name: Fault(name, tap, plant, model, *only) for model, rows in TABLE.items() for name, tap, plant, *only in rows
}


def examine(bench: Bench, fault: Fault) -> dict[str, Any]:
    """What parity says of a planted fault. JSON-able."""
    result = compare(bench.checkpoint, fault.records(bench))
    first = result.first
    named = first[0].tap if first else None
    witnesses = sorted(e.witness for e in first)
    if not first and result.generation and result.generation[1]:
        named, witnesses = result.generation[1][0], [GENERATION]
    experts = sorted({e for error in first for e in error.experts})
    located = named == fault.tap and witnesses == fault.expected
    return {
        "fault": fault.name,
        "model": fault.model,
        "planted": fault.tap,
        "named": named,
        "witnesses": witnesses,
        "experts": experts,
        "ratio": min(max((e.ratio for e in first), default=0.0), 1e30),
        "located": located and fault.experts in ([], experts),
        "sentence": result.verdict(),
    }


def examine_all(folder: Path, names: Sequence[str]) -> dict[str, Any]:
    """Every fault, model by model; and what the sound witnesses of each model give."""
    models = make_models(folder, list(dict.fromkeys(FAULTS[name].model for name in names)))
    results, clean = {}, {}
    for family, path in models.items():
        with Bench(path) as bench:
            who = ("transformers", "learner", "exact", "vllm")
            result = compare(bench.checkpoint, [record for name in who for record in bench.clean(name)])
            clean[family] = {"beyond": len(result.failures), "operators": len(result.errors)}
            for name in (name for name in names if FAULTS[name].model == family):
                made = results[name] = examine(bench, FAULTS[name])
                print(f"{'located' if made['located'] else 'MISSED ':8} {name}: {made['sentence']}", flush=True)
    return {"clean": clean, "faults": [results[name] for name in names]}


def show(name: str, picture: Path) -> str:
    """Parity's report on one fault; its picture goes to ``picture``."""
    model = FAULTS[name].model
    with tempfile.TemporaryDirectory() as folder, Bench(make_models(Path(folder), [model])[model]) as bench:
        result = compare(bench.checkpoint, FAULTS[name].records(bench))
        report.draw(result).savefig(picture, dpi=100)
        return report.as_text(bench.setup, result)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="JSON file to write; with --show: the picture")
    parser.add_argument("--show", action="store_true", help="draw parity's report on the first of the faults")
    parser.add_argument("--only", default="", help="faults whose name, or whose model, has this in it")
    args = parser.parse_args()
    names = [name for name, fault in FAULTS.items() if args.only in name or args.only == fault.model]
    if args.show:
        print(show(names[0], args.file))
        return
    with tempfile.TemporaryDirectory(prefix="parity-faults-") as folder:
        made = examine_all(Path(folder), names)
    args.file.write_text(json.dumps(made, indent=1) + "\n")
    located = sum(row["located"] for row in made["faults"])
    print(f"{located} of {len(made['faults'])} located; wrote {args.file}")


if __name__ == "__main__":
    main()
