"""Rank programs of test_objective_ranks.py."""

from __future__ import annotations

import warnings

import torch
import torch.distributed as dist

from megatron_rl.config import ObjectiveConfig
from megatron_rl.objective import (
    Denominators,
    MetricStats,
    compute_denominators,
    compute_objective,
    finalize_metrics,
)
from tests.unit.objective.batches import packed, padded, random_batch


def share(config: dict, seed: int) -> tuple[float, dict[int, list[float]], dict[str, float]]:
    """This rank's sequences in microbatches of two, alternately padded and packed: the reduced loss and metrics, and
    the gradients of its own sequences by their place in the batch."""
    warnings.simplefilter("ignore")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    parsed = ObjectiveConfig.model_validate(config)
    batch = random_batch(seed, num_sequences=9)
    mine = list(range(rank, len(batch), world_size))
    chosen = [mine[i : i + 2] for i in range(0, len(mine), 2)]
    made = [(packed if i % 2 else padded)([batch[j] for j in part]) for i, part in enumerate(chosen)]
    local = [compute_denominators(inputs, parsed) for inputs, _ in made]
    counts = sum(local[1:], local[0]).as_tensor()
    dist.all_reduce(counts)
    denominators = Denominators.from_tensor(counts, parsed.renormalizes)
    results = [compute_objective(inputs, parsed, denominators, (seed, 3)) for inputs, _ in made]
    gradients = {}
    for part, result, (inputs, mask) in zip(chosen, results, made):
        (gradient,) = torch.autograd.grad(result.loss, inputs.current_logprobs)
        pieces = gradient[mask].split([len(batch[j]) for j in part])
        gradients.update({j: piece.tolist() for j, piece in zip(part, pieces)})
    loss = torch.stack([result.loss.detach() for result in results]).sum()
    stats = MetricStats.merge([result.stats for result in results])
    dist.all_reduce(loss)
    dist.all_reduce(stats.sums)
    dist.all_reduce(stats.maxs, op=dist.ReduceOp.MAX)
    dist.all_reduce(stats.mins, op=dist.ReduceOp.MIN)
    return loss.item(), gradients, finalize_metrics(stats)
