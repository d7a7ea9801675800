"""Corrections of the training-inference mismatch: weights and masks outside the policy term (algorithms.md §3).

Symbols: rho = po/mu per token; terms anchored on the rollout engine use w = pi/mu instead, and anchor interpolate
pi_prox/mu. No value here has a gradient. Shapes: "tokens" is [B, T] padded or [N] packed; ``B``
sequences.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from megatron_rl.config.objective import FunctionCorrection, M2po, Mask, ObjectiveConfig, Opsm, Reject
from megatron_rl.objective.inputs import MAX_LOG_RATIO, Denominators, Tokens, k3, safe_exp
from megatron_rl.process.user_functions import load_function


class Ratios:
    """Importance ratios for the corrections, each computed at most once."""

    def __init__(self, tokens: Tokens, anchored_on_rollout: bool):
        self.tokens = tokens
        self._learner = tokens.current.detach() if anchored_on_rollout else tokens.anchor

    @cached_property
    def log(self) -> Tensor:
        """tokens: log rho (or log w), 0 where masked."""
        return self._learner - self.tokens.inference

    @cached_property
    def log_sum(self) -> Tensor:
        """[B]: Σ_t log rho."""
        return self.tokens.layout.sum(self.log)

    @cached_property
    def log_mean(self) -> Tensor:
        """[B]: mean_t log rho; minus the sequence mean of k1."""
        return self.log_sum / self.tokens.lengths.clamp(min=1)

    @cached_property
    def token(self) -> Tensor:
        """tokens: rho."""
        return safe_exp(self.log)

    def at(self, level: str) -> Tensor:
        """tokens: rho_t, or P_i = exp(Σ_t log rho), or exp(mean_t log rho), the last two repeated on their tokens."""
        if level == "token":
            return self.token
        return self.tokens.layout.expand(safe_exp(self.log_sum if level == "sequence" else self.log_mean))

    def expand(self, per_sequence: Tensor) -> Tensor:
        return self.tokens.layout.expand(per_sequence)


@dataclass(frozen=True)
class Effect:
    """The effect of one correction: multiply by `weight`, then set to 0 where not `keep`."""

    weight: Tensor | None = None  # tokens
    keep: Tensor | None = None  # bool tokens
    bounds: tuple[float, float] | None = None  # bounds of the weighting modes' ratio, for rollout_is_* metrics
    squares: Tensor | None = None  # tokens: what `m2po` judges by; -1 where it does not look


def importance(config, ratios: Ratios) -> Effect:
    """`is`: rho, untruncated [FP16 Eq 5]."""
    return Effect(weight=ratios.at(config.level), bounds=(0.0, math.inf))


def truncated(config, ratios: Ratios) -> Effect:
    """`tis`: min(rho, C) [LD; FP16]; with a lower bound max(that, lower)."""
    return Effect(
        weight=ratios.at(config.level).clamp(config.lower, config.cap), bounds=(config.lower or 0.0, config.cap)
    )


def masked(config, ratios: Ratios) -> Effect:
    """`mis`: rho · 1[rho <= C], optionally also rho >= lower."""
    return _band(ratios.at(config.level), config.lower or 0.0, config.cap)


def icepop(config, ratios: Ratios) -> Effect:
    """`icepop`: rho_t · 1[lower <= rho_t <= upper]."""
    return _band(ratios.token, config.lower, config.upper)


def _band(ratio: Tensor, lower: float, upper: float) -> Effect:
    return Effect(weight=ratio, keep=(ratio >= lower) & (ratio <= upper), bounds=(lower, upper))


def reject(config: Reject, ratios: Ratios) -> Effect:
    """`reject`: 1[lower <= statistic <= upper] on whole sequences.

    `geometric` and `seq_mean_k1` compare mean_t log rho (minus the mean of k1) with [log lower, log upper]; comparing
    k1 itself would keep [1/upper, 1/lower] instead.
    """
    if config.on_ratio_scale:
        statistic, lower, upper = ratios.log_mean, _log(config.lower, -math.inf), _log(config.upper, math.inf)
    else:
        lower = -math.inf if config.lower is None else config.lower
        upper = math.inf if config.upper is None else config.upper
        divergence, tokens = k3(ratios.log), ratios.tokens
        statistic = tokens.layout.max(divergence) if config.statistic == "max_k3" else tokens.sequence_mean(divergence)
    return Effect(keep=ratios.expand((statistic >= lower) & (statistic <= upper)))


def mask(config: Mask, ratios: Ratios) -> Effect:
    """`mask`: 1[lower <= ratio <= upper], on tokens or on whole sequences; the weight stays 1."""
    ratio = ratios.at(config.level)
    lower = 0.0 if config.lower is None else config.lower
    upper = math.inf if config.upper is None else config.upper
    return Effect(keep=(ratio >= lower) & (ratio <= upper))


def veto(config, ratios: Ratios) -> Effect:
    """`veto`: drop a sequence with any rho_t below the threshold."""
    tokens = ratios.tokens
    catastrophic = (ratios.log < math.log(config.threshold)) & tokens.mask
    return Effect(keep=ratios.expand(tokens.layout.sum(catastrophic.to(tokens.weight.dtype)) == 0))


def opsm(config: Opsm, ratios: Ratios) -> Effect:
    """`opsm`, off-policy sequence masking: drop where A < 0 and mean_t(log pi_old - log pi) > δ [DeepSeek-V3.2 Eq 9].

    pi_old is mu, the probability that the rollout engine returned; with ``pi_old: learner`` it is po.
    """
    tokens = ratios.tokens
    old = tokens.inference if config.pi_old == "rollout" else tokens.old
    drift = tokens.sequence_mean(old - tokens.current.detach())
    return Effect(keep=~(tokens.layout.expand(drift > config.delta) & (tokens.advantages < 0)))


def m2po(config: M2po, ratios: Ratios) -> Effect:
    """`m2po`: drop the largest (log rho)² of updates that move away from mu, until their mean is at most τ
    [arXiv 2510.01161]. Which these are is known when the whole mini-batch is counted: `within_second_moment`."""
    log_rho = ratios.log.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    moves_away = ratios.tokens.advantages.sign() * log_rho > 0
    return Effect(squares=log_rho.square().masked_fill(~moves_away, -1.0))


def _log(bound: float | None, absent: float) -> float:
    return absent if bound is None else math.log(bound)


CORRECTIONS: dict[str, Callable[[object, Ratios], Effect]] = {
    "is": importance,
    "tis": truncated,
    "mis": masked,
    "icepop": icepop,
    "reject": reject,
    "mask": mask,
    "veto": veto,
    "opsm": opsm,
    "m2po": m2po,
}
"""Keys are the `mode` of an entry of ObjectiveConfig.correction, but `function`, which names one of the user's."""


