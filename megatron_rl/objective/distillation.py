"""Distillation on policy: a token's advantage falls by how much more probable the student holds it than the teacher, or
the loss has the divergence of both on a set of tokens.

Shapes: "tokens" is [B, T] padded or [N] packed; k tokens in a set.
"""

from __future__ import annotations

from dataclasses import replace

from megatron_rl.errors import InputError
from megatron_rl.objective.inputs import Divergence, Teacher, TeacherSet, Tokens
from megatron_rl.types import MIN_LOGPROB

FLOOR = -9999.0
"""A teacher's log-prob from here down stands for -inf: servers write -9999 for it, because JSON has no infinity."""


def taught(tokens: Tokens, teacher: Teacher) -> Tokens:
    """Return ``tokens`` with A_t = A - λ Σ_{k >= t} γ^(k - t) d_k, d = log s - log τ [OPD]; with sets of the teacher
    with A and their `Divergence`.

    τ is the teacher's probability of the sampled token and s the student's: mu, po or pi. Only trained tokens count, in
    the sum and in k - t. Nothing of A_t has a gradient.
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
    seen = replace(tokens, teacher_gap=gap, teacher_floored=logprobs <= FLOOR)
    if teacher.sets is not None:
        return replace(seen, divergence=divergence(tokens, teacher.sets, teacher.weight))
    later = tokens.layout.future_sum(gap, tokens.mask, teacher.discount) if teacher.discount else gap
    return replace(seen, advantages=(tokens.advantages - teacher.weight * later).masked_fill(outside, 0.0))


def divergence(tokens: Tokens, sets: TeacherSet, weight: float) -> Divergence:
    """D = β Σ_S τ (log τ - log pi) + (1 - β) Σ_S pi (log pi - log τ), with the gradient of pi [GKD].

    Where ``sets.normalized``, pi and τ are first divided by their sums over the set S.
    """
    absent = sets.teacher.isneginf() | ~tokens.mask[..., None]
    log_pi, log_tau = (
        x.to(tokens.current.dtype).clamp(min=MIN_LOGPROB).masked_fill(absent, 2 * MIN_LOGPROB)
        for x in (sets.current, sets.teacher.detach())
    )
    masses = [x.detach().exp().sum(dim=-1) for x in (log_pi, log_tau)]
    if sets.normalized:
        log_pi, log_tau = log_pi.log_softmax(dim=-1), log_tau.log_softmax(dim=-1)
    gap = (log_pi - log_tau).masked_fill(absent, 0.0)
    d = ((1 - sets.forward) * log_pi.exp() * gap - sets.forward * log_tau.exp() * gap).sum(dim=-1)
    return Divergence(d, weight, *masses)
