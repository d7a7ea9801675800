"""What an objective is computed from, and the denominators it divides by.

Shapes: ``B`` sequences, ``T`` padded length, ``N`` packed tokens; "tokens" is [B, T] when padded and [N] when packed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_rl.config.objective import ObjectiveConfig
from megatron_rl.errors import InputError
from megatron_rl.objective.guards import MIN_LOGPROB
from megatron_rl.objective.layout import Layout, Packed, Padded


@dataclass(frozen=True)
class ObjectiveInputs:
    """Log-probs of the sampled tokens, padded [B, T], or packed [N] with `cu_seqlens`; whole sequences either way.

    Values under a false `loss_mask` (prompts, padding, NaN or not) are never read. Log-probs in half precision are
    taken to float32.
    """

    current_logprobs: Tensor  # tokens, log pi; the only tensor that gets a gradient
    old_logprobs: Tensor | None  # tokens, log po; None: exactly one update per rollout batch, so po = sg(pi)
    inference_logprobs: Tensor | None  # tokens, log mu; None: no correction and no mismatch metrics
    advantages: Tensor  # [B], or tokens (a packed tensor of N values is per token)
    loss_mask: Tensor  # tokens, bool or 0/1: trained tokens
    cu_seqlens: Tensor | None = None  # [B + 1] int offsets, packed form only
    sequence_ids: Tensor | None = None  # [B] int64, the same in every layout; key of the variance noise
    entropy: Tensor | None = None  # tokens, nats; only averaged into actor/entropy
    distances: Tensor | None = None  # tokens, int: optimizer steps since the weights that sampled; only for metrics


class NoiseKey(NamedTuple):
    """Names the noise of one optimizer step, on every rank and layout."""

    seed: int = 0
    step: int = 0  # optimizer step; another one, another draw


@dataclass(frozen=True)
class Denominators:
    """Counts over the global mini-batch: all microbatches of all data-parallel ranks, computed once.

    Numbers, or 0-dim tensors on the device. Local counts add up: reduce `as_tensor()` over the ranks.
    """

    num_tokens: Tensor | float  # trained tokens
    num_sequences: Tensor | float  # sequences, the fully masked ones included
    renormalized: bool = False  # counted without the tokens that `renormalize` corrections drop

    def __add__(self, other: Denominators) -> Denominators:
        if self.renormalized != other.renormalized:
            raise InputError("denominators with and without renormalize cannot be added")
        return Denominators(
            self.num_tokens + other.num_tokens, self.num_sequences + other.num_sequences, self.renormalized
        )

    def as_tensor(self, device: torch.device | str | None = None) -> Tensor:
        """[2] float64, for a reduction over ranks."""
        counts = (self.num_tokens, self.num_sequences)
        return torch.stack([torch.as_tensor(count, dtype=torch.float64, device=device) for count in counts])

    @classmethod
    def from_tensor(cls, counts: Tensor, renormalized: bool = False) -> Denominators:
        """The inverse of `as_tensor`; stays on the device."""
        return cls(counts[0], counts[1], renormalized)


@dataclass(frozen=True)
class Tokens:
    """Checked inputs: float32 or float64, zero wherever the mask is false."""

    current: Tensor  # tokens, log pi, with gradient
    log_ratio: Tensor  # tokens, log r = log pi - log po (anchor bypass: - log mu), with gradient
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

    def sequence_mean(self, values: Tensor) -> Tensor:
        """tokens (zero where masked) → [B]: mean over trained tokens; 0 for a sequence without any."""
        return self.layout.sum(values) / self.lengths.clamp(min=1)


def read_tokens(inputs: ObjectiveInputs, bypass: bool = False) -> Tokens:
    """Check shapes and bring every tensor to one dtype, masked places to 0. Raises InputError naming the tensor.

    ``bypass``: r is measured from mu instead of po (`objective.anchor`).
    """
    _check_shapes(inputs)
    mask = inputs.loss_mask.bool()
    layout = Padded(mask) if inputs.cu_seqlens is None else Packed(mask, inputs.cu_seqlens)
    dtype = torch.promote_types(inputs.current_logprobs.dtype, torch.float32)
    outside = ~mask
    current = inputs.current_logprobs.to(dtype).masked_fill(outside, 0.0)

    def constant(logprobs: Tensor) -> Tensor:
        return logprobs.detach().to(dtype).clamp(min=MIN_LOGPROB).masked_fill_(outside, 0.0)

    old = current.detach() if inputs.old_logprobs is None else constant(inputs.old_logprobs)
    inference = None if inputs.inference_logprobs is None else constant(inputs.inference_logprobs)
    advantages = inputs.advantages.detach().to(dtype)
    if _per_sequence(inputs):
        advantages = layout.expand(advantages)
    weight = mask.to(dtype)
    return Tokens(
        current=current,
        log_ratio=current - (inference if bypass else old),
        old=old,
        inference=inference,
        advantages=advantages.masked_fill(outside, 0.0),
        mask=mask,
        weight=weight,
        lengths=layout.sum(weight),
        layout=layout,
        sequence_ids=inputs.sequence_ids,
        entropy=None if inputs.entropy is None else inputs.entropy.detach().to(dtype).masked_fill(outside, 0.0),
        distances=inputs.distances,
    )


def _per_sequence(inputs: ObjectiveInputs) -> bool:
    return inputs.advantages.shape != inputs.current_logprobs.shape


def _check_shapes(inputs: ObjectiveInputs) -> None:
    shape = tuple(inputs.current_logprobs.shape)
    packed = inputs.cu_seqlens is not None
    if len(shape) != (1 if packed else 2):
        form = "[N] with cu_seqlens" if packed else "[B, T] without cu_seqlens"
        raise InputError(f"current_logprobs has shape {list(shape)}; expected {form}")
    num_sequences = inputs.cu_seqlens.numel() - 1 if packed else shape[0]
    for name in ("old_logprobs", "inference_logprobs", "loss_mask", "entropy", "distances"):
        tensor = getattr(inputs, name)
        if tensor is not None and tuple(tensor.shape) != shape:
            raise InputError(f"{name} has shape {list(tensor.shape)}, current_logprobs {list(shape)}; they must agree")
    if tuple(inputs.advantages.shape) not in (shape, (num_sequences,)):
        raise InputError(
            f"advantages has shape {list(inputs.advantages.shape)}; expected [{num_sequences}], one per sequence, "
            f"or {list(shape)}, one per token"
        )
    ids = inputs.sequence_ids
    if ids is not None and (tuple(ids.shape) != (num_sequences,) or ids.dtype != torch.int64):
        raise InputError(f"sequence_ids is {ids.dtype} {list(ids.shape)}; expected torch.int64 [{num_sequences}]")


def check_available(inputs: ObjectiveInputs, config: ObjectiveConfig) -> None:
    """Raise InputError where the objective needs log-probs that are absent."""
    term = config.policy_term.name
    if inputs.inference_logprobs is None:
        users = [f"correction mode {item.mode}" for item in config.active_corrections if item.mode != "opsm"]
        users += [f"policy term {term}"] if config.policy_term.carries_w else []
        users += ["anchor bypass"] if config.anchor == "bypass" else []
        if users:
            raise InputError(
                f"inference_logprobs is None, but {' and '.join(users)} need the rollout engine's log-probs; "
                "pass them, or use correction: [], anchor: recompute and a policy term without w"
            )
