"""Dealing sequences over data-parallel ranks and microbatches, and laying a microbatch out as one packed row.

Shapes: N packed tokens of a microbatch, b sequences in it, n response tokens in it.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
import torch
import torch.distributed as dist

from megatron_rl.config.objective import ObjectiveConfig
from megatron_rl.layers.attention import PackedSequences
from megatron_rl.layers.context import WHOLE_ROW, ContextShare
from megatron_rl.learner.model import use_transformer_engine
from megatron_rl.objective import Denominators, ObjectiveInputs, compute_denominators
from megatron_rl.objective.corrections import condensed
from megatron_rl.process.ranks import world_rank, world_size
from megatron_rl.routing import RouteSlice
from megatron_rl.types import SCORED_ARRAYS, Batch, Rollout


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


@dataclass(frozen=True)
class Row:
    """Where a packed row's sequences lie in it, before it is cut over context-parallel ranks."""

    lengths: list[int]  # [b] tokens of each sequence
    after: list[int]  # [b] tokens of padding after each, to whole chunks
    tail: int  # tokens of padding at the end, a sequence of their own
    share: ContextShare

    @property
    def padded(self) -> list[int]:
        """Lengths with their padding, and of the tail where there is one."""
        return [n + after for n, after in zip(self.lengths, self.after, strict=True)] + [self.tail] * (self.tail > 0)

    @property
    def starts(self) -> list[int]:
        """[b] places of the sequences' first tokens, and of the tail's where there is one."""
        return [0, *accumulate(self.padded)][:-1]

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """(start, stop) of what this context-parallel rank has of the row, in order."""
        return [(0, sum(self.padded))] if self.share.size == 1 else self.share.ranges(self.padded)


@dataclass
class RouterScores:
    """What the routers of a packed row gave to experts of theirs: N tokens, l layers, K experts."""

    experts: torch.Tensor  # [N, l, K] int64
    log_scores: torch.Tensor  # [N, l, K] float32, of a softmax over all experts


@dataclass
class Microbatch:
    """One packed row of tokens, or this rank's share of it, and what the objective needs of all its sequences, on the
    device. N is of this rank's share, n of the whole row, m of the n in the share."""

    indices: list[int]  # [b] into Batch.sequences
    tokens: torch.Tensor  # [1, N] int64; sequences and row are padded as the layout needs it (`ContextShare`)
    position_ids: torch.Tensor  # [N] int64, restarting at each sequence
    padding: torch.Tensor  # [1, N] bool, what statistics of routers leave out
    packed: PackedSequences
    row: Row
    positions: torch.Tensor  # [m] int64: the row here whose logits predict each response token
    labels: torch.Tensor  # [m] int64: the response tokens
    places: torch.Tensor | None  # [m] int64: which of the n response tokens they are; None: all, in order
    response_lengths: list[int]  # [b], sum n
    cu_seqlens: torch.Tensor  # [b + 1] int64, offsets of the sequences among the response tokens
    inference_logprobs: torch.Tensor  # [n] float32
    old_logprobs: torch.Tensor | None  # [n] float32
    reference_logprobs: torch.Tensor | None  # [n] float32
    scoring_logprobs: torch.Tensor | None  # [n] float32
    teacher_logprobs: torch.Tensor | None  # [n] float32
    advantages: torch.Tensor  # [b] float32
    loss_mask: torch.Tensor  # [n] bool
    policy_versions: torch.Tensor  # [n] int64
    num_real_tokens: int  # N without padding
    kept: torch.Tensor | None = None  # [m, C] int64: tokens that each distribution is over, then -1; None: all
    head: torch.Tensor | None = None  # [m, k] int64: the sampler's most probable tokens, -1 for none; None: no heads
    head_inference: torch.Tensor | None = None  # [n, k] float32
    head_old: torch.Tensor | None = None  # [n, k] float32; None where `old_logprobs` is None
    head_has_sampled: torch.Tensor | None = None  # [n] bool: the response token is one of them
    teacher_tokens: torch.Tensor | None = None  # [m, k] int64: sets that pi is compared with a teacher on, -1 for none
    teacher_set_logprobs: torch.Tensor | None = None  # [n, k] float32: log τ of them; None: there are no sets
    routes: RouteSlice | None = None  # this rank's, where they are replayed or watched
    router_before: RouterScores | None = None  # of a pass at the rollout weights, where the shift since is wanted
    router_now: RouterScores | None = None  # of the last pass: of the same experts, or of those that it chose


