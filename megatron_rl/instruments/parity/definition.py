"""What a checkpoint's folder says that its model computes, in float64, operator by operator.

`Checkpoint` reads config.json and the safetensors files by itself, not through the learner's or vLLM's code, so that a
fault that both engines share is found as well. `Evaluation` computes every operator from a witness's own taps: what
comes out is what the witness should have returned. A tap that a witness does not have is computed from those before it,
with its bound. Without any tap this is the whole model in float64.

`LatentEvaluation` has the operators of latent attention (DeepSeek-V3). Keys and values of all heads are made of one
latent vector a token; a further part of the key, which is turned by the rotary embedding, is the same for all heads.
vLLM makes no keys and values where it decodes, so it has no taps of them: its attention is held to the definition on
its latent vectors (`arithmetic.latent_attention`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partialmethod
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import safe_open

from megatron_rl.errors import InputError
from megatron_rl.instruments.parity import arithmetic
from megatron_rl.instruments.parity.arithmetic import ROTATIONS, Bounded, Rotation, Rounding, rotation_kind, rotation_of
from megatron_rl.instruments.parity.families import FAMILIES, has_experts
from megatron_rl.instruments.parity.record import ExpertRows, Record

Tensor = torch.Tensor
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
}


@dataclass(frozen=True)
class Latent:
    """Widths of latent attention: of the latent vectors of queries (None: there are none) and of keys with values; of
    a head's query and key the parts that stay and that are turned; of a head's value."""

    query: int | None
    keys: int
    plain: int
    turned: int
    value: int
    eps: float = 1e-6
    """Of the norms of latent vectors, whatever rms_norm_eps is: so transformers and DeepSeek's own code have it."""


def _latent(config: dict[str, Any]) -> Latent:
    return Latent(
        query=config.get("q_lora_rank", 1536),
        keys=config.get("kv_lora_rank", 512),
        plain=config.get("qk_nope_head_dim", 128),
        turned=config.get("qk_rope_head_dim", 64),
        value=config.get("v_head_dim", 128),
    )


