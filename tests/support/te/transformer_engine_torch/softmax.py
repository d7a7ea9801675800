"""Softmax of attention scores [sequences, heads, queries, keys] under a mask, for 16-bit scores."""

import torch

Tensor = torch.Tensor
MASKED = -10000.0  # a masked score, in place of minus infinity


def scaled_masked_softmax_forward(input: Tensor, mask: Tensor, scale_factor: float) -> Tensor:
    """Softmax over keys of ``scale_factor`` times the scores. ``mask`` [1 or sequences, 1, queries, keys]: true where a
    key is hidden. A query that sees no key gets zeros."""
    scores = (input.float() * scale_factor).masked_fill(mask.bool(), MASKED)
    sees_some = ~mask.bool().all(-1, keepdim=True)
    return (scores.softmax(-1) * sees_some).to(input.dtype)


def scaled_masked_softmax_backward(output_grads: Tensor, softmax_results: Tensor, scale_factor: float) -> Tensor:
    """Gradient of the scores."""
    grad, probabilities = output_grads.float(), softmax_results.float()
    inner = (grad * probabilities).sum(-1, keepdim=True)
    return (scale_factor * probabilities * (grad - inner)).to(output_grads.dtype)
