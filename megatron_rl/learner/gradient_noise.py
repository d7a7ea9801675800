"""What one update says of gradient noise and of how far it moved the weights, measured where gradients and Adam live.

Two squared gradient norms, of a large batch (the mini-batch) and of small ones (its parts), make the gradient noise
scale [McCandlish et al., arXiv 1812.06162, App. A.1]; the monitor combines them (`monitor.monitor`). The parts are
what each data-parallel rank has before the reduction, or else the first microbatch of each rank. Under context
parallelism a part is the sum of what its ranks have, which is reduced for this measurement alone.

Experts are left out of both norms: under expert parallelism a rank's expert gradients are sums over the tokens of all
of its peers, and no part can be told from the others. An embedding tied over two pipeline stages is left out, too,
because its gradient is in two halves until it is reduced. The noise scale is that of the other weights.

`Scorer` gives the weight of each response in the baseline of least variance: w² |∇ log pi|² [arXiv 2602.17616].

Norms are of one response's gradient, so that each has a forward and a backward pass of its own; the replicas work side
by side. Experts are left out of these norms, too: under expert parallelism their gradients are sums
over the responses of several replicas.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer.module import param_is_not_shared

from megatron_rl.checkpoint.shards import distributed_optimizers
from megatron_rl.learner.packing import Microbatch
from megatron_rl.learner.passes import Passes, speaks
from megatron_rl.learner.router_replay import RoutingMode
from megatron_rl.objective import compute_advantages
from megatron_rl.objective.inputs import safe_exp
from megatron_rl.types import Batch

CHUNK = 2**24  # elements looked at at once: bounds the temporaries (three of them, fp32) to 192 MiB


def small_batch(squared_norms: Sequence[float], sizes: Sequence[float]) -> tuple[float, float]:
    """(mean |G_i|², effective batch size) of the parts of a batch: data-parallel ranks, or microbatches.

    ``squared_norms[i]``: of the *mean* gradient over the ``sizes[i]`` sequences of part i, that is, of the part's
    contribution to the global gradient times (all sequences / its own). E|G_i|² = |G|² + tr Σ / b_i, so parts of
    unequal size act like equal parts of their harmonic mean.
    """
    if len(squared_norms) != len(sizes) or not sizes:
        raise ValueError(f"{len(squared_norms)} norms for {len(sizes)} sizes: one of each per part")
    return sum(squared_norms) / len(sizes), len(sizes) / sum(1.0 / size for size in sizes)


class LocalGradient:
    """What this rank's data-parallel replica has of a gradient before the reduction over replicas."""

    def __init__(self, model: DistributedDataParallel) -> None:
        measured = [(name, p) for name, p in model.named_parameters() if _is_measured(p)]
        self._partial = [p for name, p in measured if _is_partial(name, p, model.config)]
        self._whole = [p for name, p in measured if not _is_partial(name, p, model.config)]
        self._device = next(model.parameters()).device

    @torch.no_grad()
    def square(self) -> torch.Tensor:
        """Float64 scalar: this rank's share of the replica's squared norm. Collective within the replica."""
        counted = [p.main_grad for p in self._whole if param_is_not_tensor_parallel_duplicate(p)]
        square = _sum_over_context(counted, self._device)
        if self._partial:
            summed = torch.cat([p.main_grad.flatten() for p in self._partial])
            group = parallel_state.get_tensor_and_context_parallel_group()
            dist.all_reduce(summed, group=group)
            if group.rank() == 0:
                square = square + _sum_of_squares([summed], self._device)
        return square


