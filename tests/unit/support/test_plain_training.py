"""What limits of whole updates rest on: a reference all in float64, and rollouts whose routes no rounding turns."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_rl.model.architecture import KNOWN_MODELS
from tests.support.plain_routers import near_ties, watched_routers
from tests.support.plain_training import load, logits, logprobs
from tests.support.rounding import bound_from_double, unit_roundoff
from tests.support.tiny import MODEL, stored_rollouts
from tools.dev.make_tiny_checkpoint import build_model, build_tiny_config, save_checkpoint

STEPS = (0, 1, 2, 3, 4, 100)  # what the tests of the learner update on and score
LONGEST_SUM = 128  # of a forward pass: the width of an expert
TOPK = 2


@pytest.fixture(scope="module")
def models() -> list[torch.nn.Module]:
    return [load(MODEL, dtype) for dtype in (torch.float32, torch.float64)]


@torch.no_grad()
def routers(model: torch.nn.Module, step: int) -> list[np.ndarray]:
    """Every router's logits on a batch, [tokens, experts] float64, places of padding left out."""
    of_routers: list[np.ndarray] = []
    with watched_routers(model, stored_rollouts(step), of_routers):
        logits(model, stored_rollouts(step))
    return of_routers


@pytest.mark.parametrize("step", STEPS)
def test_rounding_turns_no_choice_of_a_router_and_few_are_near_a_tie(models, step):
    """How many are near a tie is the processor's: its rounding sets the bound. None of them was turned either: learners
    are compared with float64 on these batches."""
    single, double = (routers(model, step) for model in models)
    assert len(double) == 4
    for one, other in zip(single, double, strict=True):
        chosen = [np.sort(scores.argsort(axis=1)[:, -TOPK:], axis=1) for scores in (one, other)]
        turned = int((chosen[0] != chosen[1]).any(axis=1).sum())
        assert turned == 0
        assert near_ties(one, other, LONGEST_SUM, TOPK) < 0.01 * len(other)


def test_a_tie_is_seen(models):
    single, double = (routers(model, 0)[0] for model in models)
    order = double[5].argsort()
    for scores in (single, double):
        scores[5, order[-TOPK - 1]] = scores[5, order[-TOPK]]
    assert near_ties(single, double, LONGEST_SUM, TOPK) == 1


@torch.no_grad()
def test_replay_takes_the_recorded_experts(models):
    """Recorded as the model chose: its log-probs. One sequence's experts exchanged: other log-probs of this one."""
    batch, seen, by_model = stored_rollouts(0), [], {}
    for model in models:
        with watched_routers(model, batch, seen := []):
            by_model[model] = logprobs(model, batch).double()
    single, double = by_model.values()
    limit = bound_from_double(single.numpy(), double.numpy(), LONGEST_SUM)
    limit *= unit_roundoff(torch.float64) / unit_roundoff(torch.float32)
    ends = np.cumsum([s.whole_length - 1 for s in batch.sequences])[:-1]
    chosen = np.stack([np.argsort(scores, axis=1)[:, -TOPK:] for scores in seen], axis=1)
    for s, routes in zip(batch.sequences, np.split(chosen, ends), strict=True):
        s.routed_experts = routes.astype(np.int16)
    with watched_routers(models[1], batch, [], replay=True):
        assert float((logprobs(models[1], batch) - double).abs().max()) <= limit
    batch.sequences[0].routed_experts = (batch.sequences[0].routed_experts + 4) % 8
    with watched_routers(models[1], batch, [], replay=True):
        apart = (logprobs(models[1], batch) - double).abs()
    first = batch.sequences[0].length
    assert float(apart[:first].min()) > limit
    assert float(apart[first:].max()) <= limit


class Types(TorchDispatchMode):
    """Notes the types of the numbers that operations return."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[torch.dtype] = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        computed = function(*args, **(kwargs or {}))
        for x in computed if isinstance(computed, tuple | list) else [computed]:
            if isinstance(x, torch.Tensor) and x.is_floating_point():
                self.seen.add(x.dtype)
        return computed


@pytest.mark.parametrize("path", [MODEL, "llama"], ids=str)
def test_a_model_in_float64_is_so_in_every_step(path, tmp_path):
    """Forward and backward; transformers alone has norms, softmax, routers and rotary angles in float32."""
    if path == "llama":
        path = tmp_path
        scaling = KNOWN_MODELS["OctoThinker-3B-Hybrid-Base"]["rope_scaling"]
        config = build_tiny_config("llama", "nano", rope_parameters={**scaling, "rope_theta": 5e5})
        save_checkpoint(build_model(config), path)
    model = load(path, torch.float64)
    with Types() as types:
        logprobs(model, stored_rollouts(0)).sum().backward()
    assert types.seen == {torch.float64}
    angles = [module.inv_freq for module in model.modules() if hasattr(module, "inv_freq")]
    assert angles
    assert all((x != x.float().double()).any() for x in angles), "angles made in float32"
