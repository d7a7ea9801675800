"""Distillation on policy: a token's advantage falls by how much more probable the student holds it than the teacher.

Shapes: "tokens" is [B, T] padded or [N] packed.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from megatron_rl.errors import InputError
from megatron_rl.objective.inputs import Teacher, Tokens
from megatron_rl.types import MIN_LOGPROB

FLOOR = -9999.0
"""A teacher's log-prob from here down stands for -inf: servers write -9999 for it, because JSON has no infinity."""


@torch.no_grad()
def taught(tokens: Tokens, teacher: Teacher) -> Tokens:
    """Return ``tokens`` with A_t = A - λ Σ_{k >= t} γ^(k - t) d_k, d = log s - log τ [OPD].

    τ is the teacher's probability of the sampled token and s the student's: mu, po or pi. Only trained tokens count, in
    the sum and in k - t. Nothing of it has a gradient.
    """
    of_student = {"rollout": tokens.inference, "recompute": tokens.old, "current": tokens.current.detach()}
    student = of_student[teacher.student]
    if student is None:
        raise InputError(
            "inference_logprobs is None, but the teacher's student: rollout needs the rollout engine's log-probs; pass "
            "them, or use recompute or current"
        )
    outside = ~tokens.mask
    logprobs = teacher.logprobs.detach().to(student.dtype).masked_fill(outside, 0.0)
    gap = student - logprobs.clamp(min=MIN_LOGPROB)
    later = tokens.layout.future_sum(gap, tokens.mask, teacher.discount) if teacher.discount else gap
    advantages = (tokens.advantages - teacher.weight * later).masked_fill(outside, 0.0)
    return replace(tokens, advantages=advantages, teacher_gap=gap, teacher_floored=logprobs <= FLOOR)
