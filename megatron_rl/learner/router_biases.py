"""The biases by which sigmoid routers choose: fp32 whatever a model is cast to, and moved by applied updates alone.

Megatron counts the choices of every pass with a gradient. Here the counts begin with each update and leave padding out,
and the biases move after the optimizer has applied it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial

import torch
from megatron.core.transformer.moe.router import TopKRouter

# By its name: the package binds a function of this name over the module.
_MEGATRON = importlib.import_module("megatron.core.distributed.finalize_model_grads")


def routers_with_bias(model: torch.nn.Module) -> list[TopKRouter]:
    return [part for part in model.modules() if isinstance(part, TopKRouter) and part.expert_bias is not None]


def keep_router_biases(model: torch.nn.Module) -> None:
    """Keep the biases in fp32 when ``model`` is cast, and padding out of the counts.

    Megatron casts biases back in the next forward pass, when the cast has rounded them. Its own count takes a mask of
    padding for one of experts.
    """
    for router in routers_with_bias(model):
        router._apply = partial(_apply_without_rounding, router)
        router._apply_expert_bias = partial(_count, router)


def _apply_without_rounding(router: TopKRouter, function: Callable, recurse: bool = True) -> TopKRouter:
    bias = router.expert_bias
    TopKRouter._apply(router, function, recurse)
    bias.data = bias.data.to(router.expert_bias.device)
    router.expert_bias = bias
    return router


def _count(router: TopKRouter, routing_map: torch.Tensor, padding_mask: torch.Tensor | None = None) -> None:
    """Add the choices [tokens, experts] of tokens that are no padding, [tokens]; not in passes without a gradient, nor
    in the first of two that recomputation makes."""
    if torch.is_grad_enabled():
        real = routing_map if padding_mask is None else routing_map & ~padding_mask[:, None]
        router.local_tokens_per_expert += real.sum(dim=0)


class RouterBiases:
    """The biases of ``model``. ``rate``: `routing.bias_update_rate`; 0: they stay."""

    def __init__(self, model: torch.nn.Module, rate: float):
        self._rate, self._routers = rate, routers_with_bias(model)
        self._load: list[torch.Tensor] = []
        for router in self._routers:
            router.frozen_expert_bias = True  # Megatron would move it before the optimizer has looked at the gradients

    def begin(self) -> None:
        """Begin an update: forget the tokens that other passes counted."""
        for router in self._routers:
            router.local_tokens_per_expert.zero_()

    def take_load(self) -> None:
        """Copy an update's counts before Megatron, which reduces gradients, forgets them."""
        self._load = [router.local_tokens_per_expert.clone() for router in self._routers if self._rate]

    @torch.no_grad()
    def move(self) -> None:
        """Move the biases by the update's load, after the optimizer has applied it. Collective."""
        if self._load:
            biases = [router.expert_bias for router in self._routers]
            moved = _MEGATRON.get_updated_expert_bias(torch.stack(self._load), torch.stack(biases), self._rate)
            for bias, value in zip(biases, moved, strict=True):
                bias.copy_(value)
