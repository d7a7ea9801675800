"""Models of gated delta nets and gated attention: their definition in float64, and what taps of all engines share."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial, partialmethod
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from megatron_rl.instruments.parity import arithmetic
from megatron_rl.instruments.parity.arithmetic import Bounded
from megatron_rl.instruments.parity.definition import LINEAR, Checkpoint, Evaluation, LatentEvaluation
from megatron_rl.instruments.parity.record import DELTA_NET, Record, on_input, on_output, tensor_of

Tensor = torch.Tensor
Keep = Callable[[str, Tensor], None]


class Heads(NamedTuple):
    """Of keys (and queries) and of values: how many there are, and their widths."""

    keys: int
    values: int
    key_width: int
    value_width: int

    @classmethod
    def of(cls, module: Any) -> Heads:
        """Of a delta net of transformers or vLLM."""
        return cls(module.num_k_heads, module.num_v_heads, module.head_k_dim, module.head_v_dim)


class DeltaEvaluation(Evaluation):
    def __init__(self, checkpoint: Checkpoint, record: Record):
        super().__init__(checkpoint, record)
        keys = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim")
        self.heads = Heads(*(checkpoint.config[f"linear_{key}"] for key in keys))

    def has_delta_net(self, layer: int) -> bool:
        kinds = self.checkpoint.config.get("layer_types")
        if kinds:
            return kinds[layer] == "linear_attention"
        return (layer + 1) % self.checkpoint.config.get("full_attention_interval", 4) != 0

    def mixer(self, layer: int) -> list[str]:
        return list(DELTA_NET) if self.has_delta_net(layer) else [*super().mixer(layer), "gated"]

    def to_heads(self) -> list[str]:
        return ["q", "q_gate", *super().to_heads()[1:]]

    # -- attention

    def _half_of_heads(self, layer: int, which: int) -> Bounded:
        """Of each head's columns of `q_proj`, the query or its gate."""
        both = self._linear(layer, ("q", "q_gate")[which], *LINEAR["q"])
        of_heads = both.view(len(both.value), self.checkpoint.heads, 2, -1)[:, :, which]
        return Bounded(of_heads.value.flatten(1), of_heads.error.flatten(1))

    _q, _q_gate = partialmethod(_half_of_heads, which=0), partialmethod(_half_of_heads, which=1)

    def _gated(self, layer: int) -> Bounded:
        to = self.rounding(f"{layer}.gated")
        share = arithmetic.sigmoid(self.own(f"{layer}.q_gate"), to)
        return arithmetic.scaled(self.own(f"{layer}.attention"), share, to)

    def _o_proj(self, layer: int) -> Bounded:
        delta, attention = ("delta_norm", "linear_attn.out_proj"), ("gated", "self_attn.o_proj")
        return self._linear(layer, "o_proj", *(delta if self.has_delta_net(layer) else attention))

    # -- delta nets

    def _delta_weight(self, layer: int, name: str, kind: str = "") -> Tensor:
        return self.weight(f"model.layers.{layer}.linear_attn.{name}", kind)

    def _projected(self, layer: int, which: str) -> Bounded:
        both = "qkvz" if which in "qkvz" else "ba"
        if f"model.layers.{layer}.linear_attn.in_proj_{both}.weight" in self.checkpoint:  # by heads of keys
            weight = self._delta_weight(layer, f"in_proj_{both}.weight").t()
            weight = split_projection(weight, both, self.heads, by_head=True)[which].t()
        else:
            weight = self._delta_weight(layer, f"in_proj_{which}.weight")
        return arithmetic.linear(self.own(f"{layer}.input_norm"), weight, None, self.rounding(f"{layer}.{which}"))

    _qkv, _z = partialmethod(_projected, which="qkv"), partialmethod(_projected, which="z")
    _b, _a = partialmethod(_projected, which="b"), partialmethod(_projected, which="a")

    def _conv(self, layer: int) -> Bounded:
        weight, to = self._delta_weight(layer, "conv1d.weight").squeeze(1), self.rounding(f"{layer}.conv")
        return arithmetic.causal_conv(self.own(f"{layer}.qkv"), weight, self.record.positions, to)

    def _decay(self, layer: int) -> Bounded:
        bias, log = self._delta_weight(layer, "dt_bias"), self._delta_weight(layer, "A_log", "decay")
        return arithmetic.log_decay(self.own(f"{layer}.a"), bias, log)

    def _strength(self, layer: int) -> Bounded:
        return arithmetic.sigmoid(self.own(f"{layer}.b"), self.rounding(f"{layer}.strength"))

    def _delta(self, layer: int) -> Bounded:
        conv, num, keys = self.own(f"{layer}.conv"), len(self.record.tokens), self.heads.keys * self.heads.key_width
        rows = (slice(0, keys), slice(keys, 2 * keys), slice(2 * keys, None))
        widths = (self.heads.key_width, self.heads.key_width, self.heads.value_width)
        qkv = [
            Bounded(*(x[:, part].reshape(num, -1, width) for x in (conv.value, conv.error)))
            for part, width in zip(rows, widths, strict=True)
        ]
        gates, to = (self.own(f"{layer}.{name}") for name in ("decay", "strength")), self.rounding(f"{layer}.delta")
        return arithmetic.delta_rule(*qkv, *gates, self.record.lengths, to).view(num, -1)

    def _delta_norm(self, layer: int) -> Bounded:
        to, num = self.rounding(f"{layer}.delta_norm"), len(self.record.tokens)
        z, delta = (self.own(f"{layer}.{name}").view(num, -1, self.heads.value_width) for name in ("z", "delta"))
        plain = arithmetic.rms_norm(delta, self._delta_weight(layer, "norm.weight"), self.checkpoint.eps, to)
        return arithmetic.gated(z, plain, F.silu, to).view(num, -1)