class Checkpoint:
    """The numbers of config.json, and weights by name, read when they are asked for."""

    def __init__(self, path: Path):
        self.path = Path(path)
        file = self.path / "config.json"
        try:
            self.config: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise InputError(f"parity: {file}: {error}; expected a model's folder in Hugging Face layout") from error
        config, name = self.config, self.config.get("model_type")
        if name not in FAMILIES:
            raise InputError(f"parity: {file}: model_type is {name!r}; there are {', '.join(FAMILIES)}")
        self.family = family = FAMILIES[name]
        if config.get("hidden_act", "silu") not in ACTIVATIONS:
            raise InputError(
                f"parity: {file}: hidden_act is {config['hidden_act']!r}; there are {', '.join(ACTIVATIONS)}"
            )
        self.num_layers: int = config["num_hidden_layers"]
        self.width: int = config["hidden_size"]
        self.heads: int = config["num_attention_heads"]
        self.kv_heads: int = config.get("num_key_value_heads") or self.heads
        self.head_dim: int = config.get("head_dim") or self.width // self.heads
        self.vocabulary: int = config["vocab_size"]
        self.eps: float = config.get("rms_norm_eps", family.eps)
        self.head_norms = family.head_norms
        if family.head_norms == "use_qk_norm":
            self.head_norms = "each" if config.get("use_qk_norm", False) else None
        self.num_experts: int = next((config[key] for key in family.experts if config.get(key)), 0)
        self.top: int = config.get("num_experts_per_tok") or family.top
        self.renormalised: bool = config.get("norm_topk_prob", family.renormalised)
        self.has_sigmoid_router = family.sigmoid
        self.routed_scale: float = config.get("routed_scaling_factor", family.scale) if family.sigmoid else 1.0
        self.shared = f"mlp.{family.shared}" if family.shared else None
        self.groups: tuple[int, int] = (
            config.get("n_group", family.groups[0]),
            config.get("topk_group", family.groups[1]),
        )
        """Groups of experts, and of how many of them a token may choose."""
        self.latent = _latent(config) if family.is_latent else None
        if self.latent:
            self.head_dim = self.latent.plain + self.latent.turned
        self.activation = ACTIVATIONS[config.get("hidden_act", "silu")]
        self._files = self._where()

    def is_moe(self, layer: int) -> bool:
        return self.num_experts > 0 and has_experts(self.family, self.config, layer)

    def _where(self) -> dict[str, Path]:
        index = self.path / "model.safetensors.index.json"
        if index.is_file():
            return {name: self.path / file for name, file in json.loads(index.read_text())["weight_map"].items()}
        single = self.path / "model.safetensors"
        if not single.is_file():
            raise InputError(f"parity: {self.path} holds neither {single.name} nor {index.name}")
        with safe_open(single, "pt") as file:
            return dict.fromkeys(file.keys(), single)

    def __contains__(self, name: str) -> bool:
        return self._place(name)[0] in self._files

    def weight(self, name: str, dtype: torch.dtype) -> Tensor:
        """The tensor ``name``, as most families call it, rounded to ``dtype`` as an engine holds it, in float64."""
        place, rows = self._place(name)
        with safe_open(self._files[place], "pt") as file:
            tensor = file.get_tensor(place)
        return tensor[rows].to(dtype).double()

    def _place(self, name: str) -> tuple[str, slice]:
        """What ``name`` is called here, and its rows there."""
        for others, own in self.family.names:
            name = name.replace(others, own)
        for which in "qkv" if self.family.packed else "":
            if f"self_attn.{which}_proj" in name:
                q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
                rows = {"q": slice(0, q), "k": slice(q, q + kv), "v": slice(q + kv, q + 2 * kv)}[which]
                return name.replace(f"self_attn.{which}_proj", self.family.packed), rows
        return name, slice(None)

    @cached_property
    def rotation(self) -> Rotation:
        """The rotary embedding. Raises `InputError` for a kind that has no definition."""
        rope = self.config.get("rope_parameters") or self.config.get("rope_scaling") or {}
        theta = rope.get("rope_theta") or self.config.get("rope_theta") or 10000.0
        share = rope.get("partial_rotary_factor") or self.config.get("partial_rotary_factor") or self.family.turned
        turned = self.latent.turned if self.latent else int(self.head_dim * share)
        rotation = rotation_of(rope, theta, turned, self.config.get("max_position_embeddings", 0))
        if rotation is None:
            raise InputError(
                f"parity: {self.path}/config.json: rope_type is {rotation_kind(rope)!r}; there are "
                f"{', '.join(ROTATIONS)}"
            )
        return rotation


LINEAR = {
    "q": ("input_norm", "self_attn.q_proj"),
    "k": ("input_norm", "self_attn.k_proj"),
    "v": ("input_norm", "self_attn.v_proj"),
    "q_latent": ("input_norm", "self_attn.q_a_proj"),
    "kv_latent": ("input_norm", "self_attn.kv_a_proj_with_mqa"),
    "o_proj": ("attention", "self_attn.o_proj"),
    "router_logits": ("second_norm", "mlp.gate"),
    "gate": ("second_norm", "mlp.gate_proj"),
    "up": ("second_norm", "mlp.up_proj"),
    "mlp": ("activation", "mlp.down_proj"),
}
"""Operators that are one product, each with its input and its weight."""


