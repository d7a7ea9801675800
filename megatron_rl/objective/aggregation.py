"""Aggregates token terms to one number over the global mini-batch (algorithms.md §4).

Each call returns an additive share: with global denominators, the shares of all microbatches of all data-parallel ranks
sum to the loss of the mini-batch. Shapes: "tokens" is [B, T] padded or [N] packed; ``B`` sequences;
L = max_response_length.

`MetricStats` are metrics as sufficient statistics. Microbatches and ranks add them up before any division.

A microbatch gives three flat float64 tensors with static names: sums, largest and smallest values. They add up exactly
over any split, so that a mean is over the whole mini-batch and never a mean of means. Only `finalize_metrics` waits for
the device, once per optimizer step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rl.config.objective import ObjectiveConfig
from megatron_rl.errors import InputError
from megatron_rl.objective.corrections import Corrected, correct
from megatron_rl.objective.inputs import Denominators, ObjectiveInputs, Tokens, check_available, read_tokens
from megatron_rl.process.user_functions import load_function


def _token_mean(lengths: Tensor, counts: Denominators, config: ObjectiveConfig) -> Tensor | float:
    """Σ_i Σ_t m l / Σ_i Σ_t m [DAPO Eq 8]."""
    return _share(1.0, counts.num_tokens)


def _seq_mean_token_mean(lengths: Tensor, counts: Denominators, config: ObjectiveConfig) -> Tensor | float:
    """(1/B) Σ_i (Σ_t m l / T_i) [GSPO Eq 5; OH Eq 3]; a sequence without a trained token contributes 0."""
    return _share(1.0, counts.num_sequences) / lengths.clamp(min=1)


def _seq_mean_token_sum(lengths: Tensor, counts: Denominators, config: ObjectiveConfig) -> Tensor | float:
    """(1/B) Σ_i Σ_t m l."""
    return _share(1.0, counts.num_sequences)


def _seq_mean_token_sum_norm(lengths: Tensor, counts: Denominators, config: ObjectiveConfig) -> Tensor | float:
    """(1/B) Σ_i Σ_t m l / L: Dr. GRPO with the configured L, not the padded width."""
    return _share(1.0 / config.max_response_length, counts.num_sequences)


def _share(numerator: float, count: Tensor | float) -> Tensor | float:
    """numerator / count; numerator if count is 0, as all terms are masked then and the loss must be 0, not 0/0."""
    return numerator / (count.clamp(min=1) if isinstance(count, Tensor) else max(count, 1))


AGGREGATIONS: dict[str, Callable[[Tensor, Denominators, ObjectiveConfig], Tensor | float]] = {
    "token-mean": _token_mean,
    "seq-mean-token-mean": _seq_mean_token_mean,
    "seq-mean-token-sum": _seq_mean_token_sum,
    "seq-mean-token-sum-norm": _seq_mean_token_sum_norm,
}
"""Functions of (trained tokens of each sequence [B], global counts, config) to a factor: a number or [B].
A user's function, `file.py:function`, is called the same way."""


def token_factors(tokens: Tokens, kept: Tensor, counts: Denominators, config: ObjectiveConfig) -> Tensor | float:
    """Return the factor of each token's term, a number or tokens; `kept`: bool tokens that denominators count."""
    lengths = tokens.lengths if kept is tokens.mask else tokens.layout.sum(kept.to(tokens.weight.dtype))
    aggregate = AGGREGATIONS.get(config.aggregation) or load_function(config.aggregation)
    factor = aggregate(lengths, counts, config)
    return tokens.layout.expand(factor) if isinstance(factor, Tensor) and factor.dim() else factor


def count(tokens: Tokens, corrected: Corrected, renormalized: bool) -> Denominators:
    """Return denominators of these tokens. Fully masked sequences count too, unless renormalized."""
    kept = kept_tokens(tokens, corrected.left_out)
    num_tokens = torch.count_nonzero(kept).double()
    if not renormalized:
        return Denominators(num_tokens, float(tokens.layout.num_sequences))
    alive = (tokens.layout.sum(kept.to(tokens.weight.dtype)) > 0) | (tokens.lengths == 0)
    num_sequences = torch.count_nonzero(alive).double()
    return Denominators(num_tokens, num_sequences, True, corrected.weight_sum, corrected.num_weights, corrected.moments)


@torch.no_grad()
def compute_denominators(inputs: ObjectiveInputs, config: ObjectiveConfig | None = None) -> Denominators:
    """Return the counts of these sequences; sum them over microbatches and ranks before the first gradient.

    Reads `loss_mask` and its layout. If `config` has `renormalize`, `normalize` or m2po, it also applies the
    corrections, which needs `old_logprobs` and `inference_logprobs` (`current_logprobs` may then be any tensor of
    the same shape, such as the old log-probs). Results are tensors on the device, without waiting for it.

    Raises InputError if a needed tensor is absent.
    """
    if config is None or not config.renormalizes:
        num_sequences = len(inputs.loss_mask) if inputs.cu_seqlens is None else inputs.cu_seqlens.numel() - 1
        return Denominators(torch.count_nonzero(inputs.loss_mask).double(), float(num_sequences))
    if inputs.old_logprobs is None:
        raise InputError(
            "old_logprobs is None, but a correction with renormalize or normalize needs them to count what it does, "
            "and so does m2po"
        )
    check_available(inputs, config)
    tokens = read_tokens(inputs)
    return count(tokens, correct(tokens, config), renormalized=True)


