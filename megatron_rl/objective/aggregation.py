"""Aggregates token terms to one number over the global mini-batch (algorithms.md §4).

Each call returns an additive share: with global denominators, the shares of all microbatches of all data-parallel ranks
sum to the loss of the mini-batch. Shapes: "tokens" is [B, T] padded or [N] packed; ``B`` sequences;
L = max_response_length.
"""

from __future__ import annotations

from collections.abc import Callable

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
    return Denominators(num_tokens, num_sequences, True, corrected.weight_sum, corrected.num_weights)


@torch.no_grad()
def compute_denominators(inputs: ObjectiveInputs, config: ObjectiveConfig | None = None) -> Denominators:
    """Return the counts of these sequences; sum them over microbatches and ranks before the first gradient.

    Reads `loss_mask` and its layout. If `config` has a correction with `renormalize` or `normalize`, it also applies
    the corrections, which needs `old_logprobs` and `inference_logprobs` (`current_logprobs` may then be any tensor of
    the same shape, such as the old log-probs). Results are 0-dim tensors on the device, without waiting for it.

    Raises InputError if a needed tensor is absent.
    """
    if config is None or not config.renormalizes:
        num_sequences = len(inputs.loss_mask) if inputs.cu_seqlens is None else inputs.cu_seqlens.numel() - 1
        return Denominators(torch.count_nonzero(inputs.loss_mask).double(), float(num_sequences))
    if inputs.old_logprobs is None:
        raise InputError(
            "old_logprobs is None, but a correction with renormalize or normalize needs them to count what it does"
        )
    check_available(inputs, config)
    tokens = read_tokens(inputs)
    return count(tokens, correct(tokens, config), renormalized=True)


def kept_tokens(tokens: Tokens, left_out: Tensor | None) -> Tensor:
    """Return the bool tokens that denominators count; the mask itself if no token is left out."""
    return tokens.mask if left_out is None else tokens.mask & ~left_out