class Evaluation:
    """Operators of ``checkpoint`` on what ``record`` holds: those of `LINEAR`, and a method for each other one."""

    def __init__(self, checkpoint: Checkpoint, record: Record):
        self.checkpoint, self.record = checkpoint, record
        self._known: dict[str, Bounded] = {}

    def taps(self) -> Iterator[str]:
        """Names of all operators, in the order of the pass."""
        c = self.checkpoint
        yield "embedding"
        for layer in range(c.num_layers):
            names = ["input_norm", *self.mixer(layer), "o_proj", "residual", "second_norm"]
            moe = ["router_logits", "chosen", "weights", "expert", *(["shared"] if c.shared else []), "mlp"]
            names += moe if c.is_moe(layer) else ["gate", "up", "activation", "mlp"]
            yield from (f"{layer}.{name}" for name in [*names, "output"])
        yield from ("final_norm", "logits", "logprob")

    def mixer(self, layer: int) -> list[str]:
        """Operators between the norm of a layer's input and the projection back."""
        return [*self.to_heads(), "q_rope", "k_rope", "attention"]

    def to_heads(self) -> list[str]:
        """Operators between the norm of a layer's input and the rotation."""
        return ["q", "k", "v", *(["q_norm", "k_norm"] if self.checkpoint.head_norms else [])]

    def own(self, tap: str) -> Bounded:
        """What the witness has at ``tap``, exact; where it has nothing, what follows from its taps before."""
        if tap not in self._known:
            recorded = self.record.taps.get(tap)
            is_head_norm = tap.endswith((".q_norm", ".k_norm"))
            if recorded is None and is_head_norm and self.checkpoint.head_norms is None:
                return self.own(tap.removesuffix("_norm"))
            self._known[tap] = self.define(tap) if recorded is None else Bounded.exact(recorded)
        return self._known[tap]

    def forget(self, layer: int) -> None:
        """Give up what is kept of a layer, but for its output."""
        for tap in [tap for tap in self._known if tap.startswith(f"{layer}.") and tap != f"{layer}.output"]:
            del self._known[tap]

    # -- the definitions

    def define(self, tap: str) -> Bounded:
        """What an operator should return for the witness's own inputs, with the bound of its type."""
        layer, _, name = tap.rpartition(".")
        if not layer:
            return getattr(self, f"_{name}")()
        operator = getattr(self, f"_{name}", None)
        return self._linear(int(layer), name, *LINEAR[name]) if operator is None else operator(int(layer))

    def rounding(self, tap: str, *others: str) -> Rounding:
        dtypes = [self.record.taps[t].dtype for t in (tap, *others) if t in self.record.taps]
        return Rounding.of(*(dtypes or [self.record.dtype]), product=self.record.product)

    def weight(self, name: str, kind: str = "") -> Tensor:
        return self.checkpoint.weight(name, self.record.weight_dtypes.get(kind, self.record.dtype))

    def _embedding(self) -> Bounded:
        return Bounded.exact(self.weight("model.embed_tokens.weight")[self.record.tokens])

    def _before(self, layer: int) -> Bounded:
        return self.own(f"{layer - 1}.output" if layer else "embedding")

    def _norm(self, x: Bounded, name: str, tap: str, eps: float | None = None) -> Bounded:
        to = self.rounding(tap)
        if self.record.rescaled and not tap.endswith("latent_norm"):
            x = x.rounded(to)
        weight, eps = self.weight(f"{name}.weight"), eps or self.checkpoint.eps
        if self.checkpoint.family.has_delta_nets:  # centred at zero; the sum with one may be rounded
            return arithmetic.rms_norm(x, 1 + weight, eps, to).rounded(to)
        return arithmetic.rms_norm(x, weight, eps, to)

    def _sum(self, x: Bounded, y: Bounded, to: Rounding) -> Bounded:
        """x + y, in the residual stream or of experts."""
        if self.record.rescaled:
            return arithmetic.add(x.rounded(to), y.rounded(to), to).rounded(to)
        return arithmetic.add(x, y, to)

    def _input_norm(self, layer: int) -> Bounded:
        return self._norm(self._before(layer), f"model.layers.{layer}.input_layernorm", f"{layer}.input_norm")

    def _linear(self, layer: int, tap: str, before: str, name: str) -> Bounded:
        """The product of the operator ``before`` and the weight ``name`` of a layer."""
        name, x = f"model.layers.{layer}.{name}", self.own(f"{layer}.{before}")
        bias = self.weight(f"{name}.bias") if f"{name}.bias" in self.checkpoint else None
        weight = self.weight(f"{name}.weight", "router" if tap == "router_logits" else "")
        parts = self.record.parts if tap in ("o_proj", "mlp") else 1
        return arithmetic.linear(x, weight, bias, self.rounding(f"{layer}.{tap}"), parts)

    def _heads(self, x: Bounded) -> Bounded:
        return x.view(len(x.value), -1, self.checkpoint.head_dim)

    def _head_norm(self, layer: int, which: str) -> Bounded:
        x = self.own(f"{layer}.{which}")
        x = x if self.checkpoint.head_norms == "wide" else self._heads(x)
        out = self._norm(x, f"model.layers.{layer}.self_attn.{which}_norm", f"{layer}.{which}_norm")
        return out.view(len(out.value), -1)

    _q_norm, _k_norm = partialmethod(_head_norm, which="q"), partialmethod(_head_norm, which="k")

    def _rope(self, layer: int, which: str) -> Bounded:
        x = self._heads(self.own(f"{layer}.{which}_norm"))
        return self.rotated(x, f"{layer}.{which}_rope")

    def rotated(self, x: Bounded, tap: str) -> Bounded:
        """``x`` [N, heads, R or more] → [N, heads · …]."""
        rotation, positions = self.checkpoint.rotation, self.record.positions.double()[:, None]
        angles = positions * rotation.frequencies
        out = arithmetic.rotate(x, Bounded(angles, angles * rotation.uncertain), self.rounding(tap), rotation.scale)
        return out.view(len(out.value), -1)

    _q_rope, _k_rope = partialmethod(_rope, which="q"), partialmethod(_rope, which="k")

    def _attention(self, layer: int) -> Bounded:
        qkv = (self._heads(self.own(f"{layer}.{name}")) for name in ("q_rope", "k_rope", "v"))
        out = arithmetic.attention(*qkv, self.record.lengths, self.rounding(f"{layer}.attention"))
        return out.view(len(out.value), -1)

    def _residual(self, layer: int) -> Bounded:
        return self._sum(self._before(layer), self.own(f"{layer}.o_proj"), self.rounding(f"{layer}.residual"))

    def _second_norm(self, layer: int) -> Bounded:
        name = f"model.layers.{layer}.post_attention_layernorm"
        return self._norm(self.own(f"{layer}.residual"), name, f"{layer}.second_norm")

    def _activation(self, layer: int) -> Bounded:
        gate, up = self.own(f"{layer}.gate"), self.own(f"{layer}.up")
        return arithmetic.gated(gate, up, self.checkpoint.activation, self.rounding(f"{layer}.activation"))

    def _mlp(self, layer: int) -> Bounded:
        if self.checkpoint.is_moe(layer):
            return self._sum_of_experts(layer, self.rounding(f"{layer}.mlp"))
        return self._linear(layer, "mlp", *LINEAR["mlp"])

    def _output(self, layer: int) -> Bounded:
        to = self.rounding(f"{layer}.output")
        return self._sum(self.own(f"{layer}.residual"), self.own(f"{layer}.mlp"), to)

    def _final_norm(self) -> Bounded:
        return self._norm(self.own(f"{self.checkpoint.num_layers - 1}.output"), "model.norm", "final_norm")

    def _logits(self) -> Bounded:
        is_tied = self.checkpoint.config.get("tie_word_embeddings")
        weight = self.weight("model.embed_tokens.weight" if is_tied else "lm_head.weight", "head")
        return arithmetic.linear(self.own("final_norm"), weight, None, self.rounding("logits"))

    def _logprob(self) -> Bounded:
        rows = self.record.predicting
        logits = self.own("logits")[rows, : self.checkpoint.vocabulary]
        return arithmetic.logprobs(logits, self.record.tokens[rows + 1], self.record.temperature)

    # -- experts

    def chosen(self, layer: int) -> Tensor:
        """Experts [N, K] of each token: the witness's, or the largest of its logits, in the order of their numbers."""
        recorded = self.record.taps.get(f"{layer}.chosen")
        if recorded is not None:
            return recorded.long()
        scores = self.choice_scores(layer).value
        groups, taken = self.checkpoint.groups
        if taken < groups:
            of_group = scores.unflatten(-1, (groups, -1)).topk(2).values.sum(-1)
            inside = torch.zeros_like(of_group, dtype=torch.bool).scatter(1, of_group.topk(taken).indices, True)
            scores = scores.masked_fill(~inside.repeat_interleave(scores.size(1) // groups, 1), -torch.inf)
        return scores.topk(self.checkpoint.top).indices.sort(-1).values

    def choice_scores(self, layer: int) -> Bounded:
        """[N, E]: the largest decide. Logits, or sigmoids with a bias."""
        logits = self.own(f"{layer}.router_logits")
        if not self.checkpoint.has_sigmoid_router:
            return logits
        to = self.rounding(f"{layer}.router_logits")
        scores = arithmetic.sigmoid(logits, to)
        name = f"model.layers.{layer}.mlp.gate.e_score_correction_bias"
        return Bounded(scores.value + self.checkpoint.weight(name, torch.float32), scores.error).rounded(to)

    def _weights(self, layer: int) -> Bounded:
        to = self.rounding(f"{layer}.weights", f"{layer}.router_logits")
        logits = self.own(f"{layer}.router_logits")
        if self.checkpoint.has_sigmoid_router:
            return arithmetic.sigmoid_weights(logits, self.chosen(layer), self.checkpoint.routed_scale, to)
        return arithmetic.route_weights(logits, self.chosen(layer), self.checkpoint.renormalised, to)

    def _feed_forward(self, name: str, x: Bounded, to: Rounding, parts: int = 1) -> Bounded:
        """The feed-forward block ``name`` of the rows ``x`` [M, width]."""
        gate, up = (
            arithmetic.linear(x, self.weight(f"{name}.{which}_proj.weight"), None, to) for which in ("gate", "up")
        )
        inner = arithmetic.gated(gate, up, self.checkpoint.activation, to)
        return arithmetic.linear(inner, self.weight(f"{name}.down_proj.weight"), None, to, parts)

    def expert(self, layer: int, number: int, x: Bounded, to: Rounding) -> Bounded:
        """Expert ``number`` of the rows ``x``, before its weight."""
        return self._feed_forward(f"model.layers.{layer}.mlp.experts.{number}", x, to)

    def _shared(self, layer: int) -> Bounded:
        name, x = f"model.layers.{layer}.{self.checkpoint.shared}", self.own(f"{layer}.second_norm")
        to = self.rounding(f"{layer}.shared")
        out = self._feed_forward(name, x, to, self.record.parts)
        if f"{name}_gate.weight" not in self.checkpoint:
            return out
        share = arithmetic.sigmoid(arithmetic.linear(x, self.weight(f"{name}_gate.weight"), None, to), to)
        return arithmetic.scaled(out, share, to)

    def expert_rows(self, layer: int, group: ExpertRows) -> Bounded:
        """What ``group.outputs`` should be: with its scales, which may come before or after the projection down."""
        to = Rounding.of(group.outputs.dtype, product=self.record.product)
        out = self.expert(layer, group.expert, Bounded.exact(group.inputs), to)
        return arithmetic.scaled(out, Bounded.exact(group.scales[:, None]), to).rounded(to)

    def _sum_of_experts(self, layer: int, to: Rounding) -> Bounded:
        """Σ weight · expert. A witness whose experts were called one by one has their outputs for each token."""
        x, chosen = self.own(f"{layer}.second_norm"), self.chosen(layer)
        weights = self.own(f"{layer}.weights")
        total = Bounded(torch.zeros_like(x.value), torch.zeros_like(x.value))
        for number in chosen.unique().tolist():
            rows, column = (chosen == number).nonzero(as_tuple=True)
            out = self.expert(layer, number, x[rows], to)
            # The product, and its place in a sum of K terms.
            part = arithmetic.scaled(out, weights[rows, column].view(-1, 1), to).rounded(to, times=chosen.size(1))
            total.value.index_add_(0, rows, part.value)
            total.error.index_add_(0, rows, part.error)
        total = total.rounded(to)
        return total if self.checkpoint.shared is None else self._sum(total, self.own(f"{layer}.shared"), to)


class LatentEvaluation(Evaluation):
    @property
    def widths(self) -> Latent:
        assert self.checkpoint.latent is not None
        return self.checkpoint.latent

    def to_heads(self) -> list[str]:
        of_query = ["q_latent", "q_latent_norm"] if self.widths.query else []
        return [*of_query, "kv_latent", "kv_latent_norm", "q", "k", "v"]

    def _q_latent_norm(self, layer: int) -> Bounded:
        name, tap = f"model.layers.{layer}.self_attn.q_a_layernorm", f"{layer}.q_latent_norm"
        return self._norm(self.own(f"{layer}.q_latent"), name, tap, self.widths.eps)

    def _q(self, layer: int) -> Bounded:
        by_latent = ("q_latent_norm", "self_attn.q_b_proj")
        return self._linear(layer, "q", *(by_latent if self.widths.query else LINEAR["q"]))

    def _kv_latent_norm(self, layer: int) -> Bounded:
        name, tap = f"model.layers.{layer}.self_attn.kv_a_layernorm", f"{layer}.kv_latent_norm"
        latent = self.own(f"{layer}.kv_latent")[:, : self.widths.keys]
        return self._norm(latent, name, tap, self.widths.eps)

    def _to_heads(self, layer: int) -> tuple[Tensor, Tensor]:
        """What makes keys [H, D, L] and values [H, V, L] of latent vectors."""
        weight = self.weight(f"model.layers.{layer}.self_attn.kv_b_proj.weight")
        of_heads = weight.view(self.checkpoint.heads, -1, self.widths.keys)
        return of_heads.split([self.widths.plain, self.widths.value], 1)

    def _of_latent(self, layer: int, which: int) -> Bounded:
        weight, tap = self._to_heads(layer)[which].flatten(0, 1), f"{layer}.{'kv'[which]}"
        return arithmetic.linear(self.own(f"{layer}.kv_latent_norm"), weight, None, self.rounding(tap))

    _k, _v = partialmethod(_of_latent, which=0), partialmethod(_of_latent, which=1)

    def _turned(self, layer: int, x: Bounded, which: str) -> Bounded:
        """``x`` [N, heads, R] → [N, heads · R]. Pairs that are turned are neighbours; they come out in halves."""
        return self.rotated(arithmetic.rotated_pairs(x), f"{layer}.{which}_rope")

    def _q_rope(self, layer: int) -> Bounded:
        return self._turned(layer, self._heads(self.own(f"{layer}.q"))[..., self.widths.plain :], "q")

    def _k_rope(self, layer: int) -> Bounded:
        return self._turned(layer, self.own(f"{layer}.kv_latent")[:, None, self.widths.keys :], "k")

    def _attention(self, layer: int) -> Bounded:
        to, num, w = self.rounding(f"{layer}.attention"), len(self.record.tokens), self.widths
        query = self._heads(self.own(f"{layer}.q"))[..., : w.plain]
        query_rope = self.own(f"{layer}.q_rope").view(num, -1, w.turned)
        key_rope = self.own(f"{layer}.k_rope")
        scale = self.checkpoint.head_dim**-0.5 * self.checkpoint.rotation.of_scores
        if f"{layer}.k" not in self.record.taps:
            latent = self.own(f"{layer}.kv_latent_norm")
            weights = self._to_heads(layer)
            parts = (query, query_rope, latent, key_rope, *weights)
            return arithmetic.latent_attention(*parts, self.record.lengths, to, scale).view(num, -1)
        heads = self.checkpoint.heads
        key, value = (self.own(f"{layer}.{name}").view(num, heads, -1) for name in "kv")
        shared = Bounded(*(x[:, None].expand(-1, heads, -1) for x in (key_rope.value, key_rope.error)))
        parts = (arithmetic.beside(query, query_rope), arithmetic.beside(key, shared), value)
        return arithmetic.attention(*parts, self.record.lengths, to, scale).view(num, -1)
