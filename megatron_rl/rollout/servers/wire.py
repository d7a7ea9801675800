"""One response on its way from a server to the trainer: a header, a JSON head, and arrays as they lie in memory.

Neither side makes an object for every token. At 48 MoE layers and 8 experts a token weighs 392 bytes, nearly all of
them routes; what the trainer spends on one is a copy and a CRC-32.

    header   "MRLA", format, 0, bytes of the head, CRC-32 of the head
    head     JSON: finish_reason; versions [[version, tokens], …], run lengths over the response; arrays [{name, dtype,
             shape, checksum}], in the order in which they follow
    arrays   of `Rollout`: tokens int32 [R], inference_logprobs float32 [R]; with routes: routed_experts uint8 or uint16
             [P + R - 1, L, K] and their seals route_checksums int64 [P + R - 1 + L]

Numbers are little-endian. Head and arrays are filled up to a multiple of 8 bytes.

The trainer takes nothing from the head on trust. `Expected` says how many bytes an answer to a request can have, before
memory is taken for them, and which numbers they can hold. What is not an answer to the request is `Damaged`.

How busy a server is, as it says of itself with every answer and with its settings.
"""

from __future__ import annotations

import itertools
import json
import struct
import time
import zlib
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np

from megatron_rl.routing import RouteShape, missing_id
from megatron_rl.types import FINISH_REASONS, MAX_LOGPROB, Rollout

MEDIA_TYPE = "application/octet-stream"
# A connection that is idle is closed by the trainer, long before the server would: a request that meets a closing one
# fails unread, and a weight update that fails costs the run a server.
IDLE_S, SERVER_IDLE_S = 15, 60
MAGIC, FORMAT = b"MRLA", 2
ALIGNMENT = 8
HEAD_BYTES = 1 << 16  # a run length for each of 4000 weight updates during the response
# Of a response, where the request or the model does not say it.
MOST_TOKENS, MOST_ROUTES = 1 << 20, 1 << 14
MIN_LOGPROB = -1e5  # far below what a softmax over logits of any model leaves to a token that was sampled
_HEADER = struct.Struct("<4sHHII")
_TYPES = {
    "tokens": ("<i4",),
    "inference_logprobs": ("<f4",),
    "routed_experts": ("|u1", "<u2"),
    "route_checksums": ("<i8",),
}
_DIMENSIONS = {"tokens": 1, "inference_logprobs": 1, "routed_experts": 3, "route_checksums": 1}


class Damaged(ValueError):
    """The bytes are not an answer, or not those that were sent."""


@dataclass(frozen=True)
class ModelLimits:
    """What bounds the numbers in a response. ``shape``: of its routes; None: the engine records none."""

    vocab_size: int
    shape: RouteShape | None = None


@dataclass(frozen=True)
class Expected:
    """What an answer to one request can be."""

    max_tokens: int
    rows_before: int  # of routes that come before those of the response's tokens: P - 1 - first_route
    wants_routes: bool
    model: ModelLimits | None
    stop_token_ids: frozenset[int] = frozenset()  # empty: not known

    @classmethod
    def of(cls, body: dict[str, Any], model: ModelLimits | None) -> Expected:
        """Return what the answer to a request must be like. ``body``: of the request (`client.request_body`)."""
        sampling = body.get("sampling_params", {})
        most, stops = sampling.get("max_tokens", MOST_TOKENS), frozenset(sampling.get("stop_token_ids") or ())
        before = len(body.get("token_ids", ())) - 1 - body.get("first_route", 0)
        return cls(most, before, bool(body.get("wants_routes", True)), model, stops)

    @property
    def most_bytes(self) -> int:
        """Most bytes of the whole answer."""
        size = _HEADER.size + HEAD_BYTES + 8 * self.max_tokens
        if self.wants_routes:
            rows, (layers, ids, itemsize) = self.rows_before + self.max_tokens, self._shape()
            size += rows * (ids * itemsize + 8) + layers * 8
        return size + len(_TYPES) * ALIGNMENT

    def _shape(self) -> tuple[int, int, int]:
        """Most layers, expert ids of one row, and bytes of one id."""
        if self.model is None:
            return MOST_ROUTES, MOST_ROUTES, 2
        if (shape := self.model.shape) is None:
            return 0, 0, 0
        return len(shape.layers), len(shape.layers) * shape.topk, shape.dtype.itemsize

    def check(self, answer: Rollout) -> None:
        """Raise `Damaged` unless ``answer`` can be one to this request."""
        number, logprobs = len(answer.tokens), answer.inference_logprobs
        if not (0 if answer.finish_reason == "abort" else 1) <= number <= self.max_tokens:
            raise Damaged(f"{number} tokens, finish reason {answer.finish_reason!r}; {self.max_tokens} were asked for")
        vocab_size = self.model.vocab_size if self.model is not None else np.iinfo(np.int32).max
        if number and not 0 <= answer.tokens.min() <= answer.tokens.max() < vocab_size:
            raise Damaged(f"token {answer.tokens.min()} or {answer.tokens.max()} is not in 0 … {vocab_size - 1}")
        if not (np.isfinite(logprobs) & (logprobs <= MAX_LOGPROB)).all():
            raise Damaged("a log-prob is not finite, or above 0")
        if (logprobs < MIN_LOGPROB).any():
            raise Damaged(f"a log-prob of {logprobs.min():g}; no token is sampled below {MIN_LOGPROB:g}")
        if answer.finish_reason == "length" and number < self.max_tokens:
            raise Damaged(f"cut at {number} tokens, {self.max_tokens} were asked for")
        if answer.finish_reason == "stop" and self.stop_token_ids and answer.tokens[-1] not in self.stop_token_ids:
            raise Damaged(f"ends with token {answer.tokens[-1]}, which is none of {sorted(self.stop_token_ids)[:8]}")
        self._check_routes(answer, number)

    def _check_routes(self, answer: Rollout, number: int) -> None:
        shape = self.model.shape if self.model is not None else None
        if (routes := answer.routed_experts) is None:
            if shape is not None and self.wants_routes and number:
                raise Damaged("routes are missing")
            return
        if not self.wants_routes or (self.model is not None and shape is None):
            raise Damaged("routes were not asked for")
        (rows, layers, topk), due = routes.shape, self.rows_before + number
        if rows != due or answer.route_checksums.shape != (rows + layers,) or not number:
            raise Damaged(f"routes of {rows} rows with {len(answer.route_checksums)} checksums; {due} rows are due")
        if shape is None:
            return
        if (layers, topk, routes.dtype) != (len(shape.layers), shape.topk, shape.dtype):
            raise Damaged(f"routes of shape {routes.shape} and {routes.dtype} are not the model's")
        if routes.size and routes.max() >= shape.num_experts:  # one pass, where every row has a record
            missing = (routes == missing_id(shape.dtype)).all(-1, keepdims=True)
            if ((routes >= shape.num_experts) & ~missing).any():
                raise Damaged(f"a route to an expert that is not in 0 … {shape.num_experts - 1}")