@dataclass(frozen=True)
class Corrected:
    """All corrections of an objective combined; None means ones, or nothing dropped."""

    weight: Tensor | None = None  # tokens: product of all weights and masks
    dropped: Tensor | None = None  # bool tokens, trained tokens that some mask set to 0
    left_out: Tensor | None = None  # bool tokens, dropped ones that also leave the denominators
    ratio: Tensor | None = None  # tokens, the first weighting mode's ratio before it was bounded
    bounds: tuple[float, float] | None = None  # of that ratio
    weight_sum: Tensor | float = 0.0  # 0-dim float64: of the weights that are to be divided by their mean
    num_weights: Tensor | float = 0.0  # 0-dim float64: how many these are
    squares: Tensor | None = None  # tokens: those of `m2po`

    @property
    def moments(self) -> Tensor | None:
        """[n, 2] float64: each square of `m2po`, and 1 where it looks, else 0."""
        if self.squares is None:
            return None
        return torch.stack([self.squares, self.squares >= 0], -1).flatten(0, -2).double()


@torch.no_grad()
def correct(tokens: Tokens, config: ObjectiveConfig) -> Corrected:
    """Apply every entry of `objective.correction`; weights multiply, masks accumulate."""
    entries, result = config.active_corrections, Corrected()
    ratios = Ratios(tokens, config.anchored_on_rollout)
    for entry in entries:
        is_own = isinstance(entry, FunctionCorrection)
        effect = _of_user(entry, ratios) if is_own else CORRECTIONS[entry.mode](entry, ratios)
        result = _combine(result, entry, effect, tokens)
        if getattr(entry, "normalize", False):
            weight_sum, num_weights = _total(entry.level, effect.weight, tokens)
            result = replace(result, weight_sum=weight_sum, num_weights=num_weights)
        if effect.bounds is not None and result.bounds is None:
            result = replace(result, ratio=ratios.at(getattr(entry, "level", "token")), bounds=effect.bounds)
    return result


