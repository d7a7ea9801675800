"""What a comparison takes of memory, by arithmetic, before anything starts. No torch.

One model is in memory at a time. Beside it lie, on the host: the taps of all witnesses, and the model in float64, whose
weights are read one tensor at a time. On a GPU no more than one tap is put together of the parts of ranks at a time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatron_rl.model.architecture import Architecture
from megatron_rl.model.names import stored_tensors

GIB = 2**30
SPARE_GIB = 3.0
"""Python, and the code of both engines."""
SIZES = {"fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2}
BOUNDED = 16
"""Bytes a number in float64: the value, and its bound."""


def numbers_in_layer(a: Architecture, layer: int) -> dict[str, int]:
    """Numbers that one token has at each tap of ``layer``; of `expert`, inputs and outputs of its K experts."""
    h, m, q, kv = a.hidden_size, a.latent, a.num_heads * a.head_dim, a.num_kv_heads * a.head_dim
    numbers = dict.fromkeys(("input_norm", "o_proj", "residual", "second_norm", "mlp", "output"), h)
    if m is None:
        numbers |= {"q": q, "k": kv, "v": kv, "q_rope": q, "k_rope": kv, "attention": q}
        numbers |= {"q_norm": q, "k_norm": kv} if a.qk_layernorm else {}
    else:
        numbers |= {"q_latent": m.query_rank, "q_latent_norm": m.query_rank} if m.query_rank else {}
        numbers |= {"kv_latent": m.rank + m.rotary_width, "kv_latent_norm": m.rank, "q": q}
        numbers |= {"k": a.num_heads * m.plain_width, "q_rope": a.num_heads * m.rotary_width, "k_rope": m.rotary_width}
        numbers |= dict.fromkeys(("v", "attention"), a.num_heads * m.value_width)
    if not a.moe_layers[layer]:
        return numbers | dict.fromkeys(("gate", "up", "activation"), a.ffn_hidden_size)
    chosen = a.experts_per_token
    numbers |= {"router_logits": a.num_experts, "chosen": chosen, "weights": chosen, "expert": 2 * h * chosen}
    return numbers | ({"shared": h} if a.shared_ffn_hidden_size else {})


@dataclass(frozen=True)
class ParityMemory:
    """Bytes. ``model``: weights of one witness on one rank. ``taps``: of one witness. ``definition``: the
    model in float64. ``largest``: its largest tensor with the absolute values beside it. ``gathered``: on the device,
    the largest tap twice: its parts and the whole."""

    model: int
    taps: int
    definition: int
    largest: int
    gathered: int

    def host(self, num_witnesses: int, model_on_host: bool = True) -> float:
        """Of the process that compares, all together."""
        of_model = self.model if model_on_host else 0
        return of_model + num_witnesses * self.taps + self.definition + self.largest + SPARE_GIB * GIB


def numel(a: Architecture) -> int:
    """Parameters of a model, a tied head counted once."""
    return sum(math.prod(shape) for entry in stored_tensors(a) for shape in entry.hf_shapes)


def parity_memory(a: Architecture, num_tokens: int, dtype: str) -> ParityMemory:
    """Of a comparison over ``num_tokens`` tokens in all. ``dtype``: the wider one of the two engines."""
    size, layers = SIZES[dtype], [numbers_in_layer(a, layer) for layer in range(a.num_layers)]
    outside = 2 * a.hidden_size + a.vocab_size + 1  # embedding, last norm, logits, log-prob
    of_taps = sum(sum(layer.values()) for layer in layers) + outside
    of_model = of_taps - sum(layer.get("expert", 0) for layer in layers)
    widest = max(a.vocab_size, *(max(layer.values()) for layer in layers))
    tensors = [math.prod(shape) for entry in stored_tensors(a) for shape in entry.hf_shapes]
    return ParityMemory(
        model=numel(a) * size,
        taps=num_tokens * of_taps * size,
        definition=num_tokens * of_model * BOUNDED,
        largest=max(tensors) * BOUNDED,
        gathered=2 * num_tokens * widest * size,
    )
