"""Training-inference mismatch of one batch, outside of any objective."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_rl.config.objective import ObjectiveConfig
from megatron_rl.objective.inputs import ObjectiveInputs, read_tokens
from megatron_rl.objective.metrics import collect_mismatch, finalize_mismatch, start

DEFAULT_BANDS = ObjectiveConfig.model_fields["prob_bands"].default


@torch.no_grad()
def mismatch_metrics(
    old_logprobs: Tensor,
    inference_logprobs: Tensor,
    loss_mask: Tensor,
    cu_seqlens: Tensor | None = None,
    bands: Sequence[float] = DEFAULT_BANDS,
) -> dict[str, float]:
    """Return `rollout_corr/*`, `mismatch/*` and `training/rollout_*` (algorithms.md §11), as compute_objective does.

    Takes log po, log mu and the mask, each [B, T], or packed [N] with ``cu_seqlens``. Mismatch is the spread of
    rho = po/mu [OH §2; LD Eqs 7-8 for log_ppl_abs_diff_sum]. Raises InputError for shapes that disagree.
    """
    no_advantage = torch.zeros_like(old_logprobs)
    tokens = read_tokens(
        ObjectiveInputs(old_logprobs, old_logprobs, inference_logprobs, no_advantage, loss_mask, cu_seqlens)
    )
    collector = start(tokens)
    collect_mismatch(collector, tokens, bands)
    return finalize_mismatch(collector.stats())
