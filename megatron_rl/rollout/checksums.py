"""Checksums of an engine's stored parameters, which prove that weight updates do not corrupt them."""

from __future__ import annotations

import zlib

import torch

from megatron_rl.rollout.generator import RolloutError


def parameter_checksums(model: torch.nn.Module) -> dict[str, int]:
    """Name → CRC-32 of the stored bytes of every parameter and buffer, so that a permutation is noticed, too."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return {
        name: zlib.crc32(tensor.detach().contiguous().view(-1).view(torch.uint8).cpu().numpy())
        for name, tensor in tensors
        if tensor.numel()
    }


def check_own_refit(before: dict[str, int], after: dict[str, int]) -> None:
    """Raise `RolloutError` unless a weight update with the engine's own checkpoint left every checksum as it was."""
    changed = sorted(name for name in before if before[name] != after.get(name))
    if changed or before.keys() != after.keys():
        import vllm

        raise RolloutError(
            f"vLLM {vllm.__version__} corrupts weights on updates: sending it its own checkpoint changed "
            f"{len(changed)} of {len(before)} parameters, first {changed[:3]}. Every response after the first "
            "update would come from another policy. Use the pinned version, or set rollout.verify_refit: false if "
            "this build stores parameters in an order that is not reproducible"
        )
