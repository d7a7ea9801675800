"""What a model is, as one list: for all that copies, restores, compares or hashes it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def model_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Name → every tensor that decides what ``model`` computes or how it goes on: parameters and buffers, such as the
    biases of routers and the counts that move them."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}