def build_microbatch(
    batch: Batch,
    indices: list[int],
    *,
    multiple_of: int,
    pad_token: int,
    device: torch.device,
    share: ContextShare = WHOLE_ROW,
    exact: bool = False,
) -> Microbatch:
    """Lay the sequences ``indices`` of ``batch`` out back to back, and take this rank's ``share`` of each.

    Padding follows the sequence that it belongs to, or is a sequence of its own at the end: attention, positions and
    losses of real tokens do not see it. ``multiple_of``: ranks that divide the share, under sequence parallelism.
    ``exact``: for a model of `rollout.engine: exact`.
    """
    sequences = [batch.sequences[i] for i in indices]
    row = _lay_out([s.whole_length for s in sequences], multiple_of, share)
    padded = row.padded
    starts = np.cumsum([0, *padded])
    rows = [np.arange(start + s.prompt_length, start + s.whole_length) - 1 for start, s in zip(starts, sequences)]

    def join(pieces: list[np.ndarray], dtype: torch.dtype) -> torch.Tensor:
        return torch.from_numpy(np.concatenate(pieces or [np.zeros(0)])).to(device=device, dtype=dtype)

    tokens = [x for s, n in zip(sequences, row.after, strict=True) for x in (s.whole, np.full(n, pad_token))]
    tokens.append(np.full(row.tail, pad_token))
    position_ids = [np.arange(n) for n in padded]
    padding = [np.arange(n) >= length for n, length in zip(padded, [*row.lengths, 0])]
    labels = [s.tokens for s in sequences]
    has_sets = bool(sequences) and all(s.kept_tokens is not None for s in sequences)
    kept = np.concatenate([s.kept_tokens for s in sequences]) if has_sets else None
    heads = _heads(sequences)
    head, places = None if heads is None else heads[0], None
    has_own = bool(sequences) and all(s.teacher_tokens is not None for s in sequences)
    of_teacher = np.concatenate([s.teacher_tokens for s in sequences]) if has_own else head
    if share.size > 1:
        own = np.concatenate([np.arange(a, b) for a, b in row.ranges])
        here = np.full(starts[-1], -1)  # of each token of the row its place in the share
        here[own] = np.arange(len(own))
        tokens, position_ids, padding = ([np.concatenate(x)[own]] for x in (tokens, position_ids, padding))
        chosen = here[np.concatenate([*rows, np.zeros(0, np.int64)])]
        places = np.flatnonzero(chosen >= 0)
        rows, labels = [chosen[places]], [np.concatenate([*labels, np.zeros(0, np.int64)])[places]]
        kept, head, of_teacher = (None if x is None else x[places] for x in (kept, head, of_teacher))
    known = {name: _joined_logprobs(sequences, name, device) for name in ("old_logprobs", *SCORED_ARRAYS)}
    return Microbatch(
        indices=indices,
        tokens=join(tokens, torch.int64)[None],
        position_ids=join(position_ids, torch.int64),
        padding=join(padding, torch.bool)[None],
        packed=PackedSequences.from_lengths(padded, device, use_transformer_engine(device, exact), share),
        row=row,
        positions=join(rows, torch.int64),
        labels=join(labels, torch.int64),
        places=None if places is None else join([places], torch.int64),
        response_lengths=[s.length for s in sequences],
        cu_seqlens=join([np.cumsum([0, *(s.length for s in sequences)])], torch.int64),
        inference_logprobs=join([s.inference_logprobs for s in sequences], torch.float32),
        advantages=torch.tensor([s.advantage for s in sequences], dtype=torch.float32, device=device),
        loss_mask=join([s.loss_mask for s in sequences], torch.bool),
        policy_versions=join([s.policy_versions for s in sequences], torch.int64),
        num_real_tokens=sum(int((~here).sum()) for here in padding),
        kept=None if kept is None else join([kept], torch.int64),
        head=None if heads is None else join([head], torch.int64),
        head_inference=None if heads is None else join([heads[1]], torch.float32),
        head_old=_joined_logprobs(sequences, "head_old_logprobs", device),
        head_has_sampled=None if heads is None else join([heads[2]], torch.bool),
        teacher_tokens=None if of_teacher is None else join([of_teacher], torch.int64),
        teacher_set_logprobs=_joined_logprobs(sequences, "teacher_set_logprobs", device),
        **known,
    )


