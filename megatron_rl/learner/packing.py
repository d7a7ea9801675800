"""Dealing sequences over data-parallel ranks and microbatches, and laying a microbatch out as one packed row.

Shapes: N packed tokens of a microbatch, b sequences in it, n response tokens in it.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from megatron_rl.config.objective import ObjectiveConfig
from megatron_rl.learner.layers.attention import PackedSequences
from megatron_rl.learner.model import use_transformer_engine
from megatron_rl.objective import Denominators, ObjectiveInputs, compute_denominators
from megatron_rl.process.ranks import world_rank, world_size
from megatron_rl.routing import RouteSlice
from megatron_rl.types import Batch, Sequence


def deal(lengths: Seq[int], num_ranks: int, max_tokens: int) -> list[list[list[int]]]:
    """Indices of sequences per rank and microbatch: ``result[rank][microbatch]``.

    Every rank gets the same number of microbatches (expert-parallel ranks exchange tokens in each), as few as
    ``max_tokens`` allows, and microbatches that run at the same time are of similar size. A sequence longer than
    ``max_tokens`` goes alone; a microbatch can be empty when there are fewer sequences than ranks.
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    # At least enough room, and one bin for each sequence that is too long to share one.
    num_bins = max(-(-sum(lengths) // max_tokens), sum(2 * length > max_tokens for length in lengths))
    num_rounds = max(1, -(-num_bins // num_ranks))
    while (bins := _fill(order, lengths, num_rounds * num_ranks, max_tokens)) is None:
        num_rounds += 1
    bins.sort(key=lambda b: -sum(lengths[i] for i in b))
    plan: list[list[list[int]]] = [[] for _ in range(num_ranks)]
    for round_ in range(num_rounds):
        row = bins[round_ * num_ranks : (round_ + 1) * num_ranks]
        for rank, indices in enumerate(row if round_ % 2 == 0 else reversed(row)):
            plan[rank].append(sorted(indices))
    return plan


def _fill(order: list[int], lengths: Seq[int], num_bins: int, max_tokens: int) -> list[list[int]] | None:
    """Longest first into the emptiest bin (LPT); None where one overflows."""
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    heap = [(0, number) for number in range(num_bins)]  # (tokens, bin): the first of the emptiest is on top
    for i in order:
        tokens, emptiest = heap[0]
        if bins[emptiest] and tokens + lengths[i] > max_tokens:
            return None
        bins[emptiest].append(i)
        heapq.heapreplace(heap, (tokens + lengths[i], emptiest))
    return bins


@dataclass
class Microbatch:
    """One packed row of tokens and what the objective needs of its sequences, on the device."""

    indices: list[int]  # [b] into Batch.sequences
    tokens: torch.Tensor  # [1, N] int64; the tail is padding to a multiple of the tensor-parallel size
    position_ids: torch.Tensor  # [N] int64, restarting at each sequence
    packed: PackedSequences
    positions: torch.Tensor  # [n] int64: the row whose logits predict each response token
    labels: torch.Tensor  # [n] int64: the response tokens
    response_lengths: list[int]  # [b], sum n
    cu_seqlens: torch.Tensor  # [b + 1] int64, offsets of the sequences among the response tokens
    inference_logprobs: torch.Tensor  # [n] float32
    old_logprobs: torch.Tensor | None  # [n] float32
    advantages: torch.Tensor  # [b] float32
    loss_mask: torch.Tensor  # [n] bool
    num_real_tokens: int  # N without padding
    routes: RouteSlice | None = None  # this rank's, where they are replayed or watched


def build_microbatch(
    batch: Batch, indices: list[int], *, multiple_of: int, pad_token: int, device: torch.device
) -> Microbatch:
    """Lay the sequences ``indices`` of ``batch`` out back to back.

    The tail padding is a sequence of its own: attention, positions and losses of real tokens do not see it.
    """
    sequences = [batch.sequences[i] for i in indices]
    lengths = [len(s.tokens) for s in sequences]
    total = sum(lengths)
    tail = -total % multiple_of if total else multiple_of
    starts = np.cumsum([0, *lengths])
    rows = lengths + [tail] * (tail > 0)
    positions = [np.arange(start + s.prompt_length, start + len(s.tokens)) - 1 for start, s in zip(starts, sequences)]

    def join(pieces: list[np.ndarray], dtype: torch.dtype) -> torch.Tensor:
        return torch.from_numpy(np.concatenate(pieces or [np.zeros(0)])).to(device=device, dtype=dtype)

    has_old = bool(sequences) and all(s.old_logprobs is not None for s in sequences)
    return Microbatch(
        indices=indices,
        tokens=join([s.tokens for s in sequences] + [np.full(tail, pad_token)], torch.int64)[None],
        position_ids=join([np.arange(n) for n in rows], torch.int64),
        packed=PackedSequences.from_lengths(rows, device, thd=use_transformer_engine(device)),
        positions=join(positions, torch.int64),
        labels=join([s.tokens[s.prompt_length :] for s in sequences], torch.int64),
        response_lengths=[s.response_length for s in sequences],
        cu_seqlens=join([np.cumsum([0, *(s.response_length for s in sequences)])], torch.int64),
        inference_logprobs=join([s.inference_logprobs for s in sequences], torch.float32),
        old_logprobs=join([s.old_logprobs for s in sequences], torch.float32) if has_old else None,
        advantages=torch.tensor([s.advantage for s in sequences], dtype=torch.float32, device=device),
        loss_mask=join([s.loss_mask for s in sequences], torch.bool),
        num_real_tokens=total,
    )


def minibatch_denominators(sequences: list[Sequence], config: ObjectiveConfig) -> Denominators:
    """What the losses of a mini-batch are divided by, from all of its sequences, whichever rank will run them.

    Collective where the objective counts what its corrections keep (`renormalize`): each rank counts the sequences that
    it speaks for (`Sequence.holder`).
    """
    if not config.renormalizes:
        return Denominators(float(sum(s.num_trained for s in sequences)), float(len(sequences)), False)
    if all(s.holder is None for s in sequences):
        return _count(sequences, config)
    mine = [s for s in sequences if s.holder == world_rank()]
    counts = _count(mine, config) if mine else Denominators(0.0, 0.0, True)
    sums = torch.tensor([counts.num_tokens, counts.num_sequences], dtype=torch.float64)  # whole numbers: any order
    if world_size() > 1:
        dist.all_reduce(sums)
    return Denominators(*sums.tolist(), counts.renormalized)


def _count(sequences: list[Sequence], config: ObjectiveConfig) -> Denominators:
    old, inference, mask = (
        torch.from_numpy(np.concatenate([getattr(s, name) for s in sequences]))
        if all(getattr(s, name) is not None for s in sequences)
        else None
        for name in ("old_logprobs", "inference_logprobs", "loss_mask")
    )
    counts = compute_denominators(
        ObjectiveInputs(
            current_logprobs=inference if old is None else old,
            old_logprobs=old,
            inference_logprobs=inference,
            advantages=torch.tensor([s.advantage for s in sequences]),
            loss_mask=mask,
            cu_seqlens=torch.tensor([0, *(s.response_length for s in sequences)]).cumsum(0),
        ),
        config,
    )
    # Plain numbers: no copy to the device per microbatch.
    return Denominators(float(counts.num_tokens), float(counts.num_sequences), counts.renormalized)
