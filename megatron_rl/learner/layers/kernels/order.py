"""Choices of experts put in the order of the experts, whose numbers nothing has to know."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from megatron_rl.learner.layers.kernels.device import NUM_WARPS, check

CHOICES = 1024  # that a program looks at a time


@triton.jit
def _sort_by_expert(
    chosen, probs, tokens, sorted_probs, places, ends, number, first, num_local, TOP: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """One of ``num_local`` experts and, as the last one, all that are elsewhere: where their choices begin is how many
    go before."""
    mine = tl.program_id(0)
    at = 0
    for start in range(0, number, BLOCK):
        place = start + tl.arange(0, BLOCK)
        expert = tl.load(chosen + place, mask=place < number, other=first - 1).to(tl.int32) - first
        at += tl.sum(((expert >= 0) & (expert < mine)).to(tl.int32), axis=0)
    for start in range(0, number, BLOCK):
        place = start + tl.arange(0, BLOCK)
        expert = tl.load(chosen + place, mask=place < number, other=0).to(tl.int32) - first
        expert = tl.where((expert < 0) | (expert > num_local), num_local, expert)
        is_mine = (expert == mine) & (place < number)
        target = at + tl.cumsum(is_mine.to(tl.int32), axis=0) - 1
        tl.store(tokens + target, place // TOP, mask=is_mine)
        tl.store(sorted_probs + target, tl.load(probs + place, mask=is_mine, other=0.0), mask=is_mine)
        tl.store(places + place, target, mask=is_mine)
        at += tl.sum(is_mine.to(tl.int32), axis=0)
    tl.store(ends + mine, at)


def sort_by_expert(
    chosen: torch.Tensor, probs: torch.Tensor, first: int, num_local: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Choices sorted by expert, those of one expert in the order of the tokens, those of experts elsewhere last.

    Args:
        chosen: [N, K] int32 or int64, experts of each token.
        probs: [N, K], their probabilities.
        first, num_local: the experts that are here.

    Returns:
        of each of N·K choices, sorted, the token [N·K] int64 and the probability [N·K]; of each choice its place
        [N, K] int64 among them; [num_local] int32, the number of choices of the experts that are here up to each one.
    """
    check("sort_by_expert", probs)
    if chosen.dim() != 2 or probs.shape != chosen.shape or chosen.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"sort_by_expert: {tuple(chosen.shape)} {chosen.dtype} and {tuple(probs.shape)}; expected [N, K] of "
            "integers and [N, K]"
        )
    chosen, probs, number = chosen.contiguous(), probs.contiguous(), chosen.numel()
    tokens = torch.empty(number, dtype=torch.int64, device=probs.device)
    places = torch.empty(chosen.shape, dtype=torch.int64, device=probs.device)
    sorted_probs = probs.new_empty(number)
    ends = torch.empty(num_local + 1, dtype=torch.int32, device=probs.device)
    _sort_by_expert[(num_local + 1,)](
        chosen, probs, tokens, sorted_probs, places, ends, number, first, num_local, chosen.size(1), CHOICES,
        num_warps=NUM_WARPS,
    )  # fmt: skip
    return tokens, sorted_probs, places, ends[:-1]
