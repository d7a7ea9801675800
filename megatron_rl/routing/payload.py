"""Compact routes of one sequence for transfer, and their checksums and other checks.

Shapes: S tokens of a sequence (P + R), L MoE layers, K experts per token. A row whose K ids all equal
`missing_id(dtype)` has no record; the learner's router decides it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import torch

from megatron_rl.errors import Fault
from megatron_rl.model.architecture import Architecture
from megatron_rl.types import Rollout


class RouteError(Fault):
    """Routes do not belong to their tokens. They are never trained on; the message names sequence, layer and token."""


# Increment and multipliers of splitmix64 (Steele, Lea, Flood 2014): every output bit depends on every input bit.
_STEP, _FIRST, _SECOND = (np.uint64(x) for x in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def _mix(x: np.ndarray) -> np.ndarray:
    x = x + _STEP
    x = (x ^ (x >> np.uint64(30))) * _FIRST
    x = (x ^ (x >> np.uint64(27))) * _SECOND
    return x ^ (x >> np.uint64(31))


def sequence_key(sequence_id: str) -> np.uint64:
    """Return a 64-bit hash of the id, the same in every process."""
    return np.uint64(int.from_bytes(hashlib.blake2b(sequence_id.encode(), digest_size=8).digest(), "little"))


def token_keys(tokens: np.ndarray, positions: np.ndarray, sequence_keys: np.ndarray | np.uint64) -> np.ndarray:
    """Return the keys [n] uint64 of token ids [n], their positions, and the `sequence_key` of each."""
    keys = _mix(np.asarray(tokens).astype(np.uint64) ^ sequence_keys)
    return _mix(keys ^ np.asarray(positions).astype(np.uint64))


def route_seals(keys: np.ndarray, routes: np.ndarray, layers: Seq[int]) -> np.ndarray:
    """Return seals [n, L] uint64 of keys [n], routes [n, L, K] (uint8 or uint16) and the numbers of the L layers.

    Ids are hashed as bytes, eight at a time, so the seal depends on their dtype.
    """
    n, num_layers, _ = routes.shape
    raw = np.ascontiguousarray(routes).view(np.uint8).reshape(n, num_layers, -1)
    padded = np.zeros((n, num_layers, -(-raw.shape[-1] // 8) * 8), dtype=np.uint8)
    padded[..., : raw.shape[-1]] = raw
    words = padded.view("<u8")
    seals = _mix(keys[:, None] ^ _mix(np.asarray(layers, dtype=np.uint64))[None])
    for i in range(words.shape[-1]):
        seals = _mix(seals ^ words[..., i])
    return seals


def route_checksums(sequence_id: str, tokens: np.ndarray, routes: np.ndarray, first_row: int = 0) -> np.ndarray:
    """Return the checksums of ``routes`` [S - 1, L, K] of ``tokens`` [S]: [S - 1 + L] int64, rows first.

    With ``first_row``, ``routes`` [S - 1 - first_row, L, K] and the checksums lack the rows before it. To join parts of
    a sequence, concatenate the checksums of rows and add those of layers (`joined_checksums`).
    """
    positions = np.arange(first_row, first_row + len(routes))
    keys = token_keys(tokens[first_row : first_row + len(routes)], positions, sequence_key(sequence_id))
    seals = route_seals(keys, routes, range(routes.shape[1]))
    return np.concatenate([seals.sum(axis=1), seals.sum(axis=0)]).view(np.int64)


def joined_checksums(parts: Seq[np.ndarray], num_layers: int) -> np.ndarray:
    """Return the `route_checksums` of a sequence from those of its consecutive parts."""
    rows, layers = [part[:-num_layers] for part in parts], [part[-num_layers:].view(np.uint64) for part in parts]
    return np.concatenate([*rows, np.sum(layers, axis=0, dtype=np.uint64).view(np.int64)])


def checksums_from_row(
    checksums: np.ndarray, sequence_id: str, tokens: np.ndarray, routes: np.ndarray, row: int, first_row: int = 0
) -> np.ndarray:
    """Return the `route_checksums` of rows ``row`` and later from ``checksums`` of rows ``first_row`` and later.

    ``tokens``: of the whole sequence. ``routes`` [S - 1 - first_row, L, K]: those of ``checksums``. Checksums of
    layers are sums over rows, so what the rows before ``row`` add to them is taken away. A checksum that was wrong
    stays wrong.
    """
    count, num_layers = row - first_row, routes.shape[1]
    if not count:
        return checksums
    before = route_checksums(sequence_id, tokens, routes[:count], first_row)[-num_layers:]
    layers = (checksums[-num_layers:].view(np.uint64) - before.view(np.uint64)).view(np.int64)
    return np.concatenate([checksums[count:-num_layers], layers])


def check_checksums(sequence_id: str, seals: np.ndarray, checksums: np.ndarray) -> None:
    """Compare the seals [S - 1, L] of a sequence, computed from its tokens, with the checksums that it arrived with.

    Raises `RouteError` that names the sequence, and the first token and layer that differ.
    """
    want = np.asarray(checksums).view(np.uint64)
    if len(want) != sum(seals.shape):
        raise RouteError(f"sequence {sequence_id}: {len(want)} route checksums, expected {sum(seals.shape)}")
    wrong_rows = seals.sum(axis=1) != want[: len(seals)]
    wrong_layers = seals.sum(axis=0) != want[len(seals) :]
    if wrong_rows.any() or wrong_layers.any():
        raise RouteError(
            f"sequence {sequence_id}: routes do not belong to its tokens: the checksum differs first at token "
            f"{_first(wrong_rows)} ({wrong_rows.sum()} of {len(wrong_rows)} tokens) and MoE layer "
            f"{_first(wrong_layers)} ({wrong_layers.sum()} of {len(wrong_layers)} layers)"
        )


def _first(wrong: np.ndarray) -> str:
    return str(int(wrong.argmax())) if wrong.any() else "none"


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


def malformed_rows(routes: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Return malformed rows, [n, L, K] uint8 or int32 → bool [n, L]: an id out of range or twice.

    A row without a record is not malformed: its equal ids are larger than any expert's.
    """
    columns = routes.unbind(-1)
    wrong, alike = torch.zeros_like(columns[0], dtype=torch.bool), torch.ones_like(columns[0], dtype=torch.bool)
    for first, second in combinations(columns, 2):
        wrong |= first == second
    for column in columns:
        wrong |= column >= num_experts
        alike &= (column == columns[0]) & (column >= num_experts)
    return wrong & ~alike


