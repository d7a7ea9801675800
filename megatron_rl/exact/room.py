"""What a device has room for: pages of keys and values, rows of a step, steps between two looks at the results."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from megatron.core.models.gpt import GPTModel

from megatron_rl.errors import InputError
from megatron_rl.exact.schedule import num_pages
from megatron_rl.learner.layers.exact_attention import PagedCache
from megatron_rl.learner.layers.invariant import KEY_BLOCK, TILE
from megatron_rl.process.ranks import gather_objects
from megatron_rl.rollout.engine_arguments import CPU_KV_CACHE_GIB, GIB

LEAST_BESIDE = 2
"""Pages beside those of the longest sequence: the scratch page, and the copy of a prompt's last page."""

CUDA_ROWS = 64  # with fewer, kernels of other shapes sum in another order
CUDA_STEPS = 16


def rows_and_steps(device: torch.device) -> tuple[int, int]:
    """What the number of rows is a multiple of, and steps between two looks at what was sampled, which wait for a GPU
    and cost nothing on a CPU. Neither changes a response."""
    return (CUDA_ROWS, CUDA_STEPS) if device.type == "cuda" else (TILE, 1)


@dataclass(frozen=True)
class CacheShape:
    """Of this rank's part of the model. ``element``: bytes of a number."""

    num_layers: int
    kv_heads: int
    width: int
    element: int

    @classmethod
    def of(cls, module: GPTModel) -> CacheShape:
        part = module.decoder.layers[0].self_attention
        heads, width = part.num_query_groups_per_partition, part.hidden_size_per_attention_head
        return cls(len(module.decoder.layers), heads, width, next(module.parameters()).element_size())

    @property
    def page_bytes(self) -> int:
        return PagedCache.page_bytes(self.num_layers, self.kv_heads, self.width, self.element)


def make_cache(
    module: GPTModel, wanted: int, longest: int, device: torch.device, cache_gib: float | None, utilization: float
) -> PagedCache:
    """A cache for this rank's part of ``module``; see `num_cache_pages`."""
    shape = CacheShape.of(module)
    pages = num_cache_pages(shape, wanted, longest, device, cache_gib, utilization)
    first_layer = module.decoder.layers[0].layer_number - 1
    like = next(module.parameters())
    return PagedCache(pages, shape.num_layers, shape.kv_heads, shape.width, like, first_layer)


def num_cache_pages(
    shape: CacheShape, wanted: int, longest: int, device: torch.device, cache_gib: float | None, utilization: float
) -> int:
    """At most ``wanted`` pages, and what fits; the same on all ranks.

    ``longest``: tokens of the longest sequence that may come. ``cache_gib``: `rollout.kv_cache_gib`. ``utilization``:
    `rollout.gpu_memory_utilization`, where that is null on a GPU.

    Raises:
        InputError: the longest sequence does not fit; on all ranks.
    """
    budget = (cache_gib or CPU_KV_CACHE_GIB) * GIB
    if cache_gib is None and device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        budget = utilization * total - (total - free) + kept
    pages = min(gather_objects(min(wanted, int(budget // shape.page_bytes))))
    least = num_pages(longest) + LEAST_BESIDE
    if pages < least:
        gib = math.ceil(1000 * least * shape.page_bytes / GIB) / 1000
        raise InputError(
            f"rollout.kv_cache_gib: {'null' if cache_gib is None else f'{cache_gib:g}'}, room for {max(pages, 0)} "
            f"pages of {KEY_BLOCK} tokens; the longest prompt with its response has {longest} tokens, which takes "
            f"{least}. Set rollout.kv_cache_gib to {gib:g} or more"
            + (", raise rollout.gpu_memory_utilization" if device.type == "cuda" and cache_gib is None else "")
            + ", or lower rollout.max_response_length"
        )
    return pages
