"""Inputs of an objective, and its denominators.

Shapes: ``B`` sequences, ``T`` padded length, ``N`` packed tokens; "tokens" is [B, T] when padded and [N] when packed.

Numeric guards come first, each with its reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from megatron_rl.config.objective import Anchor, ObjectiveConfig, label_of
from megatron_rl.errors import InputError
from megatron_rl.types import MIN_LOGPROB

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to ±20 before exp. e^20 = 4.9e8 fits every dtype that losses are computed in, and its square
fits float32. A larger ratio means unrelated policies and cannot guide an update. Outside the clamp the ratio is
constant, so its gradient is zero."""

STD_EPSILON = 1e-6
"""Added to the group's standard deviation in GRPO advantages, as the papers do."""

MIN_WHITENING_VARIANCE = 1e-8
"""Floor of the variance that reinforce_pp divides by, so that a batch of equal rewards stays at zero."""


def safe_exp(log_ratio: Tensor) -> Tensor:
    """Return exp of a log-ratio clamped to ±MAX_LOG_RATIO; the gradient is zero outside."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def k3(log_ratio: Tensor) -> Tensor:
    """Return the k3 estimate of a KL divergence, ratio - 1 - log ratio >= 0, of a log-ratio clamped to ±MAX_LOG_RATIO.

    It uses expm1, because in float32 the plain form has no correct digit if both policies agree to 1e-3.
    """
    clamped = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return clamped.expm1() - clamped


# Layouts: reductions from tokens to sequences and back, the same for padded rows and packed tokens.
#
# Shapes: ``B`` sequences, ``T`` padded length, ``N`` packed tokens; "tokens" is [B, T] when padded and [N] when packed.
# No operation waits for the device. None uses atomics, so equal inputs give equal bits.


class Layout(Protocol):
    num_sequences: int

    def sum(self, values: Tensor) -> Tensor:
        """tokens → [B]: sum over each sequence; differentiable."""

    def max(self, values: Tensor) -> Tensor:
        """tokens → [B]: largest value of each sequence; not differentiable. Values must be >= 0."""

    def expand(self, per_sequence: Tensor) -> Tensor:
        """[B] → tokens: each token gets its sequence's value; differentiable where floating point."""

    def rank(self, mask: Tensor) -> Tensor:
        """bool tokens → int64 tokens: number of earlier tokens of the same sequence where ``mask`` is true."""

    def future_sum(self, values: Tensor, mask: Tensor, decay: float) -> Tensor:
        """tokens → tokens: y_t = Σ_{k >= t} decay^(k - t) values_k over the rest of the sequence; not differentiable.

        Only tokens where ``mask`` is true count, in the values (0 elsewhere) and in the distance k - t.
        """


def _future_sum(values: Tensor, decay: Tensor) -> Tensor:
    """y_t = values_t + decay_t · y_(t + 1) along the last dimension, in log2(T) steps of twice the reach."""
    reach, length = 1, values.shape[-1]
    while reach < length:
        later, far = (torch.nn.functional.pad(x[..., reach:], (0, reach)) for x in (values, decay))
        values, decay = values + decay * later, decay * far
        reach *= 2
    return values


class Padded:
    """One sequence per row of [B, T]."""

    def __init__(self, mask: Tensor):
        self.num_sequences, self._width = mask.shape

    def sum(self, values: Tensor) -> Tensor:
        return values.sum(dim=-1)

    def max(self, values: Tensor) -> Tensor:
        return values.amax(dim=-1) if self._width else values.new_zeros(self.num_sequences)

    def expand(self, per_sequence: Tensor) -> Tensor:
        return per_sequence[:, None].expand(-1, self._width)

    def rank(self, mask: Tensor) -> Tensor:
        counted = mask.to(torch.int64)
        return counted.cumsum(dim=-1) - counted

    def future_sum(self, values: Tensor, mask: Tensor, decay: float) -> Tensor:
        return _future_sum(values, torch.ones_like(values).masked_fill_(mask, decay))


