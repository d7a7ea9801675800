"""How much each response of a batch weighs in the baseline of least variance: w² |∇ log pi|² [arXiv 2602.17616].

Norms are of one response's gradient, so that each has a forward and a backward pass of its own; the replicas work side
by side. Experts are left out of the norms, as in `gradient_noise`: under expert parallelism their gradients are sums
over the responses of several replicas.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel

from megatron_rl.learner.gradient_noise import LocalGradient
from megatron_rl.learner.packing import Microbatch
from megatron_rl.learner.passes import Passes, speaks
from megatron_rl.learner.router_replay import RoutingMode
from megatron_rl.objective import compute_advantages
from megatron_rl.objective.guards import safe_exp
from megatron_rl.types import Batch


@dataclass(frozen=True)
class Scorer:
    """What of a learner computes ∇ log pi. ``replica``: this rank's own."""

    model: DistributedDataParallel
    passes: Passes
    replica: int
    mode: RoutingMode
    token_logprobs: Callable
    device: torch.device


def set_advantages(scorer: Scorer, batch: Batch, homes: list[int], name: str) -> None:
    """Give every sequence of ``batch`` its advantage ``name`` with the weights of `score_weights`; a batch whose
    sequences have no group keeps what it has. ``homes``: [B] the replica of each. Collective."""
    if any(sequence.group is None for sequence in batch.sequences):
        return
    advantages = compute_advantages(
        torch.tensor([sequence.reward for sequence in batch.sequences], dtype=torch.float64),
        torch.tensor([sequence.group for sequence in batch.sequences]),
        name,
        weights=score_weights(scorer, batch, homes),
    )
    for sequence, advantage in zip(batch.sequences, advantages.tolist(), strict=True):
        sequence.advantage = advantage * sequence.prompt_weight if sequence.num_trained else 0.0


def score_weights(scorer: Scorer, batch: Batch, homes: list[int]) -> torch.Tensor:
    """[B] float64: w² |g|² of each sequence, w = Π_t pi/mu and g = ∇ Σ_t log pi_t over its trained tokens, at the
    weights that the learner has; the same on every rank. Collective."""
    model, mode = scorer.model, "native" if scorer.mode == "watch" else scorer.mode
    of_replica = [[i for i, home in enumerate(homes) if home == replica] for replica in range(max(homes) + 1)]
    mine = of_replica[scorer.replica] if scorer.replica < len(of_replica) else []
    table = torch.zeros(2, len(homes), dtype=torch.float64, device=scorer.device)
    gradient, finalize = LocalGradient(model), model.config.finalize_model_grads_func
    model.config.finalize_model_grads_func = None  # each replica has a response of its own
    try:
        for turn in range(max(len(numbers) for numbers in of_replica)):
            index = mine[turn] if turn < len(mine) else None
            microbatch = scorer.passes.alone(batch, index, mode)
            model.zero_grad_buffer()
            found = scorer.passes.run([microbatch], partial(_score, scorer.token_logprobs), mode, observe=False)
            square = gradient.square()
            if index is not None:
                table[1, index] = square
                if speaks():
                    table[0, index] = found[0]
    finally:
        model.config.finalize_model_grads_func = finalize
    if dist.is_initialized():
        dist.all_reduce(table)
    log_w, squares = table
    return safe_exp(log_w).square() * squares


def _score(
    token_logprobs: Callable, logits: torch.Tensor, microbatch: Microbatch
) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Σ_t log pi_t of the trained tokens with its gradient, and Σ_t (log pi_t - log mu_t)."""
    unit = torch.ones((), dtype=torch.int, device=logits.device)
    if not microbatch.indices:
        return logits.sum() * 0.0, unit, 0.0
    logprobs, _ = token_logprobs(logits, microbatch)
    trained = logprobs.masked_fill(~microbatch.loss_mask, 0.0)
    mu = microbatch.inference_logprobs.masked_fill(~microbatch.loss_mask, 0.0)
    return trained.sum(), unit, float((trained.detach().double() - mu.double()).sum())
