"""Fused attention over packed rows, and what context parallelism does between the attention of two parts of a row.

Shapes: t query tokens, u key tokens, h heads, g key/value heads, d head width. Scores and sums are fp32.
"""

from itertools import pairwise
from typing import Any

import torch

from .enums import NVTE_Mask_Type, NVTE_QKV_Format, refuse

Tensor = torch.Tensor


def _scores(q: Tensor, k: Tensor, scale: float, mask: int) -> Tensor:
    """[h, t, u] of one sequence; what a causal mask hides is −∞."""
    keys = k.float().repeat_interleave(q.shape[1] // k.shape[1], 1)
    scores = torch.einsum("thd,uhd->htu", q.float(), keys) * scale
    if mask == NVTE_Mask_Type.NVTE_PADDING_CAUSAL_MASK:
        scores = scores.masked_fill(torch.ones(scores.shape[1:], dtype=torch.bool).triu(1), float("-inf"))
    elif mask != NVTE_Mask_Type.NVTE_PADDING_MASK:
        raise NotImplementedError(f"fused attention: mask {mask} is not in the reference")
    return scores


def _sequences(cu_q: Tensor, cu_kv: Tensor, padded_q: Tensor | None, padded_kv: Tensor | None) -> list[tuple]:
    """(rows of q, rows of k) of each sequence."""
    sides = []
    for bounds, padded in ((cu_q.tolist(), padded_q), (cu_kv.tolist(), padded_kv)):
        starts = bounds if padded is None else padded.tolist()
        sides.append([slice(at, at + end - start) for at, (start, end) in zip(starts, pairwise(bounds))])
    return list(zip(*sides, strict=True))


def fused_attn_fwd(
    max_seqlen_q: int,
    max_seqlen_kv: int,
    is_training: bool,
    attn_scale: float,
    dropout: float,
    fast_zero_fill: bool,
    qkv_layout: int,
    o_format: int,
    scale_inv_format: int,
    bias_type: int,
    mask_type: int,
    softmax_type: int,
    window_size: Any,
    bottom_right_diagonal: bool,
    cu_seqlens_q: Tensor,
    cu_seqlens_kv: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    fake_dtype: torch.dtype,
    cu_seqlens_q_padded: Tensor | None,
    cu_seqlens_kv_padded: Tensor | None,
    *rest: Any,
) -> list[Tensor]:
    """[output [t, h, d], log Σ exp [t, h, 1] fp32, state of the random numbers]."""
    refuse("fused_attn_fwd", dropout=dropout > 0, o_format=o_format != NVTE_QKV_Format.NVTE_THD)
    out, lse = torch.zeros_like(q), torch.zeros(*q.shape[:2], 1)
    for rows, keys in _sequences(cu_seqlens_q, cu_seqlens_kv, cu_seqlens_q_padded, cu_seqlens_kv_padded):
        scores = _scores(q[rows], k[keys], attn_scale, mask_type)
        values = v[keys].float().repeat_interleave(q.shape[1] // v.shape[1], 1)
        lse[rows] = scores.logsumexp(-1).t()[..., None]
        out[rows] = torch.einsum("htu,uhd->thd", scores.softmax(-1), values).to(out.dtype)
    return [out, lse, torch.zeros(2, dtype=torch.int64)]


def fused_attn_bwd(
    max_seqlen_q: int,
    max_seqlen_kv: int,
    attn_scale: float,
    dropout: float,
    fast_zero_fill: bool,
    qkv_layout: int,
    o_format: int,
    do_format: int,
    dqkv_layout: int,
    scale_inv_format: int,
    do_scale_inv_format: int,
    bias_type: int,
    mask_type: int,
    softmax_type: int,
    window_size: Any,
    bottom_right_diagonal: bool,
    deterministic: bool,
    cu_seqlens_q: Tensor,
    cu_seqlens_kv: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    grad: Tensor,
    fake_dtype: torch.dtype,
    aux: list[Tensor],
    cu_seqlens_q_padded: Tensor | None,
    cu_seqlens_kv_padded: Tensor | None,
    *rest: Any,
) -> list[Tensor | None]:
    """Gradients of q, k, v (and of no bias). ``out`` and log Σ exp, in ``aux``, may be those of more keys than are
    here: the gradients are then what these keys add."""
    groups = q.shape[1] // k.shape[1]
    grads = [torch.zeros_like(x) for x in (q, k, v)]
    for rows, keys in _sequences(cu_seqlens_q, cu_seqlens_kv, cu_seqlens_q_padded, cu_seqlens_kv_padded):
        probs = (_scores(q[rows], k[keys], attn_scale, mask_type) - aux[0][rows].squeeze(-1).t()[..., None]).exp()
        upstream = grad[rows].float()
        values, key = (x[keys].float().repeat_interleave(groups, 1) for x in (v, k))
        along = (upstream * out[rows].float()).sum(-1).t()[..., None]  # [h, t, 1]
        of_scores = probs * (torch.einsum("thd,uhd->htu", upstream, values) - along) * attn_scale
        of_query = torch.einsum("htu,uhd->thd", of_scores, key)
        of_key = torch.einsum("htu,thd->uhd", of_scores, q[rows].float())
        of_value = torch.einsum("htu,thd->uhd", probs, upstream)
        of_key, of_value = (x.unflatten(1, (-1, groups)).sum(2) for x in (of_key, of_value))
        for whole, at, part in zip(grads, (rows, keys, keys), (of_query, of_key, of_value), strict=True):
            whole[at] = part.to(whole.dtype)
    return [*grads, None]


def _half(cu_seqlens: Tensor, half: int) -> Tensor:
    """Rows of the first (0) or second (1) half of every sequence."""
    halves = [(start, (start + end) // 2, end) for start, end in pairwise(cu_seqlens.tolist())]
    return torch.cat([torch.arange(bounds[half], bounds[half + 1]) for bounds in halves])


def thd_read_half_tensor(tensor: Tensor, cu_seqlens: Tensor, half_idx: int) -> Tensor:
    """[t, …] → [t / 2, …]."""
    return tensor[_half(cu_seqlens, half_idx)]


def thd_read_second_half_lse(lse: Tensor, cu_seqlens: Tensor, lse_packed: bool, length: int) -> Tensor:
    """[h, t] → [h, t / 2]."""
    refuse("thd_read_second_half_lse", padded=not lse_packed)
    return lse[:, _half(cu_seqlens, 1)]


def thd_second_half_lse_correction(lse: Tensor, of_step: Tensor, cu_seqlens: Tensor, lse_packed: bool) -> None:
    """Add in [h, t] what second halves have seen more, [h, t / 2]."""
    refuse("thd_second_half_lse_correction", padded=not lse_packed)
    rows = _half(cu_seqlens, 1)
    lse[:, rows] = torch.logaddexp(lse[:, rows], of_step)


def thd_out_correction(
    out: Tensor,
    of_step: Tensor,
    old_lse: Tensor,
    lse: Tensor,
    lse_of_step: Tensor,
    cu_seqlens: Tensor,
    only_second_half: bool,
    lse_packed: bool,
) -> None:
    """Weigh the output so far and a further part's by what each has seen."""
    refuse("thd_out_correction", padded=not lse_packed)
    rows = _half(cu_seqlens, 1) if only_second_half else torch.arange(len(out))
    old, new = ((x - lse[:, rows]).exp().t()[..., None] for x in (old_lse[:, rows], lse_of_step))
    width = out.shape[-1]
    merged = out[rows].float() * old + of_step.reshape(len(rows), -1, width).float() * new
    out[rows] = merged.to(out.dtype)


def thd_grad_correction(grad: Tensor, of_step: Tensor, cu_seqlens: Tensor, first_half: str, second_half: str) -> None:
    """Enter a part's gradient into halves of sequences. It has those that are added or copied, in order."""
    is_whole = {first_half, second_half} <= {"add", "copy"}
    for half, what in enumerate((first_half, second_half)):
        rows = _half(cu_seqlens, half)
        if what == "zero":
            grad[rows] = 0
        elif what != "none":
            part = of_step[rows] if is_whole else of_step.view(len(rows), *grad.shape[1:])
            grad[rows] = part + grad[rows] if what == "add" else part
