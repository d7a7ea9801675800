"""Norm and scaling of lists of tensors."""

import torch

Tensor = torch.Tensor


def multi_tensor_l2norm(
    chunk_size: int, noop_flag: Tensor, tensor_lists: list[list[Tensor]], per_tensor: bool = False
) -> tuple[Tensor, Tensor]:
    """([1] norm of all tensors together, [n] norms of each with ``per_tensor``, else empty), fp32."""
    norms = torch.stack([tensor.float().norm() for tensor in tensor_lists[0]])
    return norms.norm().reshape(1), norms if per_tensor else norms.new_empty(0)


def multi_tensor_scale(
    chunk_size: int, noop_flag: Tensor, tensor_lists: list[list[Tensor]], scale: float | Tensor
) -> None:
    """Second list = ``scale`` times the first, rounded to the second's dtype. Sets the flag where one is not finite."""
    for source, target in zip(*tensor_lists, strict=True):
        scaled = source.float() * scale
        target.copy_(scaled)
        if not scaled.isfinite().all():
            noop_flag.fill_(1)


def multi_tensor_scale_tensor(
    chunk_size: int, noop_flag: Tensor, tensor_lists: list[list[Tensor]], scale: Tensor
) -> None:
    """`multi_tensor_scale` with ``scale`` [1] read on the device: megatron-core 0.19 waits for no norm."""
    multi_tensor_scale(chunk_size, noop_flag, tensor_lists, scale.float())