class Packed:
    """Sequences one after another in [N]; sequence i holds tokens cu_seqlens[i] to cu_seqlens[i + 1] - 1.

    Tokens beyond the last offset (padding of the pack) belong to no sequence and must be masked out.
    """

    def __init__(self, mask: Tensor, cu_seqlens: Tensor):
        self.num_sequences = cu_seqlens.numel() - 1
        self._offsets = cu_seqlens.to(device=mask.device, dtype=torch.int64)
        tail = mask.numel() - self._offsets[-1:]
        owners = torch.arange(self.num_sequences + 1, device=mask.device).clamp_(max=max(self.num_sequences - 1, 0))
        counts = torch.cat([self._offsets.diff(), tail])
        # Without the size, repeat_interleave would read it back from the device.
        self._sequence = owners.repeat_interleave(counts, output_size=mask.numel())

    def sum(self, values: Tensor) -> Tensor:
        return _SegmentSum.apply(values, self._offsets, self._sequence)

    def max(self, values: Tensor) -> Tensor:
        return torch.segment_reduce(values.detach(), "max", offsets=self._offsets, initial=0.0, unsafe=True)

    def expand(self, per_sequence: Tensor) -> Tensor:
        return _SegmentExpand.apply(per_sequence, self._offsets, self._sequence)

    def rank(self, mask: Tensor) -> Tensor:
        counted = mask.to(torch.int64)
        before = counted.cumsum(dim=0) - counted
        starts = torch.cat([before, before.new_zeros(1)]).index_select(0, self._offsets[:-1])
        return before - starts.index_select(0, self._sequence)

    def future_sum(self, values: Tensor, mask: Tensor, decay: float) -> Tensor:
        decays = torch.ones_like(values).masked_fill_(mask, decay)
        # Nothing comes over the end of a sequence.
        is_last = self._sequence != torch.nn.functional.pad(self._sequence[1:], (0, 1), value=-1)
        return _future_sum(values, decays.masked_fill_(is_last, 0.0))


class _SegmentSum(torch.autograd.Function):
    """tokens [N] → [B]. It replaces index_add, whose order of additions varies on a GPU."""

    @staticmethod
    def forward(ctx, values, offsets, sequence):
        ctx.save_for_backward(sequence)
        return torch.segment_reduce(values, "sum", offsets=offsets, initial=0.0, unsafe=True)

    @staticmethod
    def backward(ctx, grad):
        (sequence,) = ctx.saved_tensors
        return grad.index_select(0, sequence), None, None


class _SegmentExpand(torch.autograd.Function):
    """[B] → tokens [N]; its gradient is the sum over each sequence."""

    @staticmethod
    def forward(ctx, per_sequence, offsets, sequence):
        ctx.save_for_backward(offsets)
        return per_sequence.index_select(0, sequence)

    @staticmethod
    def backward(ctx, grad):
        (offsets,) = ctx.saved_tensors
        summed = torch.segment_reduce(grad.contiguous(), "sum", offsets=offsets, initial=0.0, unsafe=True)
        return summed, None, None


@dataclass(frozen=True)
class Head:
    """Of each token the k tokens that the sampler held for most probable there, its head (`objective.score_centering`).

    Where there are fewer than k, log mu of the rest is -inf.
    """

    current: Tensor  # [tokens, k], log pi, with gradient
    inference: Tensor  # [tokens, k], log mu, of the whole distribution
    has_sampled: Tensor  # bool tokens: whether the sampled token is one of them
    is_whole: bool = False  # mu and pi are distributions over the head (`rollout.kept_sets`)
    old: Tensor | None = None  # [tokens, k], log po; None where po = sg(pi), or where nothing reads it


@dataclass(frozen=True)
class TeacherSet:
    """Of each token a set of k tokens, on which pi is compared with a teacher (`distillation.divergence`)."""

    current: Tensor  # [tokens, k], log pi, with gradient
    teacher: Tensor  # [tokens, k], log τ; -inf where the set has fewer
    forward: float = 0.0  # β: the share of KL(τ || pi)
    normalized: bool = True  # pi and τ are distributions over the set


@dataclass(frozen=True)
class Teacher:
    """Log-probs that a second model gives the sampled tokens, and how they enter advantages (`distillation.taught`)."""

    logprobs: Tensor  # tokens, log τ; -inf where the teacher cannot say the token
    weight: float = 1.0  # λ
    student: Literal["rollout", "recompute", "current"] = "recompute"  # whose log-prob is compared: mu, po or pi
    discount: float = 0.0  # γ
    sets: TeacherSet | None = None  # then the loss has λ times a divergence, and advantages stay


@dataclass(frozen=True)
class Divergence:
    """Of pi and a teacher on the set of each token, 0 where masked."""

    value: Tensor  # tokens, with gradient: D
    weight: float  # λ
    pi_mass: Tensor  # tokens: Σ_S pi
    teacher_mass: Tensor  # tokens: Σ_S τ


