"""The routers of transformers' model, watched, and made to take recorded routes; and which of their choices rounding
may turn."""

import contextlib
from collections.abc import Iterator

import numpy as np
import torch

from megatron_rl.types import Batch
from tests.support.rounding import bound_from_double


@contextlib.contextmanager
def watched_routers(
    model: torch.nn.Module, batch: Batch, seen: list[np.ndarray], replay: bool = False
) -> Iterator[None]:
    """Inside, ``seen`` gets of each MoE layer of a pass over ``batch`` the logits [tokens, E] of the tokens that have a
    successor; with ``replay`` those tokens take the experts that ``batch`` recorded."""
    length = max(s.whole_length for s in batch.sequences)
    counted = torch.stack([torch.arange(length) < s.whole_length - 1 for s in batch.sequences]).view(-1)
    named = [getattr(layer.mlp, "gate", getattr(layer.mlp, "router", None)) for layer in model.model.layers]
    gates = [gate for gate in named if gate is not None]

    def watch(number: int, gate: torch.nn.Module):
        def change(_gate, _arguments, output):
            own, _, chosen = output
            seen.append(own[counted].detach().double().numpy())
            if not replay:
                return None
            chosen = chosen.clone()
            recorded = np.concatenate([s.routed_experts[: s.whole_length - 1, number] for s in batch.sequences])
            chosen[counted] = torch.from_numpy(recorded.astype(np.int64))
            scores = own.softmax(-1).gather(1, chosen)
            is_divided = getattr(gate, "norm_topk_prob", True)
            return own, scores / scores.sum(-1, keepdim=True) if is_divided else scores, chosen

        return gate.register_forward_hook(change)

    handles = [watch(*item) for item in enumerate(gates)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def near_ties(single: np.ndarray, double: np.ndarray, longest_sum: int, topk: int) -> int:
    """Choices of routers that rounding may turn: rows of logits [tokens, E] in float64 whose K-th largest leads the
    next by no more than both may be off."""
    if not len(double):
        return 0
    ordered = np.sort(double, axis=1)
    margin = ordered[:, -topk] - ordered[:, -topk - 1]
    return int((margin <= 2 * bound_from_double(single, double, longest_sum)).sum())
