"""Compact routes of one sequence for transfer, and their checks.

Shapes: S tokens of a sequence (P + R), L MoE layers, K experts per token. A row whose K ids all equal
`missing_id(dtype)` has no record; the learner's router decides it.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations
from typing import Literal

import numpy as np
import torch

from megatron_rl.model.architecture import Architecture
from megatron_rl.routing.checksum import RouteError, check_checksums, route_seals, sequence_key, token_keys
from megatron_rl.types import Sequence


@dataclass(frozen=True)
class RouteShape:
    """The sizes of a model that its routes must fit."""

    num_experts: int
    topk: int
    layers: tuple[int, ...]  # numbers of the MoE layers in the whole model, from 0

    @classmethod
    def of(cls, architecture: Architecture) -> RouteShape:
        layers = tuple(i for i, is_moe in enumerate(architecture.moe_layers) if is_moe)
        return cls(architecture.num_experts, architecture.experts_per_token, layers)

    @property
    def dtype(self) -> np.dtype:
        """The smallest type that can number the experts and still has a value for "no record"."""
        return np.dtype(np.uint8 if self.num_experts < 256 else np.uint16)

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token's routes take in transfer, with the row's checksum."""
        return len(self.layers) * self.topk * self.dtype.itemsize + 8


def missing_id(dtype: np.dtype) -> int:
    """Return the id that means "no record"; it is larger than any expert's id (see `RouteShape.dtype`)."""
    return int(np.iinfo(dtype).max)


def malformed_rows(routes: np.ndarray, num_experts: int) -> np.ndarray:
    """Return malformed rows, bool […, L]: an id out of range or twice. Rows without a record are not malformed."""
    columns = np.ascontiguousarray(np.moveaxis(routes, -1, 0))  # [K, …, L], so that comparisons read memory in order
    wrong = np.zeros(columns.shape[1:], dtype=bool)
    for first, second in combinations(columns, 2):
        wrong |= first == second
    if columns.size and (columns.max() >= num_experts or columns.min() < 0):
        wrong |= ((columns >= num_experts) | (columns < 0)).any(axis=0)
        wrong &= ~(columns == missing_id(routes.dtype)).all(axis=0)
    return wrong


def malformed_on(routes: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Return `malformed_rows`, computed on the routes' device: [n, L, K] uint8 or int32 → bool [n, L].

    A row without a record has equal ids that are larger than any expert's.
    """
    columns = routes.unbind(-1)
    wrong, alike = torch.zeros_like(columns[0], dtype=torch.bool), torch.ones_like(columns[0], dtype=torch.bool)
    for first, second in combinations(columns, 2):
        wrong |= first == second
    for column in columns:
        wrong |= column >= num_experts
        alike &= (column == columns[0]) & (column >= num_experts)
    return wrong & ~alike


def malformed_error(
    where: str, shape: RouteShape, layer: int, token: int, experts: np.ndarray, how_many: str
) -> RouteError:
    """Return the error for a malformed row. ``layer``: index among MoE layers; ``how_many``: such rows, in words."""
    return RouteError(
        f"{where}, layer {shape.layers[layer]}, token {token}: experts {experts.tolist()}; expected {shape.topk} "
        f"different ones of 0 … {shape.num_experts - 1} (such rows: {how_many}; routing.malformed: fallback leaves "
        "them to the router)"
    )


def checked_routes(
    sequence: Sequence, shape: RouteShape, malformed: Literal["error", "fallback"], checks_rows: bool = True
) -> tuple[np.ndarray, np.ndarray]:
    """Return the sequence's checked routes [S - 1, L, K] of ``shape.dtype`` and their seals [S - 1, L].

    Malformed rows are an error or become rows without record; ``checks_rows`` False does not look for them. Raises
    `RouteError` that names the sequence if routes are absent, have another shape, or do not belong to its tokens.
    """
    routes, where = sequence.routed_experts, f"sequence {sequence.id}"
    if routes is None or sequence.route_checksums is None:
        raise RouteError(f"{where}: it has no routes or no route checksums; was it sampled without recording them?")
    due = (len(sequence.tokens) - 1, len(shape.layers), shape.topk)
    if routes.shape != due:
        raise RouteError(
            f"{where}: routes of shape {routes.shape}, expected {due}: {sequence.prompt_length} prompt tokens + "
            f"{sequence.response_length} response tokens - 1, MoE layers, experts per token"
        )
    wrong = malformed_rows(routes, shape.num_experts) if checks_rows else np.zeros(due[:2], dtype=bool)
    if wrong.any() and malformed == "error":
        token, layer = (int(x) for x in np.argwhere(wrong)[0])
        raise malformed_error(where, shape, layer, token, routes[token, layer], f"{wrong.sum()} in the sequence")
    keys = token_keys(sequence.tokens[:-1], np.arange(due[0]), sequence_key(sequence.id))
    seals = route_seals(keys, routes, range(due[1]))
    check_checksums(sequence.id, seals, sequence.route_checksums)
    if wrong.any():
        routes = np.where(wrong[..., None], missing_id(shape.dtype), routes)
    if routes.dtype != shape.dtype or wrong.any():
        routes = routes.astype(shape.dtype)
        seals = route_seals(keys, routes, range(due[1]))
    return routes, seals
