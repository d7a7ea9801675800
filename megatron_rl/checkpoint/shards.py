"""Weights between Hugging Face names and the shards of a model in memory, in both directions. The table is `names`.

Export yields whole tensors in Hugging Face names, one at a time, on every rank, for a rollout engine or a checkpoint.
It holds the tensors of one parameter at a time.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel

from megatron_rl.checkpoint.hf_folder import HFFolder, check_weights
from megatron_rl.errors import InputError
from megatron_rl.model.architecture import Architecture
from megatron_rl.model.families.weights import EMBEDDING, EXPERT, HEAD, ROUTER_BIAS, Sharding
from megatron_rl.model.names import find_weight


@dataclass(frozen=True)
class Entry:
    """One Megatron parameter of one pipeline stage, in Hugging Face terms."""

    parameter: str  # Megatron's name on the owning stage
    hf_names: tuple[str, ...]  # with {e} for the expert's global number
    sharding: Sharding
    local_expert: int | None  # number among this rank's experts
    stage: int  # pipeline rank that owns it
    shape: tuple[int, ...]  # of the shard that each rank holds
    dtype: torch.dtype
    is_buffer: bool  # not trained: sent as it is

    @property
    def is_view(self) -> bool:
        """Whether the tensors of Hugging Face lie in a whole parameter one after another."""
        return self.sharding != "qkv"

    def names(self, expert: int | None = None) -> tuple[str, ...]:
        return tuple(name.replace(EXPERT, str(expert)) for name in self.hf_names)


class WeightMap:
    """The table applied to one model on one layout. Build it on every rank: it talks over the pipeline group once."""

    def __init__(self, model: GPTModel, architecture: Architecture):
        self.model, self.architecture = model, architecture
        self.parameters = dict(model.named_parameters())
        biases = {name: buffer for name, buffer in model.named_buffers() if name.endswith(ROUTER_BIAS.memory)}
        self.parameters |= biases
        self.tp = parallel_state.get_tensor_model_parallel_group()
        self.pp = parallel_state.get_pipeline_model_parallel_group()
        self.ep = parallel_state.get_expert_model_parallel_group()
        self.expert_tp = parallel_state.get_expert_tensor_parallel_group()
        self._tp, self._pp, self._ep, self._etp = (g.size() for g in (self.tp, self.pp, self.ep, self.expert_tp))
        self._device = next(iter(self.parameters.values())).device
        self.num_local_experts = architecture.num_experts // self._ep if architecture.is_moe else 0
        self.entries = [self._entry(name) for name in self.parameters]
        stages: list[list[Entry]] = [self.entries]
        if self._pp > 1:
            stages = [[] for _ in range(self._pp)]
            dist.all_gather_object(stages, self.entries, group=self.pp)
        self.all_entries = [entry for stage in stages for entry in stage]
        self._made: dict[str, tuple[int, Sequence[torch.Tensor]]] = {}  # parameter → where it lies, and views of it
        self._exported = [
            (entry, self._exported_names(entry), entry.is_view and self._is_whole(entry)) for entry in self.all_entries
        ]

    def _exported_names(self, entry: Entry) -> list[tuple[str, ...]]:
        """Of the tensors that `export` makes of ``entry``; for experts by expert-parallel rank."""
        if entry.local_expert is None:
            return [entry.names()]
        return [entry.names(rank * self.num_local_experts + entry.local_expert) for rank in range(self._ep)]

    def _entry(self, name: str) -> Entry:
        in_layer = re.fullmatch(r"decoder\.layers\.(\d+)\.(.+)", name)
        weight, expert = find_weight(in_layer[2] if in_layer else name, self.architecture)
        if weight is HEAD and self.architecture.tie_embeddings:
            weight = EMBEDDING
        prefix = ""
        if in_layer:  # layer_number counts over all stages, from 1
            prefix = f"model.layers.{self.model.decoder.layers[int(in_layer[1])].layer_number - 1}."
        hf_names = tuple(prefix + hf_name for hf_name in weight.hf)
        parameter = self.parameters[name]
        shape, stage, sharding = tuple(parameter.shape), self.pp.rank(), weight.sharding
        if sharding == "column" and (shape,) == weight.shapes(self.architecture):
            sharding = "replicated"
        return Entry(name, hf_names, sharding, expert, stage, shape, parameter.dtype, weight.is_buffer)

    # -- Hugging Face → Megatron

    @torch.no_grad()
    def load(self, path: Path) -> None:
        """Fill this rank's parameters from ``path``. Raises `InputError` where it does not hold the model's tensors."""
        read = HFFolder(path)
        check_weights(read, self.architecture)
        self.fill(read)

    @torch.no_grad()
    def fill(self, read: Callable[[str], torch.Tensor]) -> None:
        """Fill this rank's parameters with the tensors that ``read`` returns for their Hugging Face names."""
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
                    f"model.path: {', '.join(entry.names(expert))} gives shape {tuple(shard.shape)} for "
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
        if sharding == "column":
            return tensors[0].chunk(size, dim=0)[rank]
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
            if not entry.is_buffer
        ]

    def export(
        self, read: Callable[[torch.nn.Parameter], torch.Tensor] | None = None, dtype: torch.dtype | None = None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """``(Hugging Face name, whole tensor)``, in the same order on every rank.

        Args:
            read: parameter → the values to send, of its shape and dtype unless ``dtype`` is given; None: its own.
            dtype: what to round to; None: as read.

        Every rank must consume all of it: gathering is collective. A tensor that no rank has to join is a view of the
        parameter, so one that is kept has to be cloned.
        """
        stage = self.pp.rank()
        for entry, names, is_here in self._exported:
            if entry.parameter == "output_layer.weight" and self.architecture.tie_embeddings:
                continue
            reader, sent_as = (None, None) if entry.is_buffer else (read, dtype)
            if is_here and reader is None and sent_as is None:
                yield from zip(names[0], self._views(entry), strict=True)
                continue
            values = self._local(entry, reader, sent_as) if entry.stage == stage else None
            for ep_rank, shards in enumerate(self._all_shards(entry, values, sent_as)):
                yield from zip(names[ep_rank], self._merge(entry.sharding, shards), strict=True)

    def _local(self, entry: Entry, read: Callable | None, dtype: torch.dtype | None) -> torch.Tensor:
        parameter = self.parameters[entry.parameter]
        values = (parameter if read is None else read(parameter)).detach()
        return values if dtype is None else values.to(dtype)

    def _is_whole(self, entry: Entry) -> bool:
        """Whether every rank holds all of the tensors that ``entry`` stands for."""
        is_expert = entry.local_expert is not None
        tp = self._etp if is_expert else self._tp
        return self._pp == 1 and (tp == 1 or entry.sharding == "replicated") and (self._ep == 1 or not is_expert)

    def _views(self, entry: Entry) -> Sequence[torch.Tensor]:
        """Of this rank's parameter, which holds all: made once, as long as the parameter stays where it is."""
        parameter = self.parameters[entry.parameter]
        place, views = self._made.get(entry.parameter, (None, ()))
        if place != parameter.data_ptr():
            views = self._merge(entry.sharding, [parameter.detach()])
            self._made[entry.parameter] = parameter.data_ptr(), views
        return views

    def _all_shards(
        self, entry: Entry, values: torch.Tensor | None, dtype: torch.dtype | None
    ) -> Iterable[list[torch.Tensor]]:
        """The shards of every tensor that ``entry`` stands for: of one, or of one expert of each expert-parallel rank.

        ``values``: this rank's, None on ranks of other stages. A gathered byte is written once.
        """
        if self._is_whole(entry):
            return [[values]]
        if entry.local_expert is None:
            tp_group, tp, ep = self.tp, self._tp if entry.sharding != "replicated" else 1, 1
        else:
            tp_group, tp, ep = self.expert_tp, self._etp, self._ep
        if values is not None:
            values = self._gather(self._gather(values, tp_group, tp), self.ep, ep)
        else:
            values = torch.empty((ep, tp, *entry.shape), dtype=dtype or entry.dtype, device=self._device)
        if self._pp > 1:
            values = values.contiguous()
            dist.broadcast(values, src=dist.get_global_rank(self.pp, entry.stage), group=self.pp)
        return [list(shards.unbind()) for shards in values.unbind()]

    def _gather(self, tensor: torch.Tensor, group: dist.ProcessGroup, size: int) -> torch.Tensor:
        """[size, *shape], by rank of ``group``."""
        if size == 1:
            return tensor.unsqueeze(0)
        whole = tensor.new_empty(size * len(tensor), *tensor.shape[1:])
        dist.all_gather_into_tensor(whole, tensor.contiguous(), group=group)
        return whole.view(size, *tensor.shape)

    def _merge(self, sharding: Sharding, shards: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        a, is_whole = self.architecture, len(shards) == 1
        if sharding == "vocab":
            return [(shards[0] if is_whole else torch.cat(shards))[: a.vocab_size]]
        if sharding in ("row", "column") and not is_whole:
            return [torch.cat(shards, dim=1 if sharding == "row" else 0)]
        if sharding == "gated":
            halves = [shard.chunk(2) for shard in shards]
            return halves[0] if is_whole else [torch.cat([half[i] for half in halves]) for i in range(2)]
        if sharding == "qkv":
            return split_qkv(shards[0] if is_whole else torch.cat(shards), a)
        return shards


def join_qkv(tensors: list[torch.Tensor], num_groups: int) -> torch.Tensor:
    """q, k and v, each [heads · D, …] → Megatron's fused rows: per key/value group its queries, its key, its value."""
    blocks = [tensor.reshape(num_groups, -1, *tensor.shape[1:]) for tensor in tensors]
    return torch.cat(blocks, dim=1).flatten(0, 1)


def split_qkv(fused: torch.Tensor, a: Architecture) -> list[torch.Tensor]:
    """The inverse of `join_qkv`."""
    blocks = fused.reshape(a.num_kv_heads, -1, a.head_dim, *fused.shape[1:])
    return [part.flatten(0, 2) for part in blocks.split((a.num_heads // a.num_kv_heads, 1, 1), dim=1)]
