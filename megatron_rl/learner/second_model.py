"""A model that is not trained, on the learner's ranks: the log-probs of the policy's tokens under it.

It has the policy's layout, arithmetic and packed rows, so that equal weights give equal bits. It chooses its own
experts, also where routes of the policy are replayed. On a GPU its weights lie in host memory between its passes. The
policy in another precision (`scoring`) has copies of the newest weights instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
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
from megatron_rl.learner.router_replay import RouterReplayer, RoutingMode
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
    mode: RoutingMode = "native"


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


def load_scoring(
    recipe: Recipe,
    device: torch.device,
    exact: bool,
    phase: PhaseFn,
    policy: torch.nn.Module,
    read: Callable[[torch.nn.Parameter], torch.Tensor],
    weights: Callable[[], AbstractContextManager],
) -> SecondModel:
    """The policy in the precision of `scoring`, with copies of the newest weights inside `here`, and none outside.

    ``read``: a parameter of ``policy`` → its values, with its adapter; ``weights``: the context for it. Routes that the
    pass for log po replays are replayed here, too. Collective.
    """
    architecture = read_architecture(recipe.model.path)
    config = recipe.learner.model_copy(update={"dtype": recipe.scoring.dtype})
    model = build_model(architecture, config, device, recipe.scoring.of(recipe.precision), exact).requires_grad_(False)
    replay = RouterReplayer(model, architecture, recipe.routing, device) if recipe.routing.replay == "r3" else None
    storages = [(storage, storage.nbytes()) for storage in (p.untyped_storage() for p in model.parameters())]
    parameters, buffers = dict(policy.named_parameters()), dict(policy.named_buffers())

    def leave() -> None:
        for storage, _ in storages:
            storage.resize_(0)

    @contextmanager
    def here() -> Iterator[None]:
        for storage, size in storages:
            storage.resize_(size)
        with weights(), torch.no_grad():
            for name, copy in model.named_parameters():
                copy.copy_(read(parameters[name]))
            for name, copy in model.named_buffers():
                copy.copy_(buffers[name])
        try:
            yield
        finally:
            leave()
            if replay is not None:
                replay.start_over()

    leave()
    passes = Passes(model, model, config, device, replay, exact, phase)
    return SecondModel(passes, FusedHead(model) if config.fused_head else None, here, "replay" if replay else "native")


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
