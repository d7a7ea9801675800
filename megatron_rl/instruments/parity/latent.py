"""Operators of latent attention (DeepSeek-V3), in float64: the others are those of `definition`.

Keys and values of all heads are made of one latent vector a token; a further part of the key, which is turned by the
rotary embedding, is the same for all heads. vLLM makes no keys and values where it decodes, so it has no taps of them:
its attention is held to the definition on its latent vectors (`arithmetic.latent_attention`).
"""

from __future__ import annotations

import torch

from megatron_rl.instruments.parity import arithmetic
from megatron_rl.instruments.parity.arithmetic import Bounded
from megatron_rl.instruments.parity.definition import Checkpoint, Evaluation, Latent
from megatron_rl.instruments.parity.record import Record

Tensor = torch.Tensor


def evaluation_of(checkpoint: Checkpoint, record: Record, num_layers: int | None = None) -> Evaluation:
    """The operators of ``checkpoint``, whichever attention it has, on what ``record`` holds."""
    kind = Evaluation if checkpoint.latent is None else LatentEvaluation
    return kind(checkpoint, record, num_layers)


class LatentEvaluation(Evaluation):
    @property
    def widths(self) -> Latent:
        assert self.checkpoint.latent is not None
        return self.checkpoint.latent

    def to_heads(self) -> list[str]:
        of_query = ["q_latent", "q_latent_norm"] if self.widths.query else []
        return [*of_query, "kv_latent", "kv_latent_norm", "q", "k", "v"]

    def _through(self, layer: int, before: str, name: str, tap: str) -> Bounded:
        weight = self.weight(f"model.layers.{layer}.self_attn.{name}.weight")
        return arithmetic.linear(self.own(f"{layer}.{before}"), weight, None, self.rounding(f"{layer}.{tap}"))

    def _q_latent(self, layer: int) -> Bounded:
        return self._through(layer, "input_norm", "q_a_proj", "q_latent")

    def _q_latent_norm(self, layer: int) -> Bounded:
        name, tap = f"model.layers.{layer}.self_attn.q_a_layernorm", f"{layer}.q_latent_norm"
        return self._norm(self.own(f"{layer}.q_latent"), name, tap, self.widths.eps)

    def _q(self, layer: int) -> Bounded:
        if self.widths.query:
            return self._through(layer, "q_latent_norm", "q_b_proj", "q")
        return self._through(layer, "input_norm", "q_proj", "q")

    def _kv_latent(self, layer: int) -> Bounded:
        return self._through(layer, "input_norm", "kv_a_proj_with_mqa", "kv_latent")

    def _kv_latent_norm(self, layer: int) -> Bounded:
        name, tap = f"model.layers.{layer}.self_attn.kv_a_layernorm", f"{layer}.kv_latent_norm"
        latent = self.own(f"{layer}.kv_latent")[:, : self.widths.keys]
        return self._norm(latent, name, tap, self.widths.eps)

    def _to_heads(self, layer: int) -> tuple[Tensor, Tensor]:
        """What makes keys [H, D, L] and values [H, V, L] of latent vectors."""
        weight = self.weight(f"model.layers.{layer}.self_attn.kv_b_proj.weight")
        of_heads = weight.view(self.checkpoint.heads, -1, self.widths.keys)
        return of_heads.split([self.widths.plain, self.widths.value], 1)

    def _k(self, layer: int) -> Bounded:
        weight = self._to_heads(layer)[0].flatten(0, 1)
        return arithmetic.linear(self.own(f"{layer}.kv_latent_norm"), weight, None, self.rounding(f"{layer}.k"))

    def _v(self, layer: int) -> Bounded:
        weight = self._to_heads(layer)[1].flatten(0, 1)
        return arithmetic.linear(self.own(f"{layer}.kv_latent_norm"), weight, None, self.rounding(f"{layer}.v"))

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
