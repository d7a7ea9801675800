"""A weight update is complete: every tensor of the engine's checkpoint arrives once, in its shape."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from megatron_rl.rollout.generator import RolloutError


def checked(
    weights: Iterable[tuple[str, torch.Tensor]], shapes: dict[str, tuple[int, ...]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Pass ``weights`` on, and raise `RolloutError` unless they are exactly the tensors of ``shapes``.

    vLLM keeps the old weights of a layer that no tensor arrives for and only warns, which would let generation drift
    from the learner unseen. Tied models may send `lm_head.weight` too.
    """
    seen: set[str] = set()
    for name, tensor in weights:
        if name in seen:
            raise RolloutError(f"weight update: {name} was sent twice")
        if name not in shapes and name != "lm_head.weight":
            raise RolloutError(f"weight update: {name} is not in the engine's checkpoint")
        if tuple(tensor.shape) != shapes.get(name, tuple(tensor.shape)):
            raise RolloutError(
                f"weight update: {name} has shape {tuple(tensor.shape)}, the engine expects {shapes[name]}"
            )
        seen.add(name)
        yield name, tensor
    missing = sorted(set(shapes) - seen)
    if missing:
        raise RolloutError(f"weight update: {len(missing)} of {len(shapes)} tensors were not sent, first {missing[:3]}")
