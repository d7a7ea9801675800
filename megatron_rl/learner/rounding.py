"""Weights of a learner as a quantized engine has them, while a pass runs [QaRL, arXiv 2604.07853].

The gradient that a pass leaves is that of the rounded weights. The optimizer applies it to the learner's own
(straight-through).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial

import torch

from megatron_rl.config.rollout import QuantizationConfig
from megatron_rl.model.architecture import Architecture
from megatron_rl.rollout.weights import rounded

_MATRICES = re.compile(r"\.(linear_qkv|linear_proj|linear_fc1|linear_fc2)\.weight\d*$")
_GATED = re.compile(r"\.experts\..*linear_fc1\.weight\d*$")


@contextmanager
def rounded_weights(
    module: torch.nn.Module, quantization: QuantizationConfig, architecture: Architecture
) -> Iterator[None]:
    """Inside, ``module`` computes with what `rollout.quantization` makes of its weights; afterwards it has its own.

    It costs a copy of the matrices. Tensor-parallel parts are rounded each by itself (`config.model_rules` says where
    an engine does the same).
    """
    with replaced((p, _as_engine(name, p.detach(), quantization, architecture)) for name, p in matrices(module)):
        yield


def matrices(module: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Names and weights of what an engine rounds: linear layers of the blocks, and experts."""
    return ((name, p) for name, p in module.named_parameters() if _MATRICES.search(name))


def by_halves(through: Callable[[torch.Tensor], torch.Tensor], name: str, weight: torch.Tensor) -> torch.Tensor:
    """Return ``through`` of ``weight``; of gate and up of an expert each by itself, as an engine has them."""
    return torch.cat([through(half) for half in weight.chunk(2)]) if _GATED.search(name) else through(weight)


def _as_engine(
    name: str, weight: torch.Tensor, quantization: QuantizationConfig, architecture: Architecture
) -> torch.Tensor:
    block = quantization.of_weights
    through = partial(rounded, kind=quantization.weights, block=block)
    if ".linear_qkv." in name and block[0] != 1:
        order = engine_rows(architecture, len(weight)).to(weight.device)
        return torch.empty_like(weight).index_copy_(0, order, through(weight[order]))
    return through(weight) if block[0] is None else by_halves(through, name, weight)


def engine_rows(architecture: Architecture, num_rows: int) -> torch.Tensor:
    """[num_rows] int64: the rows of Megatron's query, key and value weight in vLLM's order, all queries first.

    Megatron has the queries of one group of heads, then its key and its value, then the next group.
    """
    width, queries = architecture.head_dim, architecture.num_heads // architecture.num_kv_heads
    rows = torch.arange(num_rows).view(-1, queries + 2, width)
    return torch.cat([rows[:, :queries].flatten(), rows[:, queries].flatten(), rows[:, queries + 1].flatten()])


@contextmanager
def replaced(pairs: Iterable[tuple[torch.nn.Parameter, torch.Tensor]]) -> Iterator[None]:
    """Inside, parameters have other values, in the memory they have; their own come back."""
    kept = []
    try:
        with torch.no_grad():
            for parameter, values in pairs:
                kept.append((parameter, parameter.detach().clone()))
                parameter.copy_(values)
        yield
    finally:
        with torch.no_grad():
            for parameter, values in kept:
                parameter.copy_(values)