def _joined_logprobs(sequences: list[Rollout], name: str, device: torch.device) -> torch.Tensor | None:
    """Log-probs [n] float32, of heads [n, k], of all responses; None where some sequence has none."""
    arrays = [getattr(s, name) for s in sequences]
    if not arrays or any(array is None for array in arrays):
        return None
    return torch.from_numpy(np.concatenate(arrays)).to(device=device, dtype=torch.float32)


def _heads(sequences: list[Rollout]) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
    """Tokens of all heads [n, k], log mu of them [n, k], and whether the response token is among them [n]; None where
    some sequence has none."""
    if not sequences or any(s.head_logprobs is None for s in sequences):
        return None
    tokens = [s.kept_tokens if s.head_tokens is None else s.head_tokens for s in sequences]
    has_sampled = [(head == s.tokens[:, None]).any(axis=1) for head, s in zip(tokens, sequences, strict=True)]
    logprobs = [s.head_logprobs for s in sequences]
    return np.concatenate(tokens), np.concatenate(logprobs), np.concatenate(has_sampled)


def _lay_out(lengths: list[int], tensor: int, share: ContextShare) -> Row:
    after = [share.padded(n) - n for n in lengths]
    multiple, total = share.row_multiple(tensor), sum(lengths) + sum(after)
    return Row(lengths, after, -total % multiple if total else multiple, share)


def minibatch_denominators(sequences: list[Rollout], config: ObjectiveConfig) -> Denominators:
    """What the losses of a mini-batch are divided by, from all of its sequences, whichever rank will run them.

    Collective where the objective counts what its corrections do (`renormalize`, `normalize`, `m2po`): each rank counts
    the sequences that it speaks for (`Rollout.holder`).
    """
    if not config.renormalizes:
        return Denominators(float(sum(s.num_trained for s in sequences)), float(len(sequences)), False)
    if all(s.holder is None for s in sequences):
        return _count(sequences, config)
    local_sequences = [s for s in sequences if s.holder == world_rank()]
    counts = _count(local_sequences, config) if local_sequences else Denominators(0.0, 0.0, True)
    sums = counts.as_tensor()  # whole numbers, in any order, but for the sum of the weights
    if world_size() > 1:
        dist.all_reduce(sums)
    moments = None
    if config.m2po_threshold:  # one row says the same as all
        moments = torch.tensor([[_first_dropped(counts.moments, config.m2po_threshold), 1.0]], dtype=torch.float64)
    return replace(Denominators.from_tensor(sums.tolist(), counts.renormalized), moments=moments)


def _first_dropped(moments: torch.Tensor | None, threshold: float) -> float:
    """`smallest_dropped` of all ranks, by bisection over the bits of float32: no square travels. Collective."""
    square, number = torch.zeros(2, 0) if moments is None else moments.unbind(1)
    low, high = (int(np.float32(x).view(np.int32)) for x in (0.0, np.inf))
    while low < high:
        middle = (low + high) // 2
        seen = number * (square <= float(np.int32(middle).view(np.float32)))
        sums = torch.stack([(square * seen).sum(), seen.sum()]).double()
        if world_size() > 1:
            dist.all_reduce(sums)
        low, high = (low, middle) if sums[0] > threshold * sums[1] else (middle + 1, high)
    return float(np.int32(low).view(np.float32))


def _count(sequences: list[Rollout], config: ObjectiveConfig) -> Denominators:
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
            cu_seqlens=torch.tensor([0, *(s.length for s in sequences)]).cumsum(0),
        ),
        config,
    )
    moments = None if counts.moments is None else condensed(counts.moments, config.m2po_threshold)
    # Plain numbers: no copy to the device per microbatch.
    return replace(Denominators.from_tensor(counts.as_tensor().tolist(), counts.renormalized), moments=moments)
