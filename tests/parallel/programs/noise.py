"""What the ranks of test_learner_noise.py run."""

from functools import partial
from itertools import chain
from typing import Any

import torch

from megatron_rl.learner.learner import Learner
from megatron_rl.learner.packing import build_microbatch, deal, minibatch_denominators
from tests.support.tiny import stored_rollouts, tiny_recipe


def updates(
    num_steps: int, num_sequences: int = 24, minibatches: int = 1, schedule: dict | None = None, **learner: Any
) -> list[dict[str, float]]:
    """Metrics of the first updates, each with what the weights really did: `test/{update_rms,relative_update}`."""
    trained = Learner(tiny_recipe(learner=learner, batch={"minibatches": minibatches}, schedule=schedule or {}))
    results, before = [], _weights(trained)
    for step in range(num_steps):
        metrics = trained.update(stored_rollouts(step, num_sequences, minibatches))
        after = _weights(trained)
        change = after - before
        metrics["test/update_rms"] = float(change.square().mean().sqrt())
        metrics["test/relative_update"] = float(change.norm() / after.norm())
        results.append(metrics)
        before = after
    return results


def _weights(learner: Learner) -> torch.Tensor:
    return torch.cat([tensor.flatten().double() for _, tensor in learner.export_weights()])


def part_norms(num_ranks: int, max_tokens: int, first_only: bool, num_sequences: int = 24) -> dict[str, list[float]]:
    """On one rank, part by part: squared norms of the dense weights' gradients, and sequences, of the parts that
    ``num_ranks`` data-parallel ranks have (``first_only``: in their first microbatches), and of the whole."""
    learner = Learner(tiny_recipe(monitor={"gradient_noise": False}))
    batch = stored_rollouts(0, num_sequences)
    plan = deal([s.whole_length for s in batch.sequences], num_ranks, max_tokens)
    parts = [rank[0] if first_only else list(chain(*rank)) for rank in plan]
    everything = list(range(num_sequences))
    squares = [_dense_gradient(learner, batch, part).square().sum().item() for part in [*parts, everything]]
    return {"squares": squares, "sizes": [float(len(part)) for part in [*parts, everything]]}


def _dense_gradient(learner: Learner, batch: Any, indices: list[int]) -> torch.Tensor:
    learner.model.zero_grad_buffer()
    denominators = minibatch_denominators(batch.sequences, learner.recipe.objective)
    microbatch = build_microbatch(batch, indices, multiple_of=1, pad_token=0, device=learner.device)
    learner.passes.run([microbatch], partial(learner._loss, denominators=denominators), None)
    dense = [p.main_grad for name, p in learner.model.named_parameters() if ".experts." not in name]
    return torch.cat([grad.flatten().double() for grad in dense])
