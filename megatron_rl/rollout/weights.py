"""Weights on their way to an engine: rounded to fp8, int8 or int4 and back, and checked when they have arrived.

An engine that stores codes and scales computes with the rounded values. A check finds that every tensor arrives once in
its shape; checksums find stored parameters that changed.

A scale is shared by a block of a matrix. Codes are weight / scale, rounded to nearest even; a weight becomes code ·
scale, rounded once to its own dtype. fp8 is e4m3fn, with the scales and the order of operations of vLLM 0.30's own
quantization while loading: amax / 448 with its floors, and the factor 1 / scale but for one scale a row, which divides.
int8 and int4 are symmetric: amax / 127 and amax / 7.

`rounded_weights` gives a learner the weights of a quantized engine while a pass runs [QaRL, arXiv 2604.07853].

The gradient that a pass leaves is that of the rounded weights. The optimizer applies it to the learner's own
(straight-through).
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial

import torch

from megatron_rl.checkpoint.state import model_tensors
from megatron_rl.config.rollout import Block, QuantizationConfig, WeightType
from megatron_rl.model.architecture import Architecture
from megatron_rl.rollout.generator import RolloutError

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
INT_MAX = {"int8": 127.0, "int4": 7.0}
BLOCK_FLOOR = 1e-4  # of the largest magnitude in a block
ROW_FLOOR = 1.0 / (FP8_MAX * 512.0)  # of a row's scale
Reduce = Callable[[torch.Tensor], torch.Tensor]


def rounded(weight: torch.Tensor, kind: WeightType, block: Block, over_ranks: Reduce | None = None) -> torch.Tensor:
    """Return ``weight`` [outputs, inputs] rounded to ``kind``; same shape and dtype.

    ``block``: rows and columns that share a scale; None: all of them. Blocks start at the first row and column, and
    those at the end may be smaller. ``over_ranks``: largest magnitudes of this part → of the matrix, where other ranks
    hold parts that share its scales.
    """
    rows, columns = block[0] or weight.shape[0], block[1] or weight.shape[1]
    padding = (0, -weight.shape[1] % columns, 0, -weight.shape[0] % rows)
    blocks = torch.nn.functional.pad(weight.float(), padding)
    padded = blocks.shape
    blocks = blocks.view(padded[0] // rows, rows, padded[1] // columns, columns)
    largest = blocks.abs().amax(dim=(1, 3), keepdim=True)
    if over_ranks is not None:
        largest = over_ranks(largest)
    back = _through_fp8(blocks, largest, block) if kind == "fp8" else _through_int(blocks, largest, INT_MAX[kind])
    return back.view(padded)[: weight.shape[0], : weight.shape[1]].to(weight.dtype)


def _through_fp8(blocks: torch.Tensor, largest: torch.Tensor, block: Block) -> torch.Tensor:
    if block == (1, None):
        scale = (largest / FP8_MAX).clamp_min(ROW_FLOOR)
        codes = blocks / scale
    elif block == (None, None):
        scale = _nonzero(largest / FP8_MAX)
        codes = blocks * (1.0 / scale)
    else:
        scale = largest.clamp(BLOCK_FLOOR) / FP8_MAX
        codes = blocks * (1.0 / scale)
    return codes.clamp_(-FP8_MAX, FP8_MAX).to(FP8).float() * scale


def _through_int(blocks: torch.Tensor, largest: torch.Tensor, top: float) -> torch.Tensor:
    scale = _nonzero(largest / top)
    return (blocks / scale).round_().clamp_(-top, top) * scale


def _nonzero(scale: torch.Tensor) -> torch.Tensor:
    """A block of zeros has any scale."""
    return torch.where(scale == 0, 1.0, scale)


# splitmix64's increment and multipliers (Steele, Lea, Flood 2014), as signed 64-bit numbers.
_STEP, _FIRST, _SECOND = (x - (1 << 64) for x in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
_WORDS = 1 << 23  # of 8 bytes, hashed at a time: 64 MiB and temporaries of that size


def parameter_checksums(model: torch.nn.Module) -> dict[str, int]:
    """Name → checksum of the stored bytes of every parameter and buffer, so that a permutation is noticed, too.

    CRC-32 on a CPU; on another device `device_checksum`, for which nothing is copied to the host.
    """
    return {name: _checksum(tensor.detach()) for name, tensor in model_tensors(model).items() if tensor.numel()}


def _checksum(tensor: torch.Tensor) -> int:
    data = tensor.contiguous().view(-1).view(torch.uint8)
    return zlib.crc32(data.numpy()) if data.device.type == "cpu" else device_checksum(data)


def device_checksum(data: torch.Tensor) -> int:
    """Sum over words of a hash of each 8 bytes and their place, modulo 2^64. ``data`` [n] uint8, on any device."""
    total = torch.zeros((), dtype=torch.int64, device=data.device)
    for start in range(0, len(data), 8 * _WORDS):
        piece = data[start : start + 8 * _WORDS]
        tail = torch.zeros(-len(piece) % 8, dtype=torch.uint8, device=data.device)
        words = (torch.cat([piece, tail]) if len(tail) else piece.clone()).view(torch.int64)
        places = torch.arange(start // 8 + 1, start // 8 + 1 + len(words), device=data.device)
        total += _mixed(words ^ _mixed(places)).sum()
    return int(total) & (1 << 64) - 1


def _mixed(x: torch.Tensor) -> torch.Tensor:
    """splitmix64's output function: every bit of ``x`` [n] int64 reaches every bit of the result."""
    x = x + _STEP
    for shift, factor in ((30, _FIRST), (27, _SECOND)):
        x = (x ^ (x >> shift & (1 << 64 - shift) - 1)) * factor
    return x ^ (x >> 31 & (1 << 33) - 1)


def check_own_refit(before: dict[str, int], after: dict[str, int]) -> None:
    """Raise `RolloutError` unless a weight update with the engine's own checkpoint left every checksum as it was."""
    changed = sorted(name for name in before if before[name] != after.get(name))
    if changed or before.keys() != after.keys():
        import vllm

        raise RolloutError(
            f"vLLM {vllm.__version__} corrupts weights on updates: sending it its own checkpoint changed "
            f"{len(changed)} of {len(before)} parameters, first {changed[:3]}. Every response after the first "
            "update would come from another policy. Use the pinned version, or set rollout.verify_refit: false if "
            "this build stores parameters in an order that is not reproducible"
        )


def checked(
    weights: Iterable[tuple[str, torch.Tensor]], shapes: dict[str, tuple[int, ...]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Pass ``weights`` on, and raise `RolloutError` unless they are exactly the tensors of ``shapes``.

    vLLM keeps the old weights of a layer that no tensor arrives for and only warns, which would let generation drift
    from the learner unseen. Tied models may send `lm_head.weight` too.
    """
    seen: set[str] = set()
    for name, tensor in weights:
        if name in seen:
            raise RolloutError(f"weight update: {name} was sent twice")
        if name not in shapes and name != "lm_head.weight":
            raise RolloutError(f"weight update: {name} is not in the engine's checkpoint")
        if tuple(tensor.shape) != shapes.get(name, tuple(tensor.shape)):
            raise RolloutError(
                f"weight update: {name} has shape {tuple(tensor.shape)}, the engine expects {shapes[name]}"
            )
        seen.add(name)
        yield name, tensor
    missing = sorted(set(shapes) - seen)
    if missing:
        raise RolloutError(f"weight update: {len(missing)} of {len(shapes)} tensors were not sent, first {missing[:3]}")


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
def replaced(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> Iterator[None]:
    """Inside, tensors of a model have other values, in the memory they have; their own come back."""
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