class GradientNoise:
    """Measures the inputs of the noise scale during each update. Every rank has one and calls it alike.

    Costs one pass over the gradients of this rank, and one more over its shard of the reduced ones. ``model.config``
    must have its `finalize_model_grads_func`, which is wrapped.

    The parts are what `deal` made of the mini-batch: of nearly equal token counts and, in group-relative advantages,
    not independent. tr Σ is that of such parts, a little below that of sequences drawn one by one.
    """

    def __init__(self, model: DistributedDataParallel, optimizer: MegatronOptimizer) -> None:
        self._optimizer = optimizer
        self._device = next(model.parameters()).device
        self._part = LocalGradient(model)
        # With reduction during the last backward pass no rank ever holds its own gradient alone, except that of its
        # first microbatches.
        self._of_first_microbatch = (
            parallel_state.get_data_parallel_world_size() == 1 or model.ddp_config.overlap_grad_reduce
        )
        self._sizes: list[int] = []
        self._total = self._forwards = 0
        self._local = self._global = None  # float64 scalars: this rank's share of the squared norms
        self._local_size = 0
        self._loss_scale = 1.0
        model.register_forward_pre_hook(self._before_forward)
        model.config.finalize_model_grads_func = self._around(model.config.finalize_model_grads_func)

    def begin(self, sizes: Sequence[int], total: int) -> None:
        """Begin an update: ``sizes`` of this rank's microbatches and ``total`` of the mini-batch, in sequences."""
        self._sizes, self._total, self._forwards, self._local = list(sizes), total, 0, None

    def _before_forward(self, *_: Any) -> None:
        if not self._sizes or not torch.is_grad_enabled():
            return  # no update; log-probs
        self._forwards += 1
        # Without a pipeline the first microbatch's backward pass is over when the second's forward pass begins.
        if self._forwards == 2 and self._of_first_microbatch and not _has_pipeline():
            self._measure_local(self._sizes[0])

    def _around(self, finalize: Callable[..., None]) -> Callable[..., None]:
        def measured(model: list[torch.nn.Module], num_tokens: torch.Tensor | None, **kwargs: Any) -> None:
            if self._sizes and not self._of_first_microbatch:
                self._measure_local(sum(self._sizes))
            finalize(model, num_tokens, **kwargs)
            self._loss_scale = float(self._optimizer.get_loss_scale())
            shards = [
                p.main_grad.view(-1)[start:end] for p, start, end in counted_shards(self._optimizer) if _is_measured(p)
            ]
            self._global = _sum_of_squares(shards, self._device)

        return measured

    def _measure_local(self, num_sequences: int) -> None:
        self._local, self._local_size = self._part.square(), num_sequences

    def collect(self) -> dict[str, float]:
        """`noise/{sq_small,sq_big,batch_small,batch_big}` of the update since `begin`, the same on every rank.

        Empty where it has no parts: one data-parallel rank with one microbatch, or with a pipeline. Collective.
        """
        if self._local is None:
            return {}
        num_parts, part = parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank()
        table = torch.zeros(2 * num_parts + 1, dtype=torch.float64, device=self._device)
        table[part], table[-1] = self._local, self._global
        first = parallel_state.get_tensor_model_parallel_rank() == parallel_state.get_context_parallel_rank() == 0
        if first and parallel_state.is_pipeline_first_stage():
            table[num_parts + part] = self._local_size
        dist.all_reduce(table)
        squares, sizes = table[:num_parts].tolist(), table[num_parts:-1].tolist()
        unit = self._loss_scale**-2
        parts = [(unit * sq * (self._total / size) ** 2, size) for sq, size in zip(squares, sizes, strict=True) if size]
        mean_sq, batch_small = small_batch(*zip(*parts, strict=True)) if parts else (0.0, self._total)
        if batch_small >= self._total:
            return {}  # all sequences in one part
        return {
            "noise/sq_small": mean_sq,
            "noise/sq_big": unit * table[-1].item(),
            "noise/batch_small": batch_small,
            "noise/batch_big": float(self._total),
        }


