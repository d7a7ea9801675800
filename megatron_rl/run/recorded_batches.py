"""Batches on disk: what a step was trained on, readable without this package (safetensors + JSON, no pickle).

``step_00000012.json`` holds what is per sequence and per step. Arrays over tokens lie in parts, one of each
data-parallel replica, which writes what it has learned from; ``parts`` names them with the numbers of their sequences:
``step_00000012.safetensors`` where there is one, else ``step_00000012.0000.safetensors`` and so on. The arrays of a
part are flat. With ``B`` sequences in it, ``S`` tokens of all of them together and ``R`` response tokens:

- ``tokens`` [S] int64, ``cu_seqlens`` [B+1]: sequence i of them is tokens[cu_seqlens[i]:cu_seqlens[i+1]], prompt and
  response
- ``cu_response`` [B+1]: response i is [cu_response[i]:cu_response[i+1]] of the next five
- ``inference_logprobs`` (log mu), ``old_logprobs`` (log po, where computed), ``current_logprobs`` (log pi of the
  update; with one update per batch it is also log po) [R] float32, ``loss_mask`` [R] bool,
  ``policy_versions`` [R] int32
- ``kept_tokens`` [R, C] int32 under `rollout.kept_sets`: the tokens that each distribution is over, then -1
- ``routed_experts`` [S − B, L, K] where recorded: the last token of every sequence has no route. L counts MoE layers
- ``route_checksums`` [S − B] and ``route_layer_checksums`` [B, L] int64: see megatron_rl/routing/payload.py

JSON: ``format_version``, ``step``, ``policy_version`` (optimizer steps before this batch), ``kept`` (it is not deleted
for its age), ``minibatches``, ``metrics`` of the step, ``parts`` with the SHA-256 of each file, which `load_batch`
compares, and per sequence ``id``, ``prompt_length``, ``advantage``, ``reward``. Batches of format version 2 have one
part and do not name it.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load_file, save_file

from megatron_rl.errors import InputError, shown
from megatron_rl.process.host import write_whole
from megatron_rl.process.ranks import gather_objects, world_rank
from megatron_rl.process.run_files import UNFIT, read_json
from megatron_rl.types import Batch, Sequence

FORMAT_VERSION, READABLE = 3, (2, 3)
MAX_LOGPROB = 1e-4  # above this it cannot be rounding: probabilities do not exceed one
IMPORTED = "imported/responses"
"""Metric of a batch that was imported from a dump of another project: its number of responses."""
T = TypeVar("T")
_STEP_FILE = re.compile(r"step_(\d{8,})\.json")
_LIKE = {"kept": True, "parts": [{"sequences": [0]}], "minibatches": [[0]], "sequences": [{"id": ""}], "metrics": {}}
_PER_TOKEN = ("inference_logprobs", "old_logprobs", "current_logprobs", "loss_mask", "policy_versions")


@dataclass
class RecordedBatch:
    """A batch from disk and what the run said of its step."""

    batch: Batch
    policy_version: int  # optimizer steps that the weights had seen before this batch
    metrics: dict[str, float] = field(default_factory=dict)


def batch_path(folder: Path, step: int) -> Path:
    """The JSON file of a step's batch; its presence says that the batch is complete."""
    return Path(folder) / f"step_{step:08d}.json"


def recorded_steps(folder: Path) -> list[int]:
    """Steps whose batches are complete, in order."""
    matches = (_STEP_FILE.fullmatch(path.name) for path in Path(folder).glob("step_*.json"))
    return sorted(int(match[1]) for match in matches if match)


def read_description(path: Path) -> dict[str, Any]:
    """The JSON file of a batch. Raises `InputError` where it is not one of a run: cut, altered or a stray."""
    described = read_json(path, _LIKE)
    for name in (part.get("file") for part in described.get("parts", [])):
        if not (isinstance(name, str) and Path(name).name == name and name.startswith(f"{path.stem}.")):
            raise InputError(f"{path}: parts: {shown(name, 60)} is not the name of a part of this batch; restore it")
    return described


