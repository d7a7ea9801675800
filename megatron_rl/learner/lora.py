"""Low-rank adapters on the linear layers of the blocks, experts among them, merged into the weights in every pass.

An adapted layer computes with round(W + alpha/rank · B A), the tensor that the rollout engine is sent, so pi and mu
have the same weights bit for bit. An adapter that ran beside its layer would round in other places. The price is the
gradient of the whole weight in the backward pass of a layer, and the merged copy until then (one layer's, with
`recompute: full`). Gradient buffers, optimizer states and master weights are those of the adapters alone.

One adapter spans what Megatron fuses: query, key and value share A, and so do gate and up. Each expert has its own.

Under tensor parallelism a rank holds rows of W (query, key, value, gate, up) or columns (output, down), and with them
the same rows of B or columns of A. Every rank has the whole of the other factor, whose gradient is a sum over ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region

from megatron_rl.config.learner import LoraConfig
from megatron_rl.errors import InputError

_CUT = {"linear_qkv": 0, "linear_proj": 1, "linear_fc1": 0, "linear_fc2": 1}  # axis of W that ranks share
_EXPERTS = "mlp.experts"
_EXPERT_KEYS = 40  # bits below the expert's number in the key of its random numbers


def _ask_for_gradient(module: torch.nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
    return output.requires_grad_() if torch.is_grad_enabled() else output


def _as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def has_adapters(model: torch.nn.Module) -> bool:
    """Whether ``model`` has adapters, which are in its weights within the forward passes of its layers alone."""
    return any(".lora_A" in name for name, _ in model.named_parameters())


@dataclass(frozen=True)
class _Place:
    """Where a weight that gets an adapter is. ``reader``: the module in whose forward pass it is read."""

    reader: torch.nn.Module
    layer: torch.nn.Module
    suffix: str  # "" of `weight`, the number of a grouped layer's
    kind: str  # of `_CUT`
    expert: int | None  # number in the whole model

    @property
    def name(self) -> str:
        return f"weight{self.suffix}"


@dataclass(frozen=True)
class _Adapter:
    a: torch.nn.Parameter
    b: torch.nn.Parameter
    cut: int | None  # axis of the weight that tensor-parallel ranks share; None: this rank has all of it


class Adapters:
    """Freezes ``model`` and gives every linear layer of its blocks an adapter. Call it after the weights are loaded and
    before the model is wrapped: what is frozen gets no gradient buffer.

    A is drawn from ``seed``, the layer's number in the whole model and the expert's; B is zero: the policy starts as it
    was, and the same under every layout.
    """

    def __init__(self, model: GPTModel, config: LoraConfig, seed: int):
        self.scale = config.alpha / config.rank
        self._adapters: dict[torch.nn.Parameter, _Adapter] = {}  # by frozen weight
        model.requires_grad_(False)
        for block in model.decoder.layers:
            by_reader: dict[torch.nn.Module, list[_Place]] = {}
            for place in _places(block):
                key = seed * 1_000_003 + block.layer_number * len(_CUT) + list(_CUT).index(place.kind)
                key += (0 if place.expert is None else place.expert + 1) << _EXPERT_KEYS
                self._adapt(place, config.rank, key)
                by_reader.setdefault(place.reader, []).append(place)
            for reader, places in by_reader.items():
                self._shadow(reader, places)
        if model.pre_process:
            # Recomputed layers are differentiated only if what goes in asks for a gradient; frozen embeddings do not.
            model.embedding.register_forward_hook(_ask_for_gradient)
        if not self._adapters and len(model.decoder.layers):
            raise InputError("learner.lora: no layer to adapt was found in the model")

    def _adapt(self, place: _Place, rank: int, key: int) -> None:
        weight, cut = getattr(place.layer, place.name), _CUT[place.kind]
        is_expert = place.expert is not None
        size = 1 if is_expert else parallel_state.get_tensor_model_parallel_world_size()
        num_out, num_in = weight.shape
        whole_in = num_in * (size if cut == 1 else 1)
        noise = torch.randn(rank, whole_in, generator=torch.Generator().manual_seed(key)) / math.sqrt(whole_in)
        if cut == 1:
            noise = noise.chunk(size, dim=1)[0 if is_expert else parallel_state.get_tensor_model_parallel_rank()]
        a = torch.nn.Parameter(noise.contiguous().to(weight))
        b = torch.nn.Parameter(weight.new_zeros(num_out, rank))
        sharded = b if cut == 0 else a
        for parameter in (a, b):
            if is_expert:
                parameter.allreduce = False
            if is_expert or (size > 1 and parameter is sharded):  # no copy: see `mark_expert_parameters`
                set_tensor_model_parallel_attributes(parameter, True, cut, 1)
        if size > 1:
            sharded.adapter_cut = cut  # `checkpoint.sharded` reads it
        place.layer.register_parameter(f"lora_A{place.suffix}", a)
        place.layer.register_parameter(f"lora_B{place.suffix}", b)
        self._adapters[weight] = _Adapter(a, b, cut if size > 1 else None)

    def _shadow(self, reader: torch.nn.Module, places: list[_Place]) -> None:
        """In the forward pass of ``reader`` the merged tensors shadow the parameters: Megatron's and
        TransformerEngine's layers both read attributes, and neither has a place for an argument."""
        frozen = [(place.layer, place.name, getattr(place.layer, place.name)) for place in places]

        def shadow(module: torch.nn.Module, args: Any) -> None:
            for layer, name, weight in frozen:
                layer.__dict__[name] = self.merged(weight)

        def restore(module: torch.nn.Module, args: Any, output: Any) -> None:
            for layer, name, _ in frozen:
                del layer.__dict__[name]

        reader.register_forward_pre_hook(shadow)
        reader.register_forward_hook(restore)

    def merged(
        self, weight: torch.nn.Parameter, read: Callable[[torch.Tensor], torch.Tensor] = _as_it_is
    ) -> torch.Tensor:
        """This rank's part of ``weight`` with its adapter added, in its dtype: the sum is fp32 and rounded once. Others
        as they are.

        ``read``: a parameter → its values on the device, where they may be elsewhere (see `Offload`).
        """
        adapter = self._adapters.get(weight)
        if adapter is None:
            return read(weight)
        a, b = read(adapter.a).float(), read(adapter.b).float()
        if adapter.cut == 0:  # the identity, whose gradient is summed over the ranks
            a = copy_to_tensor_model_parallel_region(a)
        elif adapter.cut == 1:
            b = copy_to_tensor_model_parallel_region(b)
        return (read(weight).float() + self.scale * (b @ a)).to(weight.dtype)

    def named_parameters(self, weights: list[tuple[str, torch.nn.Parameter]]) -> list[tuple[str, torch.nn.Parameter]]:
        """The trained parameters, under the names that ``weights`` gives to what they adapt."""
        named = []
        for name, weight in weights:
            if weight in self._adapters:
                adapter = self._adapters[weight]
                named += [(f"adapter A of {name}", adapter.a), (f"adapter B of {name}", adapter.b)]
        return named


def _places(block: torch.nn.Module) -> Iterator[_Place]:
    """Weights of ``block`` that get an adapter, in the order of its modules.

    Experts are one module each, or the weights of one grouped layer. Where they are modules, the layer of all of them
    may read the weights itself (`FewPassExperts`).
    """
    experts = dict(block.named_modules()).get(_EXPERTS)
    first = 0 if experts is None else parallel_state.get_expert_model_parallel_rank() * experts.num_local_experts
    for name, module in block.named_modules():
        kind = name.rpartition(".")[2]
        if kind not in _CUT:
            continue
        if not name.startswith(f"{_EXPERTS}."):
            yield _Place(module, module, "", kind, None)
        elif hasattr(module, "weight0"):
            for number in range(experts.num_local_experts):
                yield _Place(module, module, str(number), kind, first + number)
        else:
            yield _Place(experts, module, "", kind, first + int(name.split(".")[-2]))
