"""The shards of this rank: weights between Hugging Face names and a model in memory, and the state of a checkpoint.

Export yields whole tensors in Hugging Face names, one at a time, on every rank, for a rollout engine or a checkpoint.
It holds the tensors of one parameter at a time.

Every rank writes an equal share and needs no other rank for it. Of the optimizer it writes the part that it owns: the
fp32 master weights and Adam's two moments. Data-parallel ranks hold the same weights, so each writes an equal part of
them. A share is a range of flattened tensors. The file has it as boxes of whole tensors, under the names of Megatron's
``fully_reshardable`` format, so that every layout can read it. Megatron's own builder of that format gathers each
buffer on all data-parallel ranks first, which takes 12 bytes a parameter of the rank's model part.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.optimizer import param_group_identifier_keys
from megatron.core.ssm.utils import _split_tensor_factory
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
from megatron.core.utils import unwrap_model

from megatron_rl.checkpoint.fused import PARTED, join_qkv, put_together, sections_of, split_qkv, take_apart
from megatron_rl.checkpoint.hf_folder import HFFolder, check_weights
from megatron_rl.checkpoint.state import model_tensors
from megatron_rl.errors import InputError
from megatron_rl.model.architecture import Architecture
from megatron_rl.model.families import FAMILIES
from megatron_rl.model.families.weights import EXPERT, HEAD, ROUTER_BIAS, Sharding
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
    in_fp32: bool  # sent as it is
    is_buffer: bool  # not trained

    @property
    def is_view(self) -> bool:
        """Whether the tensors of Hugging Face lie in a whole parameter one after another."""
        return self.sharding == "gated" or self.sharding not in ("qkv", "packed_qkv", "transposed", *PARTED)

    def names(self, expert: int | None = None) -> tuple[str, ...]:
        return tuple(name.replace(EXPERT, str(expert)) for name in self.hf_names)


class WeightMap:
    """The table applied to one model on one layout. Build it on every rank: it talks over the pipeline group once."""

    def __init__(self, model: GPTModel, architecture: Architecture):
        self.model, self.architecture = model, architecture
        self.parameters = {  # and buffers that are a part of the model, not a count
            name: tensor
            for name, tensor in model_tensors(model).items()
            if isinstance(tensor, torch.nn.Parameter) or name.endswith(ROUTER_BIAS.memory)
        }
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
        """Names of the tensors that `export` makes of ``entry``; for experts by expert-parallel rank."""
        if entry.local_expert is None:
            return [entry.names()]
        return [entry.names(rank * self.num_local_experts + entry.local_expert) for rank in range(self._ep)]

    def _entry(self, name: str) -> Entry:
        in_layer = re.fullmatch(r"decoder\.layers\.(\d+)\.(.+)", name)
        weight, expert = find_weight(in_layer[2] if in_layer else name, self.architecture)
        if weight is HEAD and self.architecture.tie_embeddings:
            weight = FAMILIES[self.architecture.model_type].embedding
        prefix = ""
        if in_layer:  # layer_number counts over all stages, from 1
            prefix = f"model.layers.{self.model.decoder.layers[int(in_layer[1])].layer_number - 1}."
        hf_names = tuple(prefix + hf_name for hf_name in weight.hf)
        parameter = self.parameters[name]
        shape, stage, sharding = tuple(parameter.shape), self.pp.rank(), weight.sharding
        if sharding == "column" and (shape,) == weight.shapes(self.architecture):
            sharding = "replicated"
        return Entry(name, hf_names, sharding, expert, stage, shape, parameter.dtype, weight.in_fp32, weight.is_buffer)

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
        if sharding in PARTED:
            parts = take_apart(sharding, tensors, self.architecture)
            return torch.cat([part.chunk(size, dim=0)[rank] for part in parts])
        if sharding in ("qkv", "packed_qkv"):
            return join_qkv(tensors, self.architecture).chunk(size, dim=0)[rank]
        if sharding == "transposed":
            return tensors[0].t()
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
        """Yield ``(Hugging Face name, whole tensor)``, in the same order on every rank.

        Args:
            read: returns the values to send for a parameter, in its shape, and in its dtype unless ``dtype`` is given.
                None sends the parameter's own values.
            dtype: the type to round to. None keeps the type that was read.

        Every rank must consume all of it: gathering is collective. A tensor that no rank has to join is a view of the
        parameter, so one that is kept has to be cloned.
        """
        stage = self.pp.rank()
        for entry, names, is_here in self._exported:
            if entry.parameter == "output_layer.weight" and self.architecture.tie_embeddings:
                continue
            reader, sent_as = None if entry.is_buffer else read, None if entry.in_fp32 else dtype
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
        """Return whether every rank holds all tensors of ``entry``."""
        is_expert = entry.local_expert is not None
        tp = self._etp if is_expert else self._tp
        return self._pp == 1 and (tp == 1 or entry.sharding == "replicated") and (self._ep == 1 or not is_expert)

    def _views(self, entry: Entry) -> Sequence[torch.Tensor]:
        """Return views of this rank's whole parameter. They are made once, as long as the parameter stays where it
        is."""
        parameter = self.parameters[entry.parameter]
        place, views = self._made.get(entry.parameter, (None, ()))
        if place != parameter.data_ptr():
            views = self._merge(entry.sharding, [parameter.detach()])
            self._made[entry.parameter] = parameter.data_ptr(), views
        return views

    def _all_shards(
        self, entry: Entry, values: torch.Tensor | None, dtype: torch.dtype | None
    ) -> Iterable[list[torch.Tensor]]:
        """Return the shards of every tensor of ``entry``: one tensor, or one expert of each expert-parallel rank.

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
        if sharding in PARTED:
            rows = sections_of(sharding, sum(map(len, shards)), a)
            parts = [shard.split([section // len(shards) for section in rows]) for shard in shards]
            whole = parts[0] if is_whole else [torch.cat(section) for section in zip(*parts, strict=True)]
            return put_together(sharding, whole, a)
        if sharding in ("qkv", "packed_qkv"):
            parts = split_qkv(shards[0] if is_whole else torch.cat(shards), a)
            return parts if sharding == "qkv" else [torch.cat(parts)]
        if sharding == "transposed":
            return [shards[0].t().contiguous()]
        return shards


CONTENT_METADATA = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "distrib_optim_fully_reshardable_mem_efficient": False,
    "chained_optim_avoid_prefix": True,
    "singleton_local_shards": True,
}
_OPTIMIZER_PREFIX = "optimizer.state"

Shape = tuple[int, ...]
Sharded = ShardedTensor | ShardedTensorFactory


Values = Callable[[torch.Tensor], torch.Tensor]


def as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def sharded_state(model: GPTModel, optimizer: MegatronOptimizer, values: Values = as_it_is) -> dict[str, Any]:
    """Return the shards that this rank writes, under "model" and "slices". Their data are views of the live tensors.
    No other rank takes part, and nothing is copied.

    ``values``: a tensor of the model → its values, wherever they are; the optimizer's own are read as they are.
    """
    weights = sharded_weights(model)
    return {"model": _own_part(weights, values), "slices": _by_number(optimizer_slices(optimizer, weights))}


def optimizer_slices(optimizer: MegatronOptimizer, weights: dict[str, Any]) -> Iterator[ShardedTensor]:
    """Master weights and moments that this rank owns, as boxes of whole tensors; data are views of the live ones."""
    by_parameter = {base.data: base for base in _tensors(weights).values()}
    for chained in distributed_optimizers(optimizer):
        for parameter, owned in _owned_ranges(chained):
            base = by_parameter[parameter]
            # Its data-parallel rank is the only owner; tensor- and pipeline-parallel ranks may hold copies.
            base = replace(base, replica_id=(*_replica(base)[:-1], 0))
            for name, tensor in _states(chained, parameter).items():
                yield from _boxes(base, tensor.detach(), owned.start, owned.end, f"{_OPTIMIZER_PREFIX}.{name}.")


def sharded_weights(model: GPTModel) -> dict[str, Any]:
    """The weights of this rank's part of the model, by name in memory."""
    bare = unwrap_model(model)
    weights = bare.sharded_state_dict(metadata=dict(CONTENT_METADATA))
    return weights | dict(_adapters(bare, weights))


def _adapters(model: GPTModel, weights: dict[str, Any]) -> Iterator[tuple[str, Sharded]]:
    """Adapters (`learner.lora`) of which Megatron's modules do not know that ranks share them, or that leave them out.

    A factor that tensor-parallel ranks share has its axis in ``adapter_cut``. In every layout a file holds the whole
    factor under the name of its layer, gate before up.
    """
    for name, parameter in model.named_parameters():
        layer, _, own = name.rpartition(".")
        if not own.startswith("lora_"):
            continue
        if name not in weights:  # of a grouped layer, whose modules list their weights one by one
            number = own[len("lora_A") :]
            weight = weights[f"{layer}.weight{number}"]
            key = f"{weight.key.removesuffix('.weight')}.{own.removesuffix(number)}"
            yield name, ShardedTensor.from_rank_offsets(key, parameter, replica_id=weight.replica_id)
        elif layer.endswith(".in_proj") and own == "lora_B":  # of a delta net: each of its sections by itself
            module = model.get_submodule(layer.rpartition(".")[0])
            sections = list(module.in_proj_split_sections), module.in_proj_split_names
            yield name, _split_tensor_factory(_shared(weights[name], 0), *sections, 0)
        elif (cut := getattr(parameter, "adapter_cut", None)) is not None:
            shared = _shared(weights[name], cut)
            is_gated = layer.endswith("linear_fc1")
            yield name, apply_swiglu_sharded_factory(shared, ()) if is_gated else shared


def _shared(whole: ShardedTensor, axis: int) -> ShardedTensor:
    """Return this rank's part along ``axis`` of ``whole``, which is declared to be on every tensor-parallel rank."""
    size = parallel_state.get_tensor_model_parallel_world_size()
    offsets = (axis, parallel_state.get_tensor_model_parallel_rank(), size)
    pipeline, _, data = whole.replica_id
    return ShardedTensor.from_rank_offsets(whole.key, whole.data, offsets, replica_id=(pipeline, 0, data))


def distributed_optimizers(optimizer: MegatronOptimizer) -> list[Any]:
    """Megatron's `DistributedOptimizer`s that hold something: one for experts, one for other parameters."""
    return [chained for chained in optimizer.chained_optimizers if not getattr(chained, "is_stub_optimizer", False)]


@torch.no_grad()
def keep_loaded(optimizer: MegatronOptimizer) -> None:
    """Update the optimizer's other copies after the tensors of `optimizer_slices` were overwritten."""
    for chained in distributed_optimizers(optimizer):
        for parameter, _ in _owned_ranges(chained):
            chained._set_main_param_and_optimizer_states(parameter, _states(chained, parameter))
        if hasattr(chained.optimizer, "_sync_hdo_state_to_sub_optimizers"):  # Adam on the host
            chained.optimizer._sync_hdo_state_to_sub_optimizers()


def optimizer_settings(optimizer: MegatronOptimizer) -> dict[Any, Any]:
    """The optimizer's state beside tensors (groups of parameters, steps), the same on every rank."""
    if len(optimizer.chained_optimizers) > 1:
        optimizer._synchronize_steps()
    kind = {"param_state_sharding_type": CONTENT_METADATA["distrib_optim_sharding_type"]}
    parts = [chained.state_dict() | kind for chained in optimizer.chained_optimizers]
    return parts[0] if len(parts) == 1 else dict(enumerate(parts))


_RATES = ("max_lr", "min_lr", "start_wd", "end_wd")


def _take_present_rates(saved_groups: list[dict[str, Any]], groups: list[dict[str, Any]]) -> None:
    """Give saved groups of parameters the rates of the present ones, which a recipe may have changed since.

    megatron-core 0.19 finds a group's saved state by its rates too, and would find none.
    """
    others = [key for key in param_group_identifier_keys if key not in _RATES]
    for saved in saved_groups:
        for group in groups:
            if all(saved.get(key) == group.get(key) for key in others):
                for key in _RATES:  # in place: a save writes the keys in their order
                    if key in group:
                        saved[key] = group[key]
                    else:
                        saved.pop(key, None)


def load_optimizer_settings(optimizer: MegatronOptimizer, state: dict[Any, Any]) -> None:
    """Load ``state``, which torch's Adam or TransformerEngine's wrote. Settings that only one of them has stay as they
    were. The number of steps becomes a whole number, as TransformerEngine's kernel wants it."""
    inner = [chained.optimizer for chained in distributed_optimizers(optimizer)]
    own = [[{k: v for k, v in group.items() if k != "step"} for group in adam.param_groups] for adam in inner]
    parts = [state] if len(optimizer.chained_optimizers) == 1 else list(state.values())
    for part in parts:
        part.pop("param_state", None)
    for chained, part in zip(optimizer.chained_optimizers, parts, strict=True):
        if not getattr(chained, "is_stub_optimizer", False):
            _take_present_rates(part["optimizer"]["param_groups"], chained.optimizer.param_groups)
    optimizer.load_state_dict(state)
    for adam, settings in zip(inner, own, strict=True):
        for group, kept in zip(adam.param_groups, settings, strict=True):
            for key, value in kept.items():
                group.setdefault(key, value)
            if "step" in group and not isinstance(adam, torch.optim.Adam | torch.optim.AdamW):
                group["step"] = int(group["step"])


def allocate_moments(optimizer: MegatronOptimizer) -> None:
    """Give Adam its initial zeros where no update has been applied: absent state cannot be written."""
    for chained in distributed_optimizers(optimizer):
        if any(chained.optimizer.state.values()):
            continue
        chained.init_state_fn(chained.optimizer, chained.config)
        if isinstance(
            chained.optimizer, (torch.optim.Adam, torch.optim.AdamW)
        ):  # torch counts steps by parameter, fused Adam by group
            for state in chained.optimizer.state.values():
                state.setdefault("step", torch.tensor(0.0))


def boxes(shape: Shape, start: int, stop: int) -> Iterator[tuple[Shape, Shape]]:
    """(offset, size) of boxes that cover elements ``start`` to ``stop`` of a flattened tensor of ``shape``, in order.
    At most 2 · len(shape) − 1 of them; each holds elements that follow each other."""
    if start >= stop:
        return
    if not shape:
        yield (), ()
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row  # whole rows
    if first > last:  # inside one row
        yield from _in_row(shape, last, start, stop)
        return
    yield from _in_row(shape, first - 1, start, first * row)
    if first < last:
        yield (first, *(0 for _ in shape[1:])), (last - first, *shape[1:])
    yield from _in_row(shape, last, last * row, stop)


def _in_row(shape: Shape, number: int, start: int, stop: int) -> Iterator[tuple[Shape, Shape]]:
    before = number * math.prod(shape[1:])
    for offset, size in boxes(shape[1:], start - before, stop - before):
        yield (number, *offset), (1, *size)


@dataclass(frozen=True)
class _Piece:
    """A tensor on disk that a parameter, or a range of it, is a shard of."""

    tensor: ShardedTensor  # without data
    shape: Shape  # of the shard, with all axes of the tensor on disk
    start: int  # in the flattened parameter

    @property
    def stop(self) -> int:
        return self.start + math.prod(self.shape)


def _pieces(base: Sharded) -> list[_Piece]:
    """Return the tensors on disk that ``base`` belongs to. Gate and up projection are one in memory and two on disk."""
    shape = replace(base, data=torch.empty_like(base.data, device="meta", memory_format=torch.contiguous_format))
    built = shape.build() if isinstance(shape, ShardedTensorFactory) else shape
    pieces = []
    for tensor in nested_values({0: built}):
        if not tensor.data.is_contiguous():
            raise NotImplementedError(f"{tensor.key}: its shard is not a range of the flattened parameter")
        local = (1,) * tensor.prepend_axis_num + tuple(tensor.local_shape)
        pieces.append(_Piece(tensor.without_data(), local, tensor.data.storage_offset()))
    return pieces


def _boxes(base: Sharded, values: torch.Tensor, start: int, stop: int, prefix: str = "") -> Iterator[ShardedTensor]:
    """``values`` [stop − start]: elements ``start`` to ``stop`` of the flattened parameter of ``base``."""
    for piece in _pieces(base):
        low, high = max(start, piece.start), min(stop, piece.stop)
        at = low - start
        for offset, size in boxes(piece.shape, low - piece.start, high - piece.start):
            data = values[at : at + math.prod(size)].view(size)
            at += math.prod(size)
            yield replace(
                piece.tensor,
                key=prefix + piece.tensor.key,
                data=data,
                dtype=data.dtype,
                local_shape=size,
                global_offset=tuple(a + b for a, b in zip(piece.tensor.global_offset, offset, strict=True)),
                axis_fragmentations=None,
                prepend_axis_num=0,
            )


def _own_part(weights: dict[str, Any], values: Values) -> dict[str, Any]:
    """This rank's part of the weights: those that its replicas hold, laid end to end, are cut at equal bytes."""
    tensors = _tensors(weights)
    state = {name: value for name, value in weights.items() if name not in tensors}
    mains = {name: base for name, base in tensors.items() if not any(_replica(base)[:-1])}
    for is_expert in (False, True):
        group = {name: base for name, base in mains.items() if _is_expert(base) == is_expert}
        rank, size = _replicas(is_expert)
        total, end = sum(base.data.nbytes for base in group.values()), 0
        first, last = total * rank // size, total * (rank + 1) // size
        for name, base in group.items():
            begin, end, width = end, end + base.data.nbytes, base.data.itemsize
            low, high = ((min(max(at, begin), end) - begin) // width for at in (first, last))
            part = values(base.data).detach().reshape(-1)[low:high]
            state[name] = _by_number(_boxes(replace(base, replica_id=0), part, low, high))
    return state


def _is_expert(base: Sharded) -> bool:
    return not getattr(base.data, "allreduce", True)


def _replicas(is_expert: bool) -> tuple[int, int]:
    """Number and count of the ranks that hold the same experts, or the same other weights."""
    if is_expert:
        return parallel_state.get_expert_data_parallel_rank(), parallel_state.get_expert_data_parallel_world_size()
    return (
        parallel_state.get_data_parallel_rank(with_context_parallel=True),
        parallel_state.get_data_parallel_world_size(with_context_parallel=True),
    )


def _tensors(weights: dict[str, Any]) -> dict[str, Sharded]:
    return {name: value for name, value in weights.items() if isinstance(value, Sharded)}


def _replica(base: Sharded) -> tuple[int, ...]:
    return base.replica_id if isinstance(base.replica_id, tuple) else (base.replica_id,)


def _by_number(shards: Iterator[ShardedTensor]) -> dict[int, ShardedTensor]:
    return dict(enumerate(shards))


def _owned_ranges(chained: Any) -> Iterator[tuple[torch.nn.Parameter, Any]]:
    """Parameter and the range of it, flattened, that this rank's optimizer owns."""
    for buffer in chained.gbuf_ranges:
        for buckets in buffer.values():
            for bucket in buckets:
                for parameter, ranges in bucket["param_map"].items():
                    yield parameter, ranges["param"]


def _states(chained: Any, parameter: torch.nn.Parameter) -> dict[str, torch.Tensor]:
    """ "param", "exp_avg", "exp_avg_sq": flat fp32 tensors of the owned range. Steps are among the settings."""
    states = chained._get_main_param_and_optimizer_states(parameter)
    return {name: tensor for name, tensor in states.items() if name != "step"}