@torch.no_grad()
def update_size(optimizer: MegatronOptimizer) -> dict[str, float]:
    """`noise/update_rms` (per weight) and `noise/relative_update` (|Δθ| / |θ|) of the Adam step just made. Collective.

    From Adam's moments, without a copy of the weights: Δθ = −lr · m̂ / (√v̂ + eps) − lr · decay · θ, of the fp32 master
    weights; θ is that after the step. Call it before the scheduler moves on. Each weight counts once, whatever the
    layout.
    """
    sums = torch.zeros(3, dtype=torch.float64, device=optimizer.get_loss_scale().device)
    for sharded in distributed_optimizers(optimizer):
        for group in sharded.optimizer.param_groups:
            counted = [p for p in group["params"] if _counts_once(p, sharded)]
            states = [(p, state) for p in counted if (state := sharded.optimizer.state.get(p))]
            for batch in _batches([(p, state["exp_avg"], state["exp_avg_sq"]) for p, state in states]):
                # torch's Adam counts steps per weight (a group then keeps the count of the checkpoint it was loaded
                # from), TransformerEngine's per group; within one they never differ.
                step = states[0][1].get("step", group.get("step"))
                sums += _update_sums(*batch, float(step), group)
    dist.all_reduce(sums)
    change_sq, weight_sq, count = sums.tolist()
    return {
        "noise/update_rms": math.sqrt(change_sq / count) if count else math.nan,
        "noise/relative_update": math.sqrt(change_sq / weight_sq) if weight_sq else math.nan,
    }


def _batches(shards: Sequence[tuple[torch.Tensor, ...]]) -> Iterator[list[list[torch.Tensor]]]:
    """Flat pieces of the tensors of each item, cut alike, in lists of at most `CHUNK` elements together."""
    pieces, size = [], 0
    for shard in shards:
        for piece in zip(*(tensor.view(-1).split(CHUNK) for tensor in shard), strict=True):
            if size + piece[0].numel() > CHUNK and pieces:
                yield [list(column) for column in zip(*pieces, strict=True)]
                pieces, size = [], 0
            pieces.append(piece)
            size += piece[0].numel()
    if pieces:
        yield [list(column) for column in zip(*pieces, strict=True)]


def _update_sums(
    after: list[torch.Tensor],
    mean: list[torch.Tensor],
    mean_sq: list[torch.Tensor],
    step: float,
    group: dict[str, Any],
) -> torch.Tensor:
    """[3] float64: Σ Δθ², Σ θ², elements; of weights and moments after Adam's step number ``step``.

    m̂ / (√v̂ + eps) = (r / (1 − β1^n)) · m / (√v + r · eps) with r = √(1 − β2^n): fewer passes over memory.
    """
    beta1, beta2 = group["betas"]
    lr, decay = float(group["lr"]), float(group["lr"]) * group["weight_decay"]
    root = math.sqrt(1.0 - beta2**step)
    divisor = torch._foreach_sqrt(mean_sq)
    torch._foreach_add_(divisor, group["eps"] * root)
    change, unit = torch._foreach_div(mean, divisor), lr * root / (1.0 - beta1**step)
    if decay:
        torch._foreach_mul_(change, unit)
        before = torch._foreach_add(after, change)  # times 1 − decay
        torch._foreach_add_(change, before, alpha=decay / (1.0 - decay))
        unit = 1.0
    device = after[0].device
    sums = [_sum_of_squares(change, device) * unit**2, _sum_of_squares(after, device)]
    return torch.stack([*sums, sums[0].new_tensor(sum(tensor.numel() for tensor in after))])