@dataclass(frozen=True)
class ObjectiveInputs:
    """Log-probs of the sampled tokens, padded [B, T], or packed [N] with `cu_seqlens`; whole sequences either way.

    Values where `loss_mask` is false (prompts, padding, even NaN) are never read. Log-probs in half precision are
    converted to float32.
    """

    current_logprobs: Tensor  # tokens, log pi; with gradient; else only entropy, head and teacher.sets have one
    old_logprobs: Tensor | None  # tokens, log po; None if each rollout batch has one update, so that po = sg(pi)
    inference_logprobs: Tensor | None  # tokens, log mu; None: no correction and no mismatch metrics
    advantages: Tensor  # [B], or tokens (a packed tensor of N values is per token)
    loss_mask: Tensor  # tokens, bool or 0/1: trained tokens
    cu_seqlens: Tensor | None = None  # [B + 1] int offsets, packed form only
    sequence_ids: Tensor | None = None  # [B] int64, the same in every layout; key of the variance noise
    entropy: Tensor | None = None  # tokens, nats; averaged into actor/entropy, and with its gradient into entropy_bonus
    distances: Tensor | None = None  # tokens, int: optimizer steps since the weights that sampled: metrics, anchor
    head: Head | None = None
    reference_logprobs: Tensor | None = None  # tokens, log ref: of a policy that is not trained
    scoring_logprobs: Tensor | None = None  # tokens, log po in another precision: for metrics alone
    router_shift: Tensor | None = None  # tokens: mean |log score - log old score| of the old experts of all layers
    teacher: Teacher | None = None


class NoiseKey(NamedTuple):
    """Identifies the noise of one optimizer step, the same on every rank and layout."""

    seed: int = 0
    step: int = 0  # optimizer step; each has its own draw


@dataclass(frozen=True)
class Denominators:
    """Counts over the global mini-batch: all microbatches of all data-parallel ranks, computed once.

    They are numbers or 0-dim tensors on the device. To sum local counts, reduce `as_tensor()` over the ranks; rows of
    `moments` are put together.
    """

    num_tokens: Tensor | float  # trained tokens
    num_sequences: Tensor | float  # sequences, including fully masked ones
    renormalized: bool = False  # counted after the corrections, as `renormalize`, `normalize` and `m2po` need it
    weight_sum: Tensor | float = 0.0  # of the weights of the correction that is to `normalize`
    num_weights: Tensor | float = 0.0  # tokens or sequences that have one
    moments: Tensor | None = None  # [k, 2] float64: squares that `m2po` judges by, and how many tokens have each

    @classmethod
    def from_tensor(cls, counts: Sequence[Tensor | float], renormalized: bool) -> Denominators:
        """The reverse of `as_tensor`."""
        num_tokens, num_sequences, weight_sum, num_weights = counts
        return cls(num_tokens, num_sequences, renormalized, weight_sum, num_weights)

    def __add__(self, other: Denominators) -> Denominators:
        if self.renormalized != other.renormalized:
            raise InputError("denominators with and without renormalize cannot be added")
        return Denominators(
            self.num_tokens + other.num_tokens,
            self.num_sequences + other.num_sequences,
            self.renormalized,
            self.weight_sum + other.weight_sum,
            self.num_weights + other.num_weights,
            None if self.moments is None or other.moments is None else torch.cat([self.moments, other.moments]),
        )

    def as_tensor(self, device: torch.device | str | None = None) -> Tensor:
        """Return the counts as [4] float64, for a reduction over ranks."""
        counts = (self.num_tokens, self.num_sequences, self.weight_sum, self.num_weights)
        return torch.stack([torch.as_tensor(count, dtype=torch.float64, device=device) for count in counts])


@dataclass(frozen=True)
class Tokens:
    """Checked inputs: float32 or float64, zero wherever the mask is false."""

    current: Tensor  # tokens, log pi, with gradient
    log_ratio: Tensor  # tokens, log r = log pi - anchor, with gradient
    anchor: Tensor  # tokens, detached: what r is measured from; log po, or as `objective.anchor` says
    old: Tensor  # tokens, log po, detached
    inference: Tensor | None  # tokens, log mu
    advantages: Tensor  # tokens
    mask: Tensor  # bool tokens
    weight: Tensor  # the mask as numbers
    lengths: Tensor  # [B] trained tokens T_i, float
    layout: Layout
    sequence_ids: Tensor | None
    entropy: Tensor | None
    distances: Tensor | None = None  # tokens, int64
    reference: Tensor | None = None  # tokens, log ref
    scoring: Tensor | None = None  # tokens, log po in another precision
    router_weight: Tensor | None = None  # tokens: γ̃ of `objective.router_shift`, contained in log_ratio; 1 where masked
    teacher_gap: Tensor | None = None  # tokens: d = log s - log τ of `distillation.taught`, contained in advantages
    teacher_floored: Tensor | None = None  # bool tokens: the teacher cannot say the token
    divergence: Divergence | None = None  # from the teacher, on sets of tokens

    def sequence_mean(self, values: Tensor) -> Tensor:
        """tokens (zero where masked) → [B]: mean over trained tokens; 0 for a sequence without any."""
        return self.layout.sum(values) / self.lengths.clamp(min=1)


