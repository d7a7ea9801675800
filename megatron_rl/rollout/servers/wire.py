"""One response on its way from a server to the trainer: a header, a JSON head, and arrays as they lie in memory.

Neither side makes an object for every token. At 48 MoE layers and 8 experts a token weighs 392 bytes, nearly all of
them routes; what the trainer spends on one is a copy and a CRC-32.

    header   "MRLA", format, 0, bytes of the head, CRC-32 of the head
    head     JSON: finish_reason; versions [[version, tokens], …], run lengths over the response; arrays [{name, dtype,
             shape, checksum}], in the order in which they follow
    arrays   tokens int32 [R], logprobs float32 [R]; with routes: routes uint8 or uint16 [P + R - 1, L, K] and their
             seals route_checksums int64 [P + R - 1 + L]

Numbers are little-endian. Head and arrays are filled up to a multiple of 8 bytes.
"""

from __future__ import annotations

import itertools
import json
import struct
import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np

MEDIA_TYPE = "application/octet-stream"
# A connection that is idle is closed by the trainer, long before the server would: a request that meets a closing one
# fails unread, and a weight update that fails costs the run a server.
IDLE_S, SERVER_IDLE_S = 15, 60
MAGIC, FORMAT = b"MRLA", 1
ALIGNMENT = 8
_HEADER = struct.Struct("<4sHHII")
_TYPES = {"tokens": ("<i4",), "logprobs": ("<f4",), "routes": ("|u1", "<u2"), "route_checksums": ("<i8",)}
_DIMENSIONS = {"tokens": 1, "logprobs": 1, "routes": 3, "route_checksums": 1}


class Damaged(ValueError):
    """The bytes are not an answer, or not those that were sent."""


@dataclass(frozen=True)
class Answer:
    """One sampled response as the server reports it. ``R`` tokens after a prompt of ``P``."""

    tokens: np.ndarray  # [R] int32
    logprobs: np.ndarray  # [R] float32
    versions: np.ndarray  # [R] int32, the policy version that sampled each token
    finish_reason: str | None
    routes: np.ndarray | None = None  # [P + R - 1, L, K] of `RouteShape.dtype`: MoE layers only
    route_checksums: np.ndarray | None = None  # [P + R - 1 + L] int64, made where the engine handed the routes over


def pack(answer: Answer) -> list[bytes | memoryview]:
    """The pieces of the body, in order. Arrays are not copied: they must not change until the pieces are sent."""
    arrays = {name: np.ascontiguousarray(array) for name in _TYPES if (array := getattr(answer, name)) is not None}
    described, pieces = [], []
    for name, array in arrays.items():
        if array.dtype.str not in _TYPES[name]:
            raise TypeError(f"{name}: {array.dtype} does not travel, expected {' or '.join(_TYPES[name])}")
        content = array.reshape(-1).view(np.uint8).data
        described.append(
            {"name": name, "dtype": array.dtype.str, "shape": array.shape, "checksum": zlib.crc32(content)}
        )
        pieces += [content, bytes(-len(content) % ALIGNMENT)]
    head = {"finish_reason": answer.finish_reason, "versions": _runs(answer.versions), "arrays": described}
    text = json.dumps(head).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    return [_HEADER.pack(MAGIC, FORMAT, 0, len(text), zlib.crc32(text)) + text, *(piece for piece in pieces if piece)]


def unpack(body: bytes | bytearray | memoryview) -> Answer:
    """The answer whose arrays lie in ``body``. Raises `Damaged` where a byte of it is not what was sent."""
    try:
        head, start = _head(memoryview(body))
        arrays, end = _arrays(memoryview(body), head["arrays"], start)
        runs = np.array(head["versions"], np.int32).reshape(-1, 2)
        found = Answer(**arrays, versions=np.repeat(runs[:, 0], runs[:, 1]), finish_reason=head["finish_reason"])
    except Damaged:
        raise
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
        raise Damaged(f"no head of an answer: {type(error).__name__}: {error}") from error
    if end != len(body):
        raise Damaged(f"{len(body)} bytes, the head describes {end}")
    if not len(found.tokens) == len(found.logprobs) == len(found.versions):
        lengths = (len(found.tokens), len(found.logprobs), len(found.versions))
        raise Damaged("{} tokens, {} log-probs and {} versions".format(*lengths))
    if (found.routes is None) != (found.route_checksums is None):
        raise Damaged("routes travel with their checksums")
    return found


def _head(body: memoryview) -> tuple[dict[str, Any], int]:
    """The head, and where it ends."""
    if len(body) < _HEADER.size:
        raise Damaged(f"{len(body)} bytes are no header")
    magic, version, _, size, checksum = _HEADER.unpack_from(body)
    if (magic, version) != (MAGIC, FORMAT):
        raise Damaged(f"begins with {bytes(magic)!r}, format {version}; expected {MAGIC!r}, format {FORMAT}")
    text = body[_HEADER.size : _HEADER.size + size]
    if len(text) != size or zlib.crc32(text) != checksum:
        raise Damaged("the head's checksum differs")
    return json.loads(bytes(text)), _HEADER.size + size


def _arrays(body: memoryview, described: list[dict[str, Any]], start: int) -> tuple[dict[str, np.ndarray], int]:
    """The arrays by name, and where the last one ends."""
    found: dict[str, np.ndarray] = {}
    for item in described:
        name, shape, dtype = item["name"], tuple(item["shape"]), np.dtype(item["dtype"])
        if name in found or dtype.str not in _TYPES[name] or len(shape) != _DIMENSIONS[name] or min(shape) < 0:
            raise Damaged(f"array {name!r} of {dtype.str}, shape {shape}, does not belong here")
        size = dtype.itemsize * int(np.prod(shape, dtype=object))
        content = body[start : start + size]
        if len(content) != size or zlib.crc32(content) != item["checksum"]:
            raise Damaged(f"{name}: the checksum differs")
        found[name] = np.frombuffer(content, dtype).reshape(shape)
        start += size + -size % ALIGNMENT
    return found, start


def _runs(versions: np.ndarray) -> list[list[int]]:
    """[[value, how often in a row], …]"""
    starts = np.flatnonzero(np.diff(versions, prepend=versions[:1] - 1)).tolist()
    return [[int(versions[i]), j - i] for i, j in itertools.pairwise([*starts, len(versions)])]