def pack(answer: Rollout) -> list[bytes | memoryview]:
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
    head = {"finish_reason": answer.finish_reason, "versions": _runs(answer.policy_versions), "arrays": described}
    text = json.dumps(head).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    return [_HEADER.pack(MAGIC, FORMAT, 0, len(text), zlib.crc32(text)) + text, *(piece for piece in pieces if piece)]


def unpack(body: bytes | bytearray | memoryview) -> Rollout:
    """The response whose arrays lie in ``body``; its request says whose it is. Raises `Damaged` where a byte of it is
    not what was sent."""
    try:
        head, start = _head(memoryview(body))
        arrays, end = _arrays(memoryview(body), head["arrays"], start)
        values, counts = _checked_runs(head["versions"])
        lengths = (len(arrays.get("tokens")), len(arrays.get("inference_logprobs")), sum(counts))
        if len(set(lengths)) > 1:
            raise Damaged("{} tokens, {} log-probs and {} versions".format(*lengths))
        versions = np.repeat(np.array(values, np.int32), np.array(counts, np.int64))
        answer = Rollout("", (), policy_versions=versions, finish_reason=head["finish_reason"], **arrays)
    except Damaged:
        raise
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
        raise Damaged(f"no head of an answer: {type(error).__name__}: {error}") from error
    if end != len(body):
        raise Damaged(f"{len(body)} bytes, the head describes {end}")
    if answer.finish_reason not in FINISH_REASONS:
        raise Damaged(f"unknown finish reason {answer.finish_reason!r}")
    if (answer.routed_experts is None) != (answer.route_checksums is None):
        raise Damaged("routes travel with their checksums")
    return answer


def _head(body: memoryview) -> tuple[dict[str, Any], int]:
    """The head, and where it ends."""
    if len(body) < _HEADER.size:
        raise Damaged(f"{len(body)} bytes are not a header")
    magic, version, _, size, checksum = _HEADER.unpack_from(body)
    if size > HEAD_BYTES:
        raise Damaged(f"a head of {size} bytes; {HEAD_BYTES} are the most")
    if (magic, version) != (MAGIC, FORMAT):
        raise Damaged(f"begins with {bytes(magic)!r}, format {version}; expected {MAGIC!r}, format {FORMAT}")
    text = body[_HEADER.size : _HEADER.size + size]
    if len(text) != size or zlib.crc32(text) != checksum:
        raise Damaged("the head's checksum differs")
    return json.loads(bytes(text)), _HEADER.size + size