def kept_tokens(tokens: Tokens, left_out: Tensor | None) -> Tensor:
    """Return the bool tokens that denominators count; the mask itself if no token is left out."""
    return tokens.mask if left_out is None else tokens.mask & ~left_out


@dataclass(frozen=True)
class MetricStats:
    """Named sums, maxima and minima of metrics.

    Reduce `sums` by addition, `maxs` by maximum and `mins` by minimum over the data-parallel ranks (not over ranks with
    the same tokens), then call `finalize_metrics`.
    """

    sum_names: tuple[str, ...]
    max_names: tuple[str, ...]
    min_names: tuple[str, ...]
    sums: Tensor  # [len(sum_names)] float64
    maxs: Tensor  # [len(max_names)] float64
    mins: Tensor  # [len(min_names)] float64

    @property
    def names(self) -> tuple[tuple[str, ...], ...]:
        return self.sum_names, self.max_names, self.min_names

    def cpu(self) -> MetricStats:
        """Return a copy in host memory; waits for the device."""
        return MetricStats(*self.names, self.sums.cpu(), self.maxs.cpu(), self.mins.cpu())

    @classmethod
    def merge(cls, parts: Sequence[MetricStats]) -> MetricStats:
        """Return the statistics of all parts, as if computed in one call. They must have the same configuration."""
        first = parts[0]
        assert all(part.names == first.names for part in parts), "statistics of different configurations"
        return cls(
            *first.names,
            sums=torch.stack([part.sums for part in parts]).sum(dim=0),
            maxs=torch.stack([part.maxs for part in parts]).amax(dim=0),
            mins=torch.stack([part.mins for part in parts]).amin(dim=0),
        )


class Collector:
    """Builds one MetricStats."""

    def __init__(self):
        self._sums: dict[str, Tensor] = {}
        self._maxs: dict[str, Tensor] = {}
        self._mins: dict[str, Tensor] = {}
        self._scratch: dict[tuple[int, torch.Size], Tensor] = {}

    def add(self, name: str, values: Tensor, scale: float = 1.0) -> None:
        """Add scale · Σ of values in float64. The caller must set masked values to zero (false)."""
        if values.dtype == torch.bool:
            self._sums[name] = torch.count_nonzero(values).double()
        else:
            self._sums[name] = self._float64(values).sum() * scale

    def add_product(self, name: str, left: Tensor, right: Tensor) -> None:
        """Add Σ of left · right, computed in float64."""
        first = self._float64(left).flatten()
        self._sums[name] = torch.dot(first, first if right is left else self._float64(right, slot=1).flatten())

    def add_moments(self, name: str, values: Tensor) -> None:
        """Add Σ of values, and Σ of their squares as `name²`."""
        self.add(name, values)
        self.add_product(f"{name}²", values, values)

    def add_vector(self, name: str, values: Tensor) -> None:
        """Add each of ``values`` [n] as a separate sum, `name[0]` … `name[n-1]`."""
        self._sums |= {f"{name}[{i}]": value for i, value in enumerate(values.double().unbind())}

    def _float64(self, values: Tensor, slot: int = 0) -> Tensor:
        """Return the values in float64, in a buffer that later calls reuse: new pages cost more than the copy."""
        values = values.detach()
        if values.dtype == torch.float64:
            return values
        key = (slot, values.shape)
        if key not in self._scratch:
            self._scratch[key] = torch.empty(values.shape, dtype=torch.float64, device=values.device)
        return self._scratch[key].copy_(values)

    def range_of(self, name: str, values: Tensor, mask: Tensor, smallest: bool = False) -> None:
        """Add the largest (and smallest) value under the mask; ∓inf if the mask is empty."""
        if values.numel() == 0:
            values, mask = values.new_zeros(1), mask.new_zeros(1)
        self._maxs[name] = values.masked_fill(~mask, -torch.inf).amax().double()
        if smallest:
            self._mins[name] = values.masked_fill(~mask, torch.inf).amin().double()

    def stats(self) -> MetricStats:
        sums = torch.stack(list(self._sums.values()))
        maxs, mins = (
            torch.stack(list(tensors.values())) if tensors else sums.new_zeros(0)
            for tensors in (self._maxs, self._mins)
        )
        return MetricStats(tuple(self._sums), tuple(self._maxs), tuple(self._mins), sums, maxs, mins)