def checked_routes(sequence: Rollout, shape: RouteShape) -> tuple[np.ndarray, np.ndarray]:
    """Return the sequence's checked routes [S - 1, L, K] of ``shape.dtype`` and their seals [S - 1, L].

    Raises `RouteError` that names the sequence if routes are absent, have another shape, or do not belong to its
    tokens. Rows are checked where they are read (`malformed_rows`).
    """
    routes, where = sequence.routed_experts, f"sequence {sequence.id}"
    if routes is None or sequence.route_checksums is None:
        raise RouteError(f"{where}: it has no routes or no route checksums; was it sampled without recording them?")
    due = (sequence.whole_length - 1, len(shape.layers), shape.topk)
    if routes.shape != due:
        raise RouteError(
            f"{where}: routes of shape {routes.shape}, expected {due}: {sequence.prompt_length} prompt tokens + "
            f"{sequence.length} response tokens - 1, MoE layers, experts per token"
        )
    keys = token_keys(sequence.whole[:-1], np.arange(due[0]), sequence_key(sequence.id))
    seals = route_seals(keys, routes, range(due[1]))
    check_checksums(sequence.id, seals, sequence.route_checksums)
    if routes.dtype != shape.dtype:
        routes = routes.astype(shape.dtype)
        seals = route_seals(keys, routes, range(due[1]))
    return routes, seals