def read_tokens(inputs: ObjectiveInputs, anchor: Anchor = "recompute", router_floor: float | None = None) -> Tokens:
    """Check shapes and return all tensors in one dtype, 0 where masked. Raises InputError that names the tensor.

    ``anchor``: what r is measured from (`objective.anchor`). ``router_floor``: γ_min by which r is multiplied at least
    where the routers have moved (`objective.router_shift`); None: r is left as it is.
    """
    _check_shapes(inputs)
    mask = inputs.loss_mask.bool()
    layout = Padded(mask) if inputs.cu_seqlens is None else Packed(mask, inputs.cu_seqlens)
    dtype = torch.promote_types(inputs.current_logprobs.dtype, torch.float32)
    outside = ~mask
    current = inputs.current_logprobs.to(dtype)
    # A token that the learner holds for impossible has a finite log-prob and no gradient, as mu and po have a floor.
    current = current.clamp(min=MIN_LOGPROB).masked_fill(outside, 0.0)

    def constant(logprobs: Tensor) -> Tensor:
        return logprobs.detach().to(dtype).clamp(min=MIN_LOGPROB).masked_fill_(outside, 0.0)

    old = current.detach() if inputs.old_logprobs is None else constant(inputs.old_logprobs)
    inference, reference, scoring = (
        None if logprobs is None else constant(logprobs)
        for logprobs in (inputs.inference_logprobs, inputs.reference_logprobs, inputs.scoring_logprobs)
    )
    advantages = inputs.advantages.detach().to(dtype)
    if _per_sequence(inputs):
        advantages = layout.expand(advantages)
    weight = mask.to(dtype)
    if anchor == "interpolate":
        measured_from = _interpolated(current.detach(), inference, inputs.distances)
    else:
        measured_from = inference if anchor == "bypass" else old
    log_ratio, router_weight = current - measured_from, None
    if router_floor is not None:
        router_weight = _router_weight(inputs.router_shift.to(dtype).masked_fill(outside, 0.0), router_floor)
        log_ratio = log_ratio + router_weight.log()
    return Tokens(
        current=current,
        log_ratio=log_ratio,
        anchor=measured_from,
        old=old,
        inference=inference,
        advantages=advantages.masked_fill(outside, 0.0),
        mask=mask,
        weight=weight,
        lengths=layout.sum(weight),
        layout=layout,
        sequence_ids=inputs.sequence_ids,
        entropy=None if inputs.entropy is None else inputs.entropy.to(dtype).masked_fill(outside, 0.0),
        distances=inputs.distances,
        reference=reference,
        scoring=scoring,
        router_weight=router_weight,
    )


def _router_weight(shift: Tensor, floor: float) -> Tensor:
    """γ̃ = sg(max(exp(-Δ), γ_min)) [arXiv 2510.23027 Eqs 7-9]; Δ is the shift of the token's routers."""
    return (-shift.detach()).exp().clamp(min=floor)


def _interpolated(current: Tensor, inference: Tensor, distances: Tensor) -> Tensor:
    """log pi_prox = α log mu + (1 - α) log pi, α = 1/d, and 1 for d = 0 [A3PO]: r = w^α, and pi_prox/mu = w^(1 - α)."""
    alpha = 1 / distances.clamp(min=1).to(current.dtype)
    return alpha * inference + (1 - alpha) * current


def _per_sequence(inputs: ObjectiveInputs) -> bool:
    return inputs.advantages.shape != inputs.current_logprobs.shape


