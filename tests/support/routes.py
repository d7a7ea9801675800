"""Routes made without an engine, and batches that carry them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from megatron_rl.routing import route_checksums
from megatron_rl.types import Batch
from tools.dev.make_tiny_checkpoint import build_model, build_tiny_config, save_checkpoint


def random_routes(
    batch: Batch, seed: int = 0, num_layers: int = 4, num_experts: int = 8, topk: int = 2
) -> list[np.ndarray]:
    """Different experts for every token and layer, none of them the router's choice but by chance."""
    random = np.random.default_rng(seed)
    shapes = [(len(s.tokens) - 1, num_layers, num_experts) for s in batch.sequences]
    return [random.random(shape).argsort(axis=-1)[..., :topk].astype(np.uint8) for shape in shapes]


def with_routes(batch: Batch, routes: list[np.ndarray]) -> Batch:
    """Give every sequence of ``batch`` its routes and the checksums of them; returns the batch."""
    for sequence, its in zip(batch.sequences, routes, strict=True):
        sequence.routed_experts = its
        sequence.route_checksums = route_checksums(sequence.id, sequence.tokens, its)
    return batch


def save_random_model(folder: Path, **config: Any) -> Path:
    """An untrained tiny Qwen3-MoE in Hugging Face layout; ``config``: keys of its configuration."""
    save_checkpoint(build_model(build_tiny_config(**config)), folder)
    return folder