def _sum_of_squares(tensors: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Float64 scalar on ``device``; each tensor's own norm is taken in its dtype."""
    if not tensors:  # a rank without a shard of what is measured
        return torch.zeros((), dtype=torch.float64, device=device)
    return torch.stack(torch._foreach_norm(list(tensors))).double().square().sum()


def _sum_over_context(gradients: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """This rank's share of the squared norm of the sum of ``gradients`` over context-parallel ranks, each of which has
    those of its tokens. Collective among them."""
    group = parallel_state.get_context_parallel_group()
    if group.size() == 1:
        return _sum_of_squares(gradients, device)
    squares = torch.zeros((), dtype=torch.float64, device=device)
    for (batch,) in _batches([(gradient,) for gradient in gradients]):
        flat = torch.cat(batch)
        flat = torch.nn.functional.pad(flat, (0, -len(flat) % group.size()))
        share = flat.new_empty(len(flat) // group.size())
        dist.reduce_scatter_tensor(share, flat, group=group)
        squares += _sum_of_squares([share], device)
    return squares


def counted_shards(optimizer: MegatronOptimizer) -> Iterator[tuple[torch.nn.Parameter, int, int]]:
    """(model parameter, start, end) of what this rank updates and counts: the valid part of its reduced gradient."""
    for sharded in optimizer.chained_optimizers:
        for parameter in getattr(sharded, "model_param_group_index_map", ()):
            if _counts_once(parameter, sharded):
                part = sharded._get_model_param_range_map(parameter)["param"]
                yield parameter, part.start, part.end


def _counts_once(parameter: torch.Tensor, optimizer: MegatronOptimizer) -> bool:
    """Whether this rank's copy is the one that counts, as in Megatron's gradient norm."""
    group = getattr(optimizer, "tp_group", None)
    return param_is_not_shared(parameter) and param_is_not_tensor_parallel_duplicate(parameter, group)


def _is_measured(parameter: torch.nn.Parameter) -> bool:
    is_expert = not getattr(parameter, "allreduce", True)
    of_two_halves = _has_pipeline() and getattr(parameter, "shared_embedding", False)
    return parameter.requires_grad and not is_expert and not of_two_halves


def _is_partial(name: str, parameter: torch.nn.Parameter, config: Any) -> bool:
    """Whether each tensor-parallel rank holds a summand of the gradient until Megatron's finalization."""
    if config.tensor_model_parallel_size == 1:
        return False
    is_qk_norm = config.qk_layernorm and ("q_layernorm" in name or "k_layernorm" in name)
    return is_qk_norm or (config.sequence_parallel and getattr(parameter, "sequence_parallel", False))


def _has_pipeline() -> bool:
    return parallel_state.get_pipeline_model_parallel_world_size() > 1


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
        torch.tensor([s.reward - s.kl_penalty for s in batch.sequences], dtype=torch.float64),
        torch.tensor([sequence.group for sequence in batch.sequences]),
        name,
        weights=score_weights(scorer, batch, homes),
    )
    for sequence, advantage in zip(batch.sequences, advantages.tolist(), strict=True):
        sequence.advantage = advantage if sequence.num_trained else 0.0


def score_weights(scorer: Scorer, batch: Batch, homes: list[int]) -> torch.Tensor:
    """[B] float64: w² |g|² of each sequence, w = Π_t pi/mu and g = ∇ Σ_t log pi_t over its trained tokens, at the
    weights that the learner has; the same on every rank. Collective."""
    model, mode = scorer.model, "native" if scorer.mode == "watch" else scorer.mode
    of_replica = [[i for i, home in enumerate(homes) if home == replica] for replica in range(max(homes) + 1)]
    of_this_replica = of_replica[scorer.replica] if scorer.replica < len(of_replica) else []
    table = torch.zeros(2, len(homes), dtype=torch.float64, device=scorer.device)
    gradient, finalize = LocalGradient(model), model.config.finalize_model_grads_func
    model.config.finalize_model_grads_func = None  # each replica has a response of its own
    try:
        for turn in range(max(len(numbers) for numbers in of_replica)):
            index = of_this_replica[turn] if turn < len(of_this_replica) else None
            microbatch = scorer.passes.alone(batch, index, mode)
            model.zero_grad_buffer()
            scores = scorer.passes.run([microbatch], partial(_score, scorer.token_logprobs), mode, observe=False)
            square = gradient.square()
            if index is not None:
                table[1, index] = square
                if speaks():
                    table[0, index] = scores[0]
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
