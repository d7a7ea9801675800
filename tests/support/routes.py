"""Routes made without an engine, and batches that carry them."""

from pathlib import Path
from typing import Any

import numpy as np

from megatron_rl.routing import RouteShape, pack_routes, packed_keys, route_checksums
from megatron_rl.routing.layout import PADDING_ID
from megatron_rl.types import Batch
from tests.support.tiny import stored_rollouts
from tools.dev.make_tiny_checkpoint import build_model, build_tiny_config, save_checkpoint

SHAPE = RouteShape(num_experts=8, topk=2, layers=(0, 1, 2, 3))


def random_routes(
    batch: Batch, seed: int = 0, num_layers: int = 4, num_experts: int = 8, topk: int = 2
) -> list[np.ndarray]:
    """Different experts for every token and layer, none of them the router's choice but by chance."""
    random = np.random.default_rng(seed)
    shapes = [(s.whole_length - 1, num_layers, num_experts) for s in batch.sequences]
    return [random.random(shape).argsort(axis=-1)[..., :topk].astype(np.uint8) for shape in shapes]


def with_routes(batch: Batch, routes: list[np.ndarray]) -> Batch:
    """Give every sequence of ``batch`` its routes and the checksums of them; returns the batch."""
    for sequence, its in zip(batch.sequences, routes, strict=True):
        sequence.routed_experts = its
        sequence.route_checksums = route_checksums(sequence.id, sequence.whole, its)
    return batch


def save_random_model(folder: Path, **config: Any) -> Path:
    """An untrained tiny Qwen3-MoE in Hugging Face layout; ``config``: keys of its configuration."""
    save_checkpoint(build_model(build_tiny_config(**config)), folder)
    return folder


def batch_with_routes(num_sequences: int = 6) -> Batch:
    """A stored batch with routes at random."""
    batch = stored_rollouts(0, num_sequences)
    return with_routes(batch, random_routes(batch))


def slices(batch, num_padding: int, tensor: int, stages: list[list[int]]):
    """Every rank's slice of one packed row, with the keys of the tokens that it holds."""
    packed = pack_routes(batch.sequences, num_padding, SHAPE)
    tokens = np.concatenate([*(s.whole for s in batch.sequences), np.zeros(num_padding, np.int64)])
    lengths = [s.whole_length for s in batch.sequences] + [num_padding]
    positions = np.concatenate([np.arange(n) for n in lengths])
    keys = packed_keys(tokens, positions, [s.id for s in batch.sequences] + [PADDING_ID], lengths)
    share = len(tokens) // tensor
    for rank in range(tensor):
        rows = slice(rank * share, (rank + 1) * share)
        for layers in stages:
            yield packed.take([(rows.start, rows.stop)], layers), keys[rows], layers
