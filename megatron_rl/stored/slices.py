"""Single responses of a batch on disk, of which nothing else is read: its arrays may be larger than memory."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from megatron_rl.errors import InputError
from megatron_rl.stored.batches import READABLE, parts_of

BLOCK_TOKENS = 2**22  # of a summary, held at once


@dataclass(frozen=True)
class StoredResponse:
    """Arrays of one response, [R] each, ``prompt`` [P]. ``learner_logprobs``: log po, None where it was not kept."""

    prompt: np.ndarray
    tokens: np.ndarray
    rollout_logprobs: np.ndarray
    learner_logprobs: np.ndarray | None
    loss_mask: np.ndarray
    policy_versions: np.ndarray

    @property
    def log_rho(self) -> np.ndarray | None:
        """log po - log mu, [R] float64."""
        if self.learner_logprobs is None:
            return None
        return self.learner_logprobs.astype(np.float64) - self.rollout_logprobs


class BatchSlices:
    """A recorded batch by its JSON file. `InputError` where it is missing, is of another format, or goes away."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.described: dict[str, Any] = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise self._gone(error) from error
        if self.described.get("format_version") not in READABLE:
            raise InputError(
                f"recorded batch {path}: format_version {self.described.get('format_version')!r}, this version reads "
                f"{' and '.join(map(str, READABLE))}"
            )
        files = parts_of(path, self.described)
        every = [{"sequences": range(len(self))}]
        self._parts = [(f, part["sequences"]) for f, part in zip(files, self.described.get("parts", every))]
        self._place = {i: (file, place) for file, its in self._parts for place, i in enumerate(its)}

    def __len__(self) -> int:
        return len(self.described["sequences"])

    def response(self, i: int) -> StoredResponse:
        """Sequence ``i`` of the batch."""
        if i not in self._place:
            raise InputError(f"recorded batch {self.path}: sequence {i}; it has {len(self)}")
        file, place = self._place[i]
        with self._open(file) as arrays:
            start, end = self._bounds(arrays, "cu_seqlens", place)
            tokens = arrays.get_slice("tokens")[start:end]
            start, end = self._bounds(arrays, "cu_response", place)
            cut = len(tokens) - (end - start)
            learner = _learner_name(arrays)
            return StoredResponse(
                prompt=tokens[:cut],
                tokens=tokens[cut:],
                rollout_logprobs=arrays.get_slice("inference_logprobs")[start:end],
                learner_logprobs=arrays.get_slice(learner)[start:end] if learner else None,
                loss_mask=arrays.get_slice("loss_mask")[start:end],
                policy_versions=arrays.get_slice("policy_versions")[start:end],
            )

    @cached_property
    def lengths(self) -> np.ndarray:
        """Response lengths [B] in tokens."""
        found = np.zeros(len(self), dtype=np.int64)
        for file, its in self._parts:
            with self._open(file) as arrays:
                found[list(its)] = np.diff(arrays.get_tensor("cu_response"))
        return found

    @cached_property
    def largest_log_rho(self) -> np.ndarray | None:
        """Largest |log rho| of each response [B] float64, 0 for an empty one; None where log po was not kept.

        Reads two log-probs of every token of the batch, `BLOCK_TOKENS` at a time.
        """
        found = np.zeros(len(self))
        for file, its in self._parts:
            with self._open(file) as arrays:
                learner = _learner_name(arrays)
                if learner is None:
                    return None
                bounds = arrays.get_tensor("cu_response").astype(np.int64)
                found[list(its)] = _largest_gap(arrays, learner, bounds)
        return found

    @contextmanager
    def _open(self, file: Path) -> Iterator[Any]:
        try:
            with safe_open(file, "numpy") as arrays:
                yield arrays
        except (OSError, SafetensorError, KeyError) as error:
            raise self._gone(error) from error

    def _gone(self, error: Exception) -> InputError:
        return InputError(
            f"recorded batch {self.path}: cannot be read ({error}); under recorder.record_batches: last_n a run keeps "
            "the newest recorder.keep"
        )

    @staticmethod
    def _bounds(arrays: Any, name: str, place: int) -> tuple[int, int]:
        start, end = arrays.get_slice(name)[place : place + 2]
        return int(start), int(end)


def _learner_name(arrays: Any) -> str | None:
    """The array of log po. With one update a batch it is that of the update's forward pass."""
    return next((name for name in ("old_logprobs", "current_logprobs") if name in arrays.keys()), None)  # noqa: SIM118


def _largest_gap(arrays: Any, learner: str, bounds: np.ndarray) -> np.ndarray:
    """Largest |difference| of the two log-probs in each [bounds[i], bounds[i + 1])."""
    largest = np.zeros(len(bounds) - 1)
    first = 0
    while first < len(largest):
        last = int(np.searchsorted(bounds, bounds[first] + BLOCK_TOKENS, side="right")) - 1
        last = min(max(last, first + 1), len(largest))
        start, end = int(bounds[first]), int(bounds[last])
        gap = arrays.get_slice(learner)[start:end] - arrays.get_slice("inference_logprobs")[start:end]
        starts = bounds[first:last] - start
        filled = np.flatnonzero(bounds[first + 1 : last + 1] > bounds[first:last])  # reduceat knows no empty ranges
        if len(filled):
            largest[first + filled] = np.maximum.reduceat(np.abs(gap), starts[filled])
        first = last
    return largest
