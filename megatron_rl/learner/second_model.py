"""A model that is not trained, on the learner's ranks: the log-probs of the policy's tokens under it.

It has the policy's layout, arithmetic and packed rows, so that equal weights give equal bits. It chooses its own
experts, also where routes of the policy are replayed. On a GPU its weights lie in host memory between its passes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch

from megatron_rl.checkpoint.shards import WeightMap
from megatron_rl.config import Recipe
from megatron_rl.config.policy_terms import KlInReward
from megatron_rl.errors import InputError
from megatron_rl.learner.logprobs import FusedHead
from megatron_rl.learner.model import build_model
from megatron_rl.learner.offload import Visitor
from megatron_rl.learner.passes import Passes, PhaseFn
from megatron_rl.model.architecture import read_architecture
from megatron_rl.objective.reference_kl import estimate
from megatron_rl.process.ranks import gather_rows, world_rank
from megatron_rl.rollout.weights import rounded_weights
from megatron_rl.types import MIN_LOGPROB, Batch, Rollout


@dataclass(frozen=True)
class SecondModel:
    """What makes passes of it. ``here``: a context in which the passes compute with its weights."""

    passes: Passes
    head: FusedHead | None  # then its passes return hidden states
    here: Callable[[], AbstractContextManager]


def load_second_model(path: Path, recipe: Recipe, device: torch.device, exact: bool, phase: PhaseFn) -> SecondModel:
    """The model of the folder ``path``. Collective."""
    architecture, config = read_architecture(path), recipe.learner
    model = build_model(architecture, config, device, recipe.precision, exact).requires_grad_(False)
    WeightMap(model, architecture).load(path)
    weights = nullcontext
    if config.quantization is not None:
        weights = partial(rounded_weights, model, recipe.rollout.quantization, architecture)
    head = FusedHead(model) if config.fused_head else None
    passes = Passes(model, model, config, device, None, exact, phase, weights)
    return SecondModel(passes, head, Visitor(model.parameters(), device).here)


def refuse_nan(name: str, logprobs: Mapping[int, np.ndarray], dtype: str) -> None:
    """Raise `InputError` where a log-prob is no number: losses and rewards would be none, and weights after them."""
    if any(np.isnan(array).any() for array in logprobs.values()):
        section = name.removesuffix("_logprobs")
        raise InputError(
            f"{section}: a log-prob under it is NaN, with learner.dtype: {dtype}; use a model that computes in this "
            "type, or bf16"
        )


def take_off_rewards(batch: Batch, config: KlInReward) -> float:
    """Give each sequence its `kl_penalty` β Σ_t k, of the tokens that the policy sampled; mean Σ_t k. Collective."""
    own = [[_divergence(s, config.type)] for s in batch.sequences if s.holder == world_rank()]
    sums = gather_rows(own, [s.holder for s in batch.sequences], 1)[:, 0]
    for sequence, k in zip(batch.sequences, sums.tolist(), strict=True):
        sequence.kl_penalty = config.coef * k
    return float(sums.mean())


def _divergence(sequence: Rollout, kind: str) -> float:
    old, reference = (np.maximum(x, MIN_LOGPROB) for x in (sequence.old_logprobs, sequence.reference_logprobs))
    k = estimate(torch.from_numpy(old - reference), kind).double().numpy()
    return float(np.sum(k, where=True if sequence.sampled is None else sequence.sampled))
