"""Rotary embedding of the first ``freqs.shape[-1]`` channels, whose halves are rotated against each other."""

from itertools import pairwise

import torch

from .enums import NVTE_QKV_Format, refuse

Tensor = torch.Tensor


def _angles(
    tensor: Tensor, freqs: Tensor, qkv_format: int, cu_seqlens: Tensor | None, cp_size: int, cp_rank: int
) -> Tensor:
    """[tokens, 1, d] for packed rows, [longest, 1, 1, d] for sequences first. ``cu_seqlens``: of whole sequences, of
    which rank ``cp_rank`` of ``cp_size`` has two chunks."""
    if cp_size > 1 and qkv_format != NVTE_QKV_Format.NVTE_THD:
        raise NotImplementedError("rotary embedding: parts of sequences that are not packed are not in the reference")
    if qkv_format == NVTE_QKV_Format.NVTE_SBHD:
        return freqs[: tensor.shape[0]]
    if qkv_format != NVTE_QKV_Format.NVTE_THD:
        raise NotImplementedError(f"rotary embedding: {NVTE_QKV_Format(qkv_format).name} is not in the reference")
    bounds = cu_seqlens.tolist()
    positions = torch.cat([_positions(end - start, cp_size, cp_rank) for start, end in pairwise(bounds)])
    if len(positions) != len(tensor):
        raise NotImplementedError(f"rotary embedding: {len(tensor)} tokens, {len(positions)} of them in sequences")
    return freqs[positions, 0]


def _positions(length: int, cp_size: int, cp_rank: int) -> Tensor:
    if cp_size == 1:
        return torch.arange(length)
    chunks = torch.arange(length).chunk(2 * cp_size)
    return torch.cat([chunks[cp_rank], chunks[2 * cp_size - 1 - cp_rank]])


def _rotate(tensor: Tensor, angles: Tensor) -> Tensor:
    width = angles.shape[-1]
    x, rest = tensor[..., :width].float(), tensor[..., width:]
    first, second = x.chunk(2, -1)
    rotated = x * angles.cos() + torch.cat((-second, first), -1) * angles.sin()
    return torch.cat((rotated.to(tensor.dtype), rest), -1)


def fused_rope_forward(
    input: Tensor,
    freqs: Tensor,
    start_positions: Tensor | None,
    qkv_format: int,
    interleaved: bool,
    cu_seqlens: Tensor | None,
    cp_size: int,
    cp_rank: int,
) -> Tensor:
    """``freqs`` [longest, 1, 1, d] fp32, angles; positions count from each sequence's start."""
    refuse("fused_rope", start_positions=start_positions, interleaved=interleaved)
    return _rotate(input, _angles(input, freqs, qkv_format, cu_seqlens, cp_size, cp_rank))


def fused_rope_backward(
    output_grads: Tensor,
    freqs: Tensor,
    start_positions: Tensor | None,
    qkv_format: int,
    interleaved: bool,
    cu_seqlens: Tensor | None,
    cp_size: int,
    cp_rank: int,
) -> Tensor:
    """The rotation back: its transpose. A frequency turns both halves by the same angle."""
    refuse("fused_rope", start_positions=start_positions, interleaved=interleaved)
    return _rotate(output_grads, -_angles(output_grads, freqs, qkv_format, cu_seqlens, cp_size, cp_rank))
