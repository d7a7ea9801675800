"""A model's weights by the table of its family: Hugging Face, Megatron in memory, Megatron's checkpoint on disk.

`shards` reads it for a model in memory, cut up by a layout. `conversion` reads it for a checkpoint on disk, where every
tensor is whole. Letters in shapes: those of `Architecture`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from megatron_rl.model.architecture import Architecture
from megatron_rl.model.families import FAMILIES
from megatron_rl.model.families.weights import EXPERT, FINAL_NORM, HEAD, Shapes, Sharding, Weight

EXTRA_STATE = "._extra_state"


# -- in memory


def find_weight(parameter: str, a: Architecture) -> tuple[Weight, int | None]:
    """The row of a parameter in memory, and the number of its expert among this rank's; None where it has none.

    ``parameter``: its name below ``decoder.layers.{i}.``, or whole for those outside of layers. Raises
    NotImplementedError where the table has no row for it.
    """
    family = FAMILIES[a.model_type]
    for weight in (family.embedding, *family.layer, FINAL_NORM, HEAD):
        for spelling in weight.memory:
            match = re.fullmatch(re.escape(spelling).replace(re.escape(EXPERT), r"(\d+)"), parameter)
            if match:
                return weight, int(match[1]) if match.groups() else None
    raise NotImplementedError(f"no Hugging Face name for Megatron's parameter {parameter}")


# -- on disk


@dataclass(frozen=True)
class Stored:
    """One tensor of a Megatron checkpoint on disk, whole, in Hugging Face terms."""

    key: str
    hf_names: tuple[str, ...]
    hf_shapes: Shapes
    sharding: Sharding
    in_fp32: bool = False  # never rounded
    is_buffer: bool = False  # not trained: has no master weights
    part: int | None = None  # which of the Megatron tensors that hold those of Hugging Face together
    parts: tuple[tuple[int, ...], ...] = ()  # the shapes of all of these

    @property
    def is_last(self) -> bool:
        return self.part in (None, len(self.parts) - 1)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the Megatron tensor, without padding of the vocabulary."""
        if self.part is not None:
            return self.parts[self.part]
        if self.sharding == "transposed":
            return self.hf_shapes[0][::-1]
        return (sum(shape[0] for shape in self.hf_shapes), *self.hf_shapes[0][1:])


def stored_tensors(a: Architecture) -> list[Stored]:
    """Every weight of ``a`` in the order of the forward pass."""
    tensors = list(_stored(FAMILIES[a.model_type].embedding, a))
    for layer in range(a.num_layers):
        for experts, weights in _experts_together(a, layer):
            for expert in experts:
                for weight in weights:
                    tensors += _stored(weight, a, layer, expert)
    tensors += _stored(FINAL_NORM, a)
    return tensors if a.tie_embeddings else tensors + list(_stored(HEAD, a))


def _experts_together(a: Architecture, layer: int) -> list[tuple[list[int | None], list[Weight]]]:
    """The rows of a layer: those without experts, then all rows of one expert, and so on."""
    rows = [weight for weight in FAMILIES[a.model_type].layer if weight.is_of(a, layer)]
    of_experts = [weight for weight in rows if EXPERT in weight.hf[0]]
    return [([None], [w for w in rows if w not in of_experts]), (list(range(a.num_experts)), of_experts)]


def _stored(weight: Weight, a: Architecture, layer: int | None = None, expert: int | None = None) -> Iterator[Stored]:
    ours, theirs = ("", "") if layer is None else (f"decoder.layers.{layer}.", f"model.layers.{layer}.")
    keys = [ours + key.replace(EXPERT, str(expert)) for key in weight.disk]
    names = [theirs + name.replace(EXPERT, str(expert)) for name in weight.hf]
    shapes = weight.shapes(a)
    if len(keys) == 1:
        yield Stored(keys[0], tuple(names), shapes, weight.sharding, weight.in_fp32, weight.is_buffer)
    elif weight.sharding in ("interleaved", "delta", "delta_by_head"):
        if weight.sharding == "interleaved":
            parts = ((shapes[0][-1] // 2, *shapes[0][:-1]),) * 2
        else:
            parts = tuple((rows, *shapes[0][1:]) for rows in a.linear.sections[: len(keys)])
        for number, key in enumerate(keys):
            yield Stored(key, tuple(names), shapes, weight.sharding, part=number, parts=parts)
    else:
        for key, name, shape in zip(keys, names, shapes, strict=True):
            yield Stored(key, (name,), (shape,), weight.sharding)


def extra_states(a: Architecture) -> list[str]:
    """Keys of the empty objects that Megatron's linear layers save, and want back when they load."""
    keys = []
    for layer in range(a.num_layers):
        linear = ["linear_qkv", "linear_proj"] if not a.is_linear(layer) else ["in_proj", "out_proj"]
        if a.latent is not None:
            linear[:1] = ["linear_q_proj" if a.latent.query_rank is None else "linear_q_up_proj", "linear_kv_up_proj"]
        modules = [f"self_attention.{name}" for name in linear]
        parts = [f"experts.experts.{e}." for e in range(a.num_experts)] if a.moe_layers[layer] else [""]
        parts += ["shared_experts."] if a.moe_layers[layer] and a.shared_ffn_hidden_size else []
        modules += [f"mlp.{part}linear_fc{i}" for part in parts for i in (1, 2)]
        keys += [f"decoder.layers.{layer}.{module}{EXTRA_STATE}/shard_0_1" for module in modules]
    return keys