def record_batch(
    folder: Path, batch: Batch, policy_version: int, metrics: Mapping[str, float] | None = None, keep: bool = False
) -> Path:
    """Write ``batch``: each rank the sequences that it speaks for (`Sequence.holder`), rank 0 those that all hold and
    the JSON file, whose path is returned. Collective.

    ``keep``: `delete_batch` leaves it. Raises OSError on every rank where a disk is full or gone; nothing of the
    step is left then.
    """
    path = batch_path(folder, batch.step)
    writers = [s.holder or 0 for s in batch.sequences]
    parts = {rank: [i for i, writer in enumerate(writers) if writer == rank] for rank in sorted({*writers})}
    names = {rank: _part_name(path, number, len(parts)) for number, rank in enumerate(parts)}
    described = {
        "format_version": FORMAT_VERSION,
        "step": batch.step,
        "policy_version": policy_version,
        "kept": keep,
        "minibatches": batch.minibatches,
        # JSON has no infinity: what is not finite is left out.
        "metrics": {name: float(value) for name, value in (metrics or {}).items() if math.isfinite(value)},
        "parts": [{"file": names[rank], "sequences": numbers} for rank, numbers in parts.items()],
        "sequences": [
            {"id": s.id, "prompt_length": s.prompt_length, "advantage": s.advantage, "reward": s.reward}
            for s in batch.sequences
        ],
    }
    rank = world_rank()
    partial = path.with_name(f".partial-{path.stem}-{rank}")

    def write_part() -> str | None:
        if rank not in parts:
            return None
        partial.unlink(missing_ok=True)  # perhaps a link, which safetensors would follow
        save_file(_arrays([batch.sequences[i] for i in parts[rank]]), partial)
        digest = _digest(partial)
        os.replace(partial, path.with_name(names[rank]))
        return digest

    def describe(digests: list[str | None]) -> None:
        if rank == 0:
            for part, writer in zip(described["parts"], parts, strict=True):
                part["sha256"] = digests[writer]
            write_whole(path, json.dumps(described))  # an indent takes five times as long

    try:
        _all_ranks(lambda: _make_room(path) if rank == 0 else None)
        digests = _all_ranks(write_part)
        _all_ranks(lambda: describe(digests))
    except OSError:
        for rest in (partial, path.with_name(names.get(rank, partial.name))):
            rest.unlink(missing_ok=True)
        raise
    return path