def _total(level: str, weight: Tensor, tokens: Tokens) -> tuple[Tensor, Tensor]:
    """Sum and number of a correction's weights: of trained tokens, or of sequences that have any."""
    weight = weight * tokens.weight
    if level == "token":
        return weight.double().sum(), tokens.lengths.double().sum()
    # All tokens of a sequence have the same weight.
    return tokens.sequence_mean(weight).double().sum(), torch.count_nonzero(tokens.lengths).double()


@torch.no_grad()
def normalized(corrected: Corrected, config: ObjectiveConfig, counts: Denominators) -> Corrected:
    """Divide by the mean weight of the global mini-batch where a correction has `normalize` [verl's
    rollout_is_batch_normalize]; a mini-batch without trained tokens has none."""
    if not config.normalizes:
        return corrected
    mean = torch.as_tensor(counts.weight_sum / _at_least_one(counts.num_weights))
    return replace(corrected, weight=corrected.weight / torch.where(mean > 0, mean, 1.0).to(corrected.weight.dtype))


def condensed(moments: Tensor, threshold: float) -> Tensor:
    """The same `Corrected.moments` in fewer rows: squares up to ``threshold``, which always stay, become one."""
    square, number = moments.unbind(1)
    small = square <= threshold
    seen = number * small
    row = torch.stack([(square * seen).sum() / _at_least_one(seen.sum()), seen.sum()])
    return torch.cat([row[None], moments[~small]])


def smallest_dropped(moments: Tensor, threshold: float) -> Tensor:
    """0-dim: the square from which on `m2po` drops, the first whose mean with all below it is above ``threshold``."""
    square, number = moments[moments[:, 0].argsort()].unbind(1)
    mean = (square * number).cumsum(0) / _at_least_one(number.cumsum(0))
    return torch.where(mean > threshold, square, math.inf).amin() if len(moments) else moments.new_tensor(math.inf)


@torch.no_grad()
def within_second_moment(corrected: Corrected, config: ObjectiveConfig, counts: Denominators) -> Corrected:
    """Drop what `m2po` drops in the global mini-batch."""
    if corrected.squares is None:
        return corrected
    dropped = corrected.squares >= smallest_dropped(counts.moments, config.m2po_threshold)
    kept = (~dropped).to(corrected.squares.dtype)
    weight = kept if corrected.weight is None else corrected.weight * kept
    return replace(corrected, weight=weight, dropped=_either(corrected.dropped, dropped))


def _at_least_one(number: Tensor | float) -> Tensor | float:
    return number.clamp(min=1) if isinstance(number, Tensor) else max(number, 1)


def _of_user(entry: FunctionCorrection, ratios: Ratios) -> Effect:
    """What a user's function returns: an `Effect`, a weight (floating point) or what to keep (bool), each tokens."""
    result = load_function(entry.function)(ratios, **entry.parameters)
    if isinstance(result, Effect):
        return result
    return Effect(keep=result) if result.dtype == torch.bool else Effect(weight=result)


def _combine(result: Corrected, entry, effect: Effect, tokens: Tokens) -> Corrected:
    weight = effect.weight
    if effect.squares is not None:
        return replace(result, squares=effect.squares)
    if effect.keep is not None:
        weight = effect.keep.to(tokens.weight.dtype) if weight is None else weight * effect.keep
        dropped = ~effect.keep & tokens.mask
        result = replace(
            result,
            dropped=_either(result.dropped, dropped),
            left_out=_either(result.left_out, dropped) if entry.renormalize else result.left_out,
        )
    return replace(result, weight=weight if result.weight is None else result.weight * weight)


def _either(first: Tensor | None, second: Tensor) -> Tensor:
    return second if first is None else first | second
