"""Weights between Hugging Face names and the shards of a model in memory, in both directions. The table is `names`.

Export yields whole tensors in Hugging Face names, one at a time, on every rank, for a rollout engine or a checkpoint.
It holds one tensor at a time.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel

from megatron_rl.checkpoint.architecture import Architecture
from megatron_rl.checkpoint.hf_folder import HFFolder
from megatron_rl.checkpoint.names import EMBEDDING, EXPERT, HEAD, Sharding, find_weight
from megatron_rl.errors import InputError


@dataclass(frozen=True)
class Entry:
    """One Megatron parameter of one pipeline stage, in Hugging Face terms."""

    parameter: str  # Megatron's name on the owning stage
    hf_names: tuple[str, ...]  # with {e} for the expert's global number
    sharding: Sharding
    local_expert: int | None  # number among this rank's experts
    stage: int  # pipeline rank that owns it

    def names(self, expert: int | None = None) -> tuple[str, ...]:
        return tuple(name.replace(EXPERT, str(expert)) for name in self.hf_names)


class WeightMap:
    """The table applied to one model on one layout. Build it on every rank: it talks over the pipeline group once."""

    def __init__(self, model: GPTModel, architecture: Architecture):
        self.model, self.architecture = model, architecture
        self.parameters = dict(model.named_parameters())
        self.tp = parallel_state.get_tensor_model_parallel_group()
        self.pp = parallel_state.get_pipeline_model_parallel_group()
        self.ep = parallel_state.get_expert_model_parallel_group()
        self.expert_tp = parallel_state.get_expert_tensor_parallel_group()
        self.num_local_experts = architecture.num_experts // self.ep.size() if architecture.is_moe else 0
        self.entries = [self._entry(name) for name in self.parameters]
        stages: list[list[Entry]] = [self.entries]
        if self.pp.size() > 1:
            stages = [[] for _ in range(self.pp.size())]
            dist.all_gather_object(stages, self.entries, group=self.pp)
        self.all_entries = [entry for stage in stages for entry in stage]

    def _entry(self, name: str) -> Entry:
        in_layer = re.fullmatch(r"decoder\.layers\.(\d+)\.(.+)", name)
        weight, expert = find_weight(in_layer[2] if in_layer else name)
        if weight is HEAD and self.architecture.tie_embeddings:
            weight = EMBEDDING
        prefix = ""
        if in_layer:  # layer_number counts over all stages, from 1
            prefix = f"model.layers.{self.model.decoder.layers[int(in_layer[1])].layer_number - 1}."
        hf_names = tuple(prefix + hf_name for hf_name in weight.hf)
        return Entry(name, hf_names, weight.sharding, expert, self.pp.rank())

    # -- Hugging Face → Megatron

    @torch.no_grad()
    def load(self, path: Path) -> None:
        """Fill this rank's parameters from ``path``. Raises `InputError` where a tensor is missing or misfits."""
        read = HFFolder(path)
        for entry in self.entries:
            expert = None
            if entry.local_expert is not None:
                expert = self.ep.rank() * self.num_local_experts + entry.local_expert
            group = self.expert_tp if expert is not None else self.tp
            tensors = [read(name) for name in entry.names(expert)]
            shard = self._split(entry.sharding, tensors, group.size(), group.rank())
            parameter = self.parameters[entry.parameter]
            if shard.shape != parameter.shape:
                raise InputError(
                    f"model.path: {', '.join(entry.names(expert))} in {path} gives shape {tuple(shard.shape)} for "
                    f"{entry.parameter}, config.json says {tuple(parameter.shape)}"
                )
            parameter.copy_(shard)

    def _split(self, sharding: Sharding, tensors: list[torch.Tensor], size: int, rank: int) -> torch.Tensor:
        if sharding == "vocab":
            (tensor,) = tensors
            rows = self.architecture.padded_vocab_size(size)
            tensor = torch.cat([tensor, tensor.new_zeros(rows - len(tensor), *tensor.shape[1:])])
            return tensor.chunk(size, dim=0)[rank]
        if sharding == "row":
            return tensors[0].chunk(size, dim=1)[rank]
        if sharding == "gated":
            return torch.cat([tensor.chunk(size, dim=0)[rank] for tensor in tensors])
        if sharding == "qkv":
            return join_qkv(tensors, self.architecture.num_kv_heads).chunk(size, dim=0)[rank]
        return tensors[0]

    # -- Megatron → Hugging Face

    def named_parameters(self) -> list[tuple[str, torch.nn.Parameter]]:
        """This rank's parameters in the order of the forward pass, under their Hugging Face names (or several)."""
        first = self.ep.rank() * self.num_local_experts
        return [
            (", ".join(entry.names(first + (entry.local_expert or 0))), self.parameters[entry.parameter])
            for entry in self.entries
        ]

    @torch.no_grad()
    def export(
        self, read: Callable[[torch.nn.Parameter], torch.Tensor] | None = None, dtype: torch.dtype | None = None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """``(Hugging Face name, whole tensor)``, in the same order on every rank.

        ``read``: parameter → the values to send, of its shape; None: its own. ``dtype``: rounded to; None: as read.
        Every rank must consume all of it: gathering is collective.
        """
        local = partial(self._local, read=read or torch.nn.Parameter.detach, dtype=dtype)
        for entry in self.all_entries:
            if entry.parameter == "output_layer.weight" and self.architecture.tie_embeddings:
                continue
            mine = entry.stage == self.pp.rank()
            if entry.local_expert is None:
                tensors = self._merge(entry.sharding, self._gather(local(entry), self.tp)) if mine else None
                yield from zip(entry.names(), self._broadcast(tensors, entry.stage), strict=True)
            else:
                shards = self._gather(local(entry), self.expert_tp) if mine else None
                merged = torch.stack(self._merge(entry.sharding, shards)) if mine else None
                per_rank = self._gather(merged, self.ep) if mine else None
                (stacked,) = self._broadcast([torch.stack(per_rank)] if mine else None, entry.stage)
                for ep_rank, tensors in enumerate(stacked):
                    yield from zip(entry.names(ep_rank * self.num_local_experts + entry.local_expert), tensors)

    def _local(self, entry: Entry, read: Callable, dtype: torch.dtype | None) -> torch.Tensor:
        values = read(self.parameters[entry.parameter])
        return values if dtype is None else values.to(dtype)

    def _gather(self, tensor: torch.Tensor, group: dist.ProcessGroup) -> list[torch.Tensor]:
        if group.size() == 1:
            return [tensor]
        pieces = [torch.empty_like(tensor) for _ in range(group.size())]
        dist.all_gather(pieces, tensor.contiguous(), group=group)
        return pieces

    def _merge(self, sharding: Sharding, shards: list[torch.Tensor]) -> list[torch.Tensor]:
        a = self.architecture
        if sharding == "vocab":
            return [torch.cat(shards)[: a.vocab_size]]
        if sharding == "row":
            return [torch.cat(shards, dim=1)]
        if sharding == "gated":
            halves = [shard.chunk(2, dim=0) for shard in shards]
            return [torch.cat([half[i] for half in halves]) for i in range(2)]
        if sharding == "qkv":
            return split_qkv(torch.cat(shards), a)
        return [shards[0]]

    def _broadcast(self, tensors: list[torch.Tensor] | None, stage: int) -> list[torch.Tensor]:
        if self.pp.size() == 1:
            return tensors
        source = dist.get_global_rank(self.pp, stage)
        shapes = [[(tuple(t.shape), t.dtype) for t in tensors] if tensors is not None else None]
        dist.broadcast_object_list(shapes, src=source, group=self.pp)
        device = next(iter(self.parameters.values())).device
        if tensors is None:
            tensors = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in shapes[0]]
        tensors = [tensor.contiguous() for tensor in tensors]
        for tensor in tensors:
            dist.broadcast(tensor, src=source, group=self.pp)
        return tensors


def join_qkv(tensors: list[torch.Tensor], num_groups: int) -> torch.Tensor:
    """q, k and v, each [heads · D, …] → Megatron's fused rows: per key/value group its queries, its key, its value."""
    blocks = [tensor.reshape(num_groups, -1, *tensor.shape[1:]) for tensor in tensors]
    return torch.cat(blocks, dim=1).flatten(0, 1)


def split_qkv(fused: torch.Tensor, a: Architecture) -> list[torch.Tensor]:
    """The inverse of `join_qkv`."""
    blocks = fused.reshape(a.num_kv_heads, -1, a.head_dim, *fused.shape[1:])
    return [part.flatten(0, 2) for part in blocks.split((a.num_heads // a.num_kv_heads, 1, 1), dim=1)]