def _arrays(body: memoryview, described: list[dict[str, Any]], start: int) -> tuple[dict[str, np.ndarray], int]:
    """The arrays by name, and where the last one ends."""
    arrays: dict[str, np.ndarray] = {}
    for item in described:
        name, shape, dtype = item["name"], tuple(item["shape"]), item["dtype"]
        is_shape = len(shape) == _DIMENSIONS[name] and all(type(size) is int and size >= 0 for size in shape)
        if name in arrays or dtype not in _TYPES[name] or not is_shape:
            raise Damaged(f"array {name!r} of {dtype}, shape {shape}, does not belong here")
        dtype = np.dtype(dtype)
        size = dtype.itemsize * int(np.prod(shape, dtype=object))
        content = body[start : start + size]
        if len(content) != size or zlib.crc32(content) != item["checksum"]:
            raise Damaged(f"{name}: the checksum differs")
        arrays[name] = np.frombuffer(content, dtype).reshape(shape)
        start += size + -size % ALIGNMENT
    return arrays, start


def _checked_runs(runs: list[list[int]]) -> tuple[list[int], list[int]]:
    """Values and run lengths; together the runs can be longer than any memory."""
    if not all(type(number) is int for value, count in runs for number in (value, count)):
        raise ValueError("versions are not whole numbers")
    if any(count < 0 for _, count in runs):
        raise ValueError("counts cannot be negative")
    if any(not 0 <= value <= np.iinfo(np.int32).max for value, _ in runs):
        raise OverflowError("a policy version is out of range")
    return [value for value, _ in runs], [count for _, count in runs]


def _runs(versions: np.ndarray) -> list[list[int]]:
    """[[value, how often in a row], …]"""
    starts = np.flatnonzero(np.diff(versions, prepend=versions[:1] - 1)).tolist()
    return [[int(versions[i]), j - i] for i, j in itertools.pairwise([*starts, len(versions)])]


LOAD_HEADER = "X-Server-Load"
MOST = 2**53  # of any count


@dataclass(frozen=True)
class Load:
    """Load of a server by all ranks' requests. Counts are since the server's start."""

    running: int = 0  # responses that the engine works on
    waiting: int = 0  # responses that wait for a place in it
    kv_usage: float = 0.0  # tokens of responses under way, shared prompts counted for each, of what the cache holds
    answered: int = 0  # responses
    tokens: int = 0  # of these responses
    busy_s: float = 0.0  # with at least one response under way
    prompt_tokens: int = 0  # of requests that were sampled
    cached_tokens: int = 0  # of these, found in the prefix cache

    @property
    def queue(self) -> int:
        return self.running + self.waiting

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.busy_s if self.busy_s else 0.0

    @property
    def prefix_hits(self) -> float:
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    @classmethod
    def of(cls, text: str | dict[str, Any] | None) -> Load:
        """What a server sent; an empty one where it is not one, or one of its numbers is impossible."""
        try:
            values = json.loads(text) if isinstance(text, str) else dict(text or {})
            given = {field.name: values[field.name] for field in fields(cls) if field.name in values}
        except (ValueError, TypeError, RecursionError):
            return cls()
        return cls(**given) if all(_is_number(name, value) for name, value in given.items()) else cls()


def _is_number(name: str, value: Any) -> bool:
    kinds, most = {"kv_usage": ((int, float), 1), "busy_s": ((int, float), MOST)}.get(name, ((int,), MOST))
    return type(value) in kinds and 0 <= value <= most  # a NaN is in no range


class Meter:
    """Inside a server. ``engine``: vLLM's AsyncLLM, with its ``under_way``; None: counts of requests alone."""

    def __init__(self, engine: Any = None, under_way: Any = None) -> None:
        self._engine, self._under_way_there = engine, under_way
        self._under_way, self._answered, self._tokens, self._busy_s, self._since = 0, 0, 0, 0.0, 0.0

    def begin(self) -> None:
        self._since = time.monotonic() if not self._under_way else self._since
        self._under_way += 1

    def end(self, num_tokens: int | None) -> None:
        """A request is done with; ``num_tokens``: of its response, None where there is none."""
        self._under_way -= 1
        if not self._under_way:
            self._busy_s += time.monotonic() - self._since
        if num_tokens is not None:
            self._answered, self._tokens = self._answered + 1, self._tokens + num_tokens

    def load(self) -> Load:
        busy_s = self._busy_s + (time.monotonic() - self._since if self._under_way else 0.0)
        counts = {"answered": self._answered, "tokens": self._tokens, "busy_s": round(busy_s, 3)}
        if self._engine is None:
            return Load(running=self._under_way, **counts)
        places = self._engine.vllm_config.scheduler_config.max_num_seqs
        return Load(
            running=min(self._under_way, places),
            waiting=max(0, self._under_way - places),
            kv_usage=round(_kv_usage(self._engine), 4),
            prompt_tokens=self._under_way_there.num_prompt_tokens,
            cached_tokens=self._under_way_there.num_cached_tokens,
            **counts,
        )

    def header(self) -> str:
        return json.dumps(asdict(self.load()))


def _kv_usage(engine: Any) -> float:
    cache = engine.vllm_config.cache_config
    room = (cache.num_gpu_blocks or 0) * cache.block_size
    states = engine.output_processor.request_states.values()
    held = sum(state.prompt_len + state.detokenizer.num_output_tokens() for state in states)
    return min(1.0, held / room) if room else 0.0
