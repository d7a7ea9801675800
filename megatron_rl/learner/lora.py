"""Low-rank adapters on the linear layers of a dense model, merged into the weights in every forward pass.

An adapted layer computes with round(W + alpha/rank · B A), the tensor that the rollout engine is sent, so pi and mu
have the same weights bit for bit. An adapter that ran beside its layer would round in other places. The price is the
gradient of the whole weight in the backward pass of a layer, and the merged copy until then (one layer's, with
`recompute: full`). Gradient buffers, optimizer states and master weights are those of the adapters alone.

One adapter spans what Megatron fuses: query, key and value share A, and so do gate and up.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel

from megatron_rl.config.learner import LoraConfig
from megatron_rl.errors import InputError

_TARGETS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")


def _ask_for_gradient(module: torch.nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
    return output.requires_grad_() if torch.is_grad_enabled() else output


def _as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


class Adapters:
    """Freezes ``model`` and gives every linear layer of its blocks an adapter. Call it after the weights are loaded and
    before the model is wrapped: what is frozen gets no gradient buffer.

    A is drawn from ``seed`` and the layer's number in the whole model, B is zero: the policy starts as it was.
    """

    def __init__(self, model: GPTModel, config: LoraConfig, seed: int):
        self.scale = config.alpha / config.rank
        self._layers: dict[torch.nn.Parameter, torch.nn.Module] = {}  # frozen weight → its layer
        model.requires_grad_(False)
        for layer in model.decoder.layers:
            for name, module in layer.named_modules():
                kind = name.rpartition(".")[2]
                if kind in _TARGETS:
                    key = seed * 1_000_003 + layer.layer_number * len(_TARGETS) + _TARGETS.index(kind)
                    self._adapt(module, config.rank, key)
        if model.pre_process:
            # Recomputed layers are differentiated only if what goes in asks for a gradient; frozen embeddings do not.
            model.embedding.register_forward_hook(_ask_for_gradient)
        if not self._layers and len(model.decoder.layers):
            raise InputError("learner.lora: no layer to adapt was found in the model")

    def _adapt(self, module: torch.nn.Module, rank: int, seed: int) -> None:
        weight = module.weight
        num_out, num_in = weight.shape
        noise = torch.randn(rank, num_in, generator=torch.Generator().manual_seed(seed)) / math.sqrt(num_in)
        module.lora_A = torch.nn.Parameter(noise.to(weight))
        module.lora_B = torch.nn.Parameter(weight.new_zeros(num_out, rank))
        self._layers[weight] = module

        # The merged tensor shadows the parameter for the length of the forward pass: Megatron's and TransformerEngine's
        # layers both read `self.weight`, and neither has a place for an argument.
        def shadow(layer: torch.nn.Module, args: Any) -> None:
            layer.__dict__["weight"] = self.merged(weight)

        def restore(layer: torch.nn.Module, args: Any, output: Any) -> None:
            del layer.__dict__["weight"]

        module.register_forward_pre_hook(shadow)
        module.register_forward_hook(restore)

    def merged(
        self, weight: torch.nn.Parameter, read: Callable[[torch.Tensor], torch.Tensor] = _as_it_is
    ) -> torch.Tensor:
        """``weight`` with its adapter added, in its dtype: the sum is fp32 and rounded once. Others as they are.

        ``read``: a parameter → its values on the device, where they may be elsewhere (see `Offload`).
        """
        module = self._layers.get(weight)
        if module is None:
            return read(weight)
        update = read(module.lora_B).float() @ read(module.lora_A).float()
        return (read(weight).float() + self.scale * update).to(weight.dtype)

    def named_parameters(self, weights: list[tuple[str, torch.nn.Parameter]]) -> list[tuple[str, torch.nn.Parameter]]:
        """The trained parameters, under the names that ``weights`` gives to what they adapt."""
        found = []
        for name, weight in weights:
            if weight in self._layers:
                module = self._layers[weight]
                found += [(f"adapter A of {name}", module.lora_A), (f"adapter B of {name}", module.lora_B)]
        return found
