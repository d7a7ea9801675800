"""Which experts a row goes to, and what they make of it, with the same bits whatever the other rows are."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from megatron_rl.learner.layers.invariant import TILE, kernel_ops, on_kernels, padded


def route(logits: torch.Tensor, top: int, pre_softmax: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The ``top`` experts of each token.

    Args:
        logits: [N, E].
        pre_softmax: probabilities of a softmax over all experts; else over the chosen ones.

    Returns:
        probabilities [N, top] in the dtype of ``logits`` and experts [N, top] int64, in the order of the experts.
    """
    if on_kernels(logits):
        return kernel_ops().route(logits, top, not pre_softmax)
    if pre_softmax:
        scores, chosen = torch.softmax(logits, -1, dtype=torch.float32).type_as(logits).topk(top)
    else:
        scores, chosen = logits.topk(top)
        scores = torch.softmax(scores, -1, dtype=torch.float32).type_as(logits)
    chosen, order = chosen.sort(1)
    return scores.gather(1, order), chosen


def experts(
    x: torch.Tensor,
    probs: torch.Tensor,
    chosen: torch.Tensor,
    fc1: list[torch.Tensor],
    fc2: list[torch.Tensor],
    first: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Each row through those of its experts that are here, without gradient. On kernels nothing looks at a value, and
    no shape depends on one.

    Args:
        x: [n, H].
        probs, chosen: [n, K], what `route` returns.
        fc1, fc2: of E experts the gate and up projections [2F, H], and the one down [H, F].
        first: the number of the first of them.

    Returns:
        results [M, H], and the place [n, K] in them of each row's; that of an expert elsewhere is of no meaning.
    """
    if on_kernels(x):
        return kernel_ops().experts(x, probs, chosen, fc1, fc2, first)
    return _experts_in_tiles(x, probs, chosen - first, fc1, fc2)


def add_experts(results: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """[M, H], [n, K] → [n, H]: the rows at each token's places, added in their order as a pass adds them."""
    if on_kernels(results):
        return kernel_ops().combine(results, places)
    parts = results[places]  # [n, K, H]
    total = torch.zeros_like(parts[:, 0])
    for k in range(parts.size(1)):
        total = total + parts[:, k]
    return total


def _experts_in_tiles(
    x: torch.Tensor, probs: torch.Tensor, local: torch.Tensor, fc1: list[torch.Tensor], fc2: list[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    is_there = local.flatten()[:, None] == torch.arange(len(fc1), device=x.device)  # [nK, E]
    before = is_there.cumsum(0)
    counts = (before[-1] + TILE - 1) // TILE  # [E], tiles
    first = (counts.cumsum(0) - counts) * TILE
    here = local.clamp(0, len(fc1) - 1)
    places = first[here] + before.gather(1, here.view(-1, 1)).view_as(here) - 1  # [n, K]
    # Tiles that there can be: every one of E experts has at most one that is not full. One more is for rows elsewhere.
    num_tiles = local.numel() // TILE + len(fc1) + 1
    places = places.where(here == local, (num_tiles - 1) * TILE)
    rows = x.new_zeros(num_tiles * TILE, x.size(1))
    rows[places.flatten()] = x.repeat_interleave(local.size(1), 0)
    scale = probs.new_zeros(num_tiles * TILE, 1)
    scale[places.flatten(), 0] = probs.flatten()
    hidden = _grouped_matmul(rows.view(num_tiles, TILE, -1), counts.tolist(), fc1)
    hidden = (gated(hidden.flatten(0, 1)) * scale).to(x.dtype)
    return _grouped_matmul(hidden.view(num_tiles, TILE, -1), counts.tolist(), fc2).flatten(0, 1), places


def _grouped_matmul(tiles: torch.Tensor, counts: list[int], weights: list[torch.Tensor]) -> torch.Tensor:
    """Tiles of rows [T, `TILE`, K] times the weight [N, K] of the expert that each belongs to, [T, `TILE`, N].

    ``counts``: tiles of each expert, which lie in the order of the experts; what follows them is 0. A row has the bits
    of `matmul`.
    """
    out = tiles.new_zeros(len(tiles), TILE, weights[0].size(0))
    first = 0
    for weight, count in zip(weights, counts, strict=True):
        if count:
            mine = slice(first, first + count)
            torch.bmm(tiles[mine], weight.t().expand(count, -1, -1), out=out[mine])
            first += count
    return out


def gated(x: torch.Tensor) -> torch.Tensor:
    """silu(gate) · up [N, F] of ``x`` = (gate, up) [N, 2F]."""
    gate, up = x.chunk(2, dim=-1)
    return padded(F.silu)(gate) * up