def _check_shapes(inputs: ObjectiveInputs) -> None:
    shape = tuple(inputs.current_logprobs.shape)
    packed = inputs.cu_seqlens is not None
    if len(shape) != (1 if packed else 2):
        form = "[N] with cu_seqlens" if packed else "[B, T] without cu_seqlens"
        raise InputError(f"current_logprobs has shape {list(shape)}; expected {form}")
    num_sequences = inputs.cu_seqlens.numel() - 1 if packed else shape[0]
    optional = ("old_logprobs", "inference_logprobs", "entropy", "distances", "router_shift")
    for name in ("loss_mask", *optional, "reference_logprobs", "scoring_logprobs"):
        tensor = getattr(inputs, name)
        if tensor is not None and tuple(tensor.shape) != shape:
            raise InputError(f"{name} has shape {list(tensor.shape)}, current_logprobs {list(shape)}; they must agree")
    if inputs.teacher is not None and tuple(inputs.teacher.logprobs.shape) != shape:
        raise InputError(
            f"teacher has log-probs of shape {list(inputs.teacher.logprobs.shape)}, expected {list(shape)}"
        )
    shapes = [] if inputs.teacher is None or (sets := inputs.teacher.sets) is None else [sets.current, sets.teacher]
    shapes = [list(logprobs.shape) for logprobs in shapes]
    if shapes and (shapes[0] != shapes[1] or tuple(shapes[0][:-1]) != shape):
        raise InputError(f"teacher.sets has log-probs of shapes {shapes}; expected {[*shape, 'k']} each")
    if tuple(inputs.advantages.shape) not in (shape, (num_sequences,)):
        raise InputError(
            f"advantages has shape {list(inputs.advantages.shape)}; expected [{num_sequences}], one per sequence, "
            f"or {list(shape)}, one per token"
        )
    if (head := inputs.head) is not None:
        shapes = [tuple(x.shape) for x in (head.current[..., 0], head.inference[..., 0], head.has_sampled)]
        others = [head.inference] if head.old is None else [head.inference, head.old]
        if shapes != [shape] * 3 or any(other.shape != head.current.shape for other in others):
            raise InputError(
                f"head has log-probs of shapes {[list(x.shape) for x in (head.current, *others)]}; expected "
                f"{[*shape, 'k']} each"
            )
    ids = inputs.sequence_ids
    if ids is not None and (tuple(ids.shape) != (num_sequences,) or ids.dtype != torch.int64):
        raise InputError(f"sequence_ids is {ids.dtype} {list(ids.shape)}; expected torch.int64 [{num_sequences}]")


def check_available(inputs: ObjectiveInputs, config: ObjectiveConfig) -> None:
    """Raise InputError if the objective needs log-probs that are absent."""
    term = label_of(config.policy_term, "name")
    if inputs.inference_logprobs is None:
        users = [
            f"correction mode {label_of(item, 'mode')}"
            for item in config.active_corrections
            if getattr(item, "pi_old", "rollout") == "rollout"
        ]
        users += [f"policy term {term}"] if config.policy_term.carries_w else []
        users += [] if config.anchor == "recompute" else [f"anchor {config.anchor}"]
        users += ["score_centering"] if config.score_centering else []
        ratio = "log_ratio_penalty" if config.log_ratio_penalty else "kl_loss with unbiased"
        users += [ratio] if config.regularizes_ratio and config.anchored_on_rollout else []
        if users:
            raise InputError(
                f"inference_logprobs is None, but {' and '.join(users)} need the rollout engine's log-probs; "
                "pass them, or use correction: [], anchor: recompute and a policy term without w"
            )
    if inputs.distances is None and config.anchor == "interpolate":
        raise InputError("distances is None, but anchor interpolate needs the age of each token; pass it")
    if inputs.router_shift is None and config.router_shift is not None:
        raise InputError(
            "router_shift is None, but objective.router_shift needs how far the routers have moved; pass it"
        )
    if inputs.head is None and config.score_centering:
        raise InputError(
            "head is None, but score_centering needs the sampler's most probable tokens; sample with "
            "rollout.sampled_head, or use score_centering: false"
        )
    if config.centres_on_po and inputs.old_logprobs is not None and inputs.head.old is None:
        raise InputError(
            "head.old is None, but score_centering with policy term ppo_clip needs log po of the head where there are "
            "old_logprobs; pass both, or neither"
        )
    if inputs.reference_logprobs is None and config.kl_loss is not None:
        raise InputError("reference_logprobs is None, but kl_loss needs the reference policy's log-probs; pass them")
    if inputs.entropy is None and config.entropy_bonus:
        raise InputError("entropy is None, but entropy_bonus needs it; pass it with its gradient, or use 0")