def evaluation_of(checkpoint: Checkpoint, record: Record) -> Evaluation:
    """The operators of ``checkpoint``, whichever attention it has, on what ``record`` holds."""
    if checkpoint.family.has_delta_nets:
        return DeltaEvaluation(checkpoint, record)
    return (Evaluation if checkpoint.latent is None else LatentEvaluation)(checkpoint, record)


# -- taps


def split_projection(x: Tensor, names: str, heads: Heads, by_head: bool) -> dict[str, Tensor]:
    """Columns of ``x`` [N, …]: `qkv` and `z`, or `b` and `a`. ``names``: `qkvz` or `ba`, in the order of the columns.
    ``by_head``: this is the order within each head of keys."""
    repeat = heads.values // heads.keys
    value = repeat * heads.value_width
    sizes = [repeat, repeat] if names == "ba" else [heads.key_width, heads.key_width, value, value]
    if by_head:
        parts = [part.flatten(1) for part in x.unflatten(-1, (heads.keys, -1)).split(sizes, -1)]
    else:
        parts = list(x.split([heads.keys * size for size in sizes], -1))
    return {"b": parts[0], "a": parts[1]} if names == "ba" else {"qkv": torch.cat(parts[:3], -1), "z": parts[3]}


def tap_delta_net(stack: ExitStack, keep: Keep, mixer: torch.nn.Module) -> None:
    """Taps around the rule, of a delta net of transformers or vLLM. ``keep``: takes [N, …]."""
    heads = Heads.of(mixer)

    def projected(names: str, output: Any) -> None:
        rows = tensor_of(output).flatten(0, -2)
        by_head = getattr(mixer, "gqa_interleaved_layout", True)  # transformers has one projection for heads alone
        for name, part in split_projection(rows, names, heads, by_head).items():
            keep(name, part)

    for names in ("qkvz", "ba"):
        if hasattr(mixer, f"in_proj_{names}"):
            on_output(stack, getattr(mixer, f"in_proj_{names}"), partial(projected, names))
    for name in ("qkv", "z", "b", "a"):
        if hasattr(mixer, f"in_proj_{name}"):
            on_output(stack, getattr(mixer, f"in_proj_{name}"), lambda out, name=name: keep(name, out.flatten(0, -2)))
    width = heads.values * heads.value_width
    on_input(stack, mixer.norm, lambda inputs: keep("delta", inputs[0].reshape(-1, width)))
    on_input(stack, mixer.out_proj, lambda inputs: keep("delta_norm", inputs[0].flatten(0, -2)))


def keep_rule(keep: Keep, heads: Callable[[], int], _: Any, *qkv: Tensor, g: Tensor, beta: Tensor, **__: Any) -> None:
    """What transformers' rule was given: [B, tokens, heads, …], queries and keys repeated. ``heads``: of keys."""
    query, key, value = qkv
    repeat = query.size(2) // heads()
    parts = (query[:, :, ::repeat], key[:, :, ::repeat], value)
    keep("conv", torch.cat([part.flatten(2) for part in parts], -1).flatten(0, 1))
    keep("decay", g.flatten(0, 1))
    keep("strength", beta.flatten(0, 1))
