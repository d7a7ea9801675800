"""Weights on their way to an engine: rounded to fp8, int8 or int4 and back, and checked when they have arrived.

An engine that stores codes and scales computes with the rounded values. A check finds that every tensor arrives once in
its shape; checksums find stored parameters that changed.

A scale is shared by a block of a matrix. Codes are weight / scale, rounded to nearest even; a weight becomes code ·
scale, rounded once to its own dtype. fp8 is e4m3fn, with the scales and the order of operations of vLLM 0.30's own
quantization while loading: amax / 448 with its floors, and the factor 1 / scale but for one scale a row, which divides.
int8 and int4 are symmetric: amax / 127 and amax / 7.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator

import torch

from megatron_rl.config.rollout import Block, WeightType
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
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return {name: _checksum(tensor.detach()) for name, tensor in tensors if tensor.numel()}


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