def _digest(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _part_name(path: Path, number: int, count: int) -> str:
    return f"{path.stem}.safetensors" if count == 1 else f"{path.stem}.{number:04d}.safetensors"


def _make_room(path: Path) -> None:
    """For a step recorded again: never an old description beside new arrays, nor parts of another layout."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    for part in path.parent.glob(f"{path.stem}.*safetensors"):
        part.unlink()


def _all_ranks(action: Callable[[], T]) -> list[T | None]:
    """Run ``action`` on every rank and return what it returned on each; `OSError` on all where it failed on one."""
    problem, result = None, None
    try:
        result = action()
    except (OSError, SafetensorError) as error:  # safetensors has its own for what is the disk's fault
        problem = error
    answers = gather_objects((None if problem is None else str(problem), result))
    first = next((text for text, _ in answers if text is not None), None)
    if first is not None:
        raise problem if isinstance(problem, OSError) else OSError(first) from problem
    return [answer for _, answer in answers]


def delete_batch(folder: Path, step: int) -> bool:
    """Delete a step's batch, unless it is kept. Return whether it is gone."""
    path = batch_path(folder, step)
    described = read_description(path)
    if described.get("kept", True):
        return False
    path.unlink()
    for part in parts_of(path, described):
        part.unlink()
    return True


def keep_batch(folder: Path, step: int) -> None:
    """From now on `delete_batch` leaves the step's batch."""
    path = batch_path(folder, step)
    write_whole(path, json.dumps(read_description(path) | {"kept": True}))


def batch_bytes(folder: Path, step: int) -> int:
    """The size of all files of a step's batch."""
    path = batch_path(folder, step)
    return sum(file.stat().st_size for file in (path, *path.parent.glob(f"{path.stem}.*safetensors")))


def parts_of(path: Path, described: dict[str, Any]) -> list[Path]:
    """The files of a batch's arrays."""
    return [path.with_name(part["file"]) for part in described.get("parts", [{"file": f"{path.stem}.safetensors"}])]


def _arrays(sequences: list[Sequence]) -> dict[str, np.ndarray]:
    arrays = {
        "tokens": np.concatenate([s.tokens for s in sequences]),
        "cu_seqlens": np.cumsum([0, *(s.length for s in sequences)]),
        "cu_response": np.cumsum([0, *(s.response_length for s in sequences)]),
    }
    for name in (*_PER_TOKEN, "kept_tokens", "routed_experts"):
        values = [getattr(s, name) for s in sequences]
        if all(value is not None for value in values):
            arrays[name] = np.ascontiguousarray(np.concatenate(values))
    if "routed_experts" in arrays:
        checksums = [np.split(s.route_checksums, [len(s.tokens) - 1]) for s in sequences]
        arrays["route_checksums"] = np.concatenate([rows for rows, _ in checksums])
        arrays["route_layer_checksums"] = np.stack([layers for _, layers in checksums])
    return arrays


def load_batch(path: Path) -> RecordedBatch:
    """The inverse of `record_batch`. InputError where a file is missing, of another format version, or was altered."""
    if not path.is_file():
        steps = recorded_steps(path.parent)
        raise InputError(
            f"recorded batch {path}: no such file; recorded steps: {', '.join(map(str, steps)) or 'none'} "
            "(recorder.record_batches says which are kept)"
        )
    try:
        return _load(path, json.loads(path.read_text()))
    except InputError:
        raise
    except (*UNFIT, SafetensorError, OSError) as error:
        raise InputError(
            f"recorded batch {path}: altered or damaged ({type(error).__name__}: {shown(error)}); copy it again"
        ) from error


def _load(path: Path, described: dict[str, Any]) -> RecordedBatch:
    if described.get("format_version") not in READABLE:
        raise InputError(
            f"recorded batch {path}: format_version {shown(described.get('format_version'), 60)}, this version reads "
            f"{' and '.join(map(str, READABLE))}"
        )
    abouts = described["sequences"]
    sequences: list[Any] = [None] * len(abouts)
    numbers = [part["sequences"] for part in described.get("parts", [{"sequences": range(len(abouts))}])]
    if sorted(i for its in numbers for i in its) != list(range(len(abouts))):
        raise ValueError(f"its parts do not hold each of {len(abouts)} sequences once")
    minibatches = described["minibatches"]
    if sorted(i for indices in minibatches for i in indices) != list(range(len(abouts))):
        raise ValueError(f"its mini-batches do not hold each of {len(abouts)} sequences once")
    stored = described.get("parts", [{}])
    for file, its, part in zip(parts_of(path, described), numbers, stored, strict=True):
        if not file.is_file():
            raise InputError(f"recorded batch {path}: its part {file.name} is missing; was the folder copied whole?")
        if part.get("sha256", digest := _digest(file)) != digest:
            raise ValueError(f"{file.name} is not the file that was recorded: its SHA-256 is another")
        arrays = load_file(file)
        _check_arrays(arrays, [abouts[i] for i in its])
        for place, i in enumerate(its):
            sequences[i] = _sequence(arrays, place, abouts[i])
    batch = Batch(described["step"], sequences, minibatches)
    return RecordedBatch(batch, described["policy_version"], described["metrics"])


def _check_arrays(arrays: dict[str, np.ndarray], abouts: list[dict]) -> None:
    """ValueError where lengths do not belong together, or a number of a token cannot be one."""
    ends, responses = arrays["cu_seqlens"], arrays["cu_response"]
    prompts = np.array([about["prompt_length"] for about in abouts])
    lengths, response_lengths = np.diff(ends), np.diff(responses)
    fits = len(ends) == len(responses) == len(abouts) + 1 and ends[0] == responses[0] == 0
    if not (fits and (response_lengths > 0).all() and (lengths == prompts + response_lengths).all()):
        raise ValueError("the lengths of its sequences do not add up")
    due = {"tokens": ends[-1]} | dict.fromkeys((name for name in _PER_TOKEN if name in arrays), responses[-1])
    for name, count in due.items():
        if arrays[name].shape != (count,):
            raise ValueError(f"{name} has the shape {arrays[name].shape}, expected ({count},)")
    if "kept_tokens" in arrays and (arrays["kept_tokens"].ndim, len(arrays["kept_tokens"])) != (2, responses[-1]):
        raise ValueError(f"kept_tokens has the shape {arrays['kept_tokens'].shape}, expected ({responses[-1]}, …)")
    for name in ("inference_logprobs", "old_logprobs", "current_logprobs"):
        if name in arrays and (arrays[name] > MAX_LOGPROB).any():  # NaN is what an alarm may have recorded
            raise ValueError(f"{name} holds a value that is not a log-prob")
    if (arrays["tokens"] < 0).any():
        raise ValueError("tokens holds a negative number")


def _sequence(arrays: dict[str, np.ndarray], i: int, about: dict) -> Sequence:
    whole = slice(arrays["cu_seqlens"][i], arrays["cu_seqlens"][i + 1])
    response = slice(arrays["cu_response"][i], arrays["cu_response"][i + 1])
    rows = slice(whole.start - i, whole.stop - i - 1)
    fields = {name: arrays[name][response] for name in (*_PER_TOKEN, "kept_tokens") if name in arrays}
    if "routed_experts" in arrays:
        fields["routed_experts"] = arrays["routed_experts"][rows]
        fields["route_checksums"] = np.concatenate(
            [arrays["route_checksums"][rows], arrays["route_layer_checksums"][i]]
        )
    return Sequence(tokens=arrays["tokens"][whole], **about, **fields)


# Single responses of a batch on disk, of which nothing else is read: its arrays may be larger than memory.


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
            self.described = read_description(path)
        except InputError as error:
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
        lengths = np.zeros(len(self), dtype=np.int64)
        for file, its in self._parts:
            with self._open(file) as arrays:
                lengths[list(its)] = np.diff(arrays.get_tensor("cu_response"))
        return lengths

    @cached_property
    def largest_log_rho(self) -> np.ndarray | None:
        """Largest |log rho| of each response [B] float64, 0 for an empty one; None where log po was not kept.

        Reads two log-probs of every token of the batch, `BLOCK_TOKENS` at a time.
        """
        largest = np.zeros(len(self))
        for file, its in self._parts:
            with self._open(file) as arrays:
                learner = _learner_name(arrays)
                if learner is None:
                    return None
                bounds = arrays.get_tensor("cu_response").astype(np.int64)
                largest[list(its)] = _largest_gap(arrays, learner, bounds)
        return largest

    @contextmanager
    def _open(self, file: Path) -> Iterator[Any]:
        try:
            with safe_open(file, "numpy") as arrays:
                yield arrays
        except (OSError, SafetensorError, KeyError) as error:
            raise self._gone(error) from error

    def _gone(self, error: Exception) -> InputError:
        return InputError(
            f"recorded batch {self.path}: cannot be read ({error}); a run deletes all but the newest "
            "recorder.evidence.batches, or under recorder.record_batches: last_n the newest recorder.keep"
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
