"""Checksums that tie a route to its token, its layer and its experts.

A route is meaningless beside another token, and nothing in its numbers shows it: shifted by one token or with two
layers exchanged, shapes fit and training goes on. So a route travels with a hash of what it belongs to.

``key`` of a token = hash(token id, position in its sequence, sequence id). ``seal`` of a route = hash(key, layer
number, expert ids). A sequence carries the sums of its seals over layers (one number per row) and over rows (one per
layer), made where the engine hands the routes over: together they say which token and which layer are wrong.

Shapes: S tokens of a sequence, n rows, L MoE layers, K experts per token. Sums wrap around at 2^64.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from megatron_rl.routing.errors import RouteError

# Increment and multipliers of splitmix64 (Steele, Lea, Flood 2014): every output bit depends on every input bit.
_STEP, _FIRST, _SECOND = (np.uint64(x) for x in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def _mix(x: np.ndarray) -> np.ndarray:
    x = x + _STEP
    x = (x ^ (x >> np.uint64(30))) * _FIRST
    x = (x ^ (x >> np.uint64(27))) * _SECOND
    return x ^ (x >> np.uint64(31))


def sequence_key(sequence_id: str) -> np.uint64:
    """64 bits of a hash of the id, the same in every process."""
    return np.uint64(int.from_bytes(hashlib.blake2b(sequence_id.encode(), digest_size=8).digest(), "little"))


def token_keys(tokens: np.ndarray, positions: np.ndarray, sequence_keys: np.ndarray | np.uint64) -> np.ndarray:
    """[n] token ids, their positions, and the `sequence_key` of each → [n] uint64."""
    keys = _mix(np.asarray(tokens).astype(np.uint64) ^ sequence_keys)
    return _mix(keys ^ np.asarray(positions).astype(np.uint64))


def route_seals(keys: np.ndarray, routes: np.ndarray, layers: Sequence[int]) -> np.ndarray:
    """[n] keys, [n, L, K] uint8 or uint16 routes and the L layers' numbers in the whole model → [n, L] uint64.

    The ids enter as bytes, eight at a time: same dtype, same seal.
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
    """Checksums that travel with ``routes`` [S - 1, L, K] of ``tokens`` [S]: [S - 1 + L] int64, rows first.

    ``first_row``: ``routes`` [S - 1 - first_row, L, K] lack the rows before it, and the checksums do likewise. Parts
    of a sequence put together: their rows' checksums one after the other, their layers' added (`joined_checksums`).
    """
    positions = np.arange(first_row, first_row + len(routes))
    keys = token_keys(tokens[first_row : first_row + len(routes)], positions, sequence_key(sequence_id))
    seals = route_seals(keys, routes, range(routes.shape[1]))
    return np.concatenate([seals.sum(axis=1), seals.sum(axis=0)]).view(np.int64)


def joined_checksums(parts: Sequence[np.ndarray], num_layers: int) -> np.ndarray:
    """`route_checksums` of a sequence from those of its parts, which follow each other."""
    rows, layers = [part[:-num_layers] for part in parts], [part[-num_layers:].view(np.uint64) for part in parts]
    return np.concatenate([*rows, np.sum(layers, axis=0, dtype=np.uint64).view(np.int64)])


def check_checksums(sequence_id: str, seals: np.ndarray, checksums: np.ndarray) -> None:
    """Compare the [S - 1, L] seals of a sequence, made from its tokens here, with the checksums it came with.

    Raises `RouteError` that names the sequence, and the first token and layer that differ.
    """
    want = np.asarray(checksums).view(np.uint64)
    if len(want) != sum(seals.shape):
        raise RouteError(f"sequence {sequence_id}: {len(want)} route checksums, {sum(seals.shape)} are due")
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
