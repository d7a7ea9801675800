"""Batches on disk: what a step was trained on, readable without this package (safetensors + JSON, no pickle).

``step_00000012.json`` holds what is per sequence and per step. Arrays over tokens lie in parts, one of each
data-parallel replica, which writes what it has learned from; ``parts`` names them with the numbers of their sequences:
``step_00000012.safetensors`` where there is one, else ``step_00000012.0000.safetensors`` and so on. The arrays of a
part are flat. With ``B`` sequences in it, ``S`` tokens of all of them together and ``R`` response tokens:

- ``tokens`` [S] int64, ``cu_seqlens`` [B+1]: sequence i of them is tokens[cu_seqlens[i]:cu_seqlens[i+1]], prompt and
  response
- ``cu_response`` [B+1]: response i is [cu_response[i]:cu_response[i+1]] of the next eight
- ``inference_logprobs`` (log mu), ``old_logprobs`` (log po, where computed), ``current_logprobs`` (log pi of the
  update; with one update per batch it is also log po), ``reference_logprobs``, ``scoring_logprobs`` and
  ``teacher_logprobs`` (of second models, where there are any) [R] float32, ``loss_mask`` [R] bool,
  ``policy_versions`` [R] int32
- ``kept_tokens`` [R, C] int32 under `rollout.kept_sets`: the tokens that each distribution is over, then -1
- ``head_logprobs`` [R, k] float32 under `rollout.sampled_head`: log mu of the k most probable tokens, ``head_tokens``
  [R, k] int32; with kept sets these are ``kept_tokens``, and -inf stands where there is none
- ``teacher_set_logprobs`` [R, k] float32 under `teacher.top_k`: log τ of ``teacher_tokens`` [R, k] int32, or a head's
- ``routed_experts`` [S − B, L, K] where recorded: the last token of every sequence has no route. L counts MoE layers
- ``route_checksums`` [S − B] and ``route_layer_checksums`` [B, L] int64: see megatron_rl/routing/payload.py

JSON: ``format_version``, ``step``, ``policy_version`` (optimizer steps before this batch), ``kept`` (it is not deleted
for its age), ``minibatches``, ``metrics`` of the step, ``parts`` with the SHA-256 of each file, which `load_batch`
compares, and per sequence ``id``, ``prompt_length``, ``advantage``, ``reward``.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from megatron_rl.errors import InputError, shown
from megatron_rl.process.host import write_whole
from megatron_rl.process.ranks import gather_objects, world_rank
from megatron_rl.process.run_files import UNFIT, read_json
from megatron_rl.types import MAX_LOGPROB, SCORED_ARRAYS, SET_ARRAYS, Batch, Rollout

FORMAT_VERSION = 3
T = TypeVar("T")
_STEP_FILE = re.compile(r"step_(\d{8,})\.json")
_LIKE = {"kept": True, "parts": [{"sequences": [0]}], "minibatches": [[0]], "sequences": [{"id": ""}], "metrics": {}}
_LOGPROBS = ("inference_logprobs", "old_logprobs", "current_logprobs", *SCORED_ARRAYS)
_PER_TOKEN = (*_LOGPROBS, "policy_versions")


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
    """Write ``batch``: each rank the sequences that it speaks for (`Rollout.holder`), rank 0 those that all hold and
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
    """Protect the step's batch from `delete_batch`."""
    path = batch_path(folder, step)
    write_whole(path, json.dumps(read_description(path) | {"kept": True}))


def batch_bytes(folder: Path, step: int) -> int:
    """The size of all files of a step's batch."""
    path = batch_path(folder, step)
    return sum(file.stat().st_size for file in (path, *path.parent.glob(f"{path.stem}.*safetensors")))


def parts_of(path: Path, described: dict[str, Any]) -> list[Path]:
    """The files of a batch's arrays."""
    return [path.with_name(part["file"]) for part in described.get("parts", [])]


def _arrays(sequences: list[Rollout]) -> dict[str, np.ndarray]:
    arrays = {
        "tokens": np.concatenate([s.whole for s in sequences]),
        "cu_seqlens": np.cumsum([0, *(s.whole_length for s in sequences)]),
        "cu_response": np.cumsum([0, *(s.length for s in sequences)]),
    }
    for name in (*_PER_TOKEN, "loss_mask", *SET_ARRAYS, "routed_experts"):
        values = [getattr(s, name) for s in sequences]
        if all(value is not None for value in values):
            arrays[name] = np.ascontiguousarray(np.concatenate(values))
    if "routed_experts" in arrays:
        checksums = [np.split(s.route_checksums, [s.whole_length - 1]) for s in sequences]
        arrays["route_checksums"] = np.concatenate([rows for rows, _ in checksums])
        arrays["route_layer_checksums"] = np.stack([layers for _, layers in checksums])
    return arrays


def load_batch(path: Path, with_routes: bool = True) -> RecordedBatch:
    """The inverse of `record_batch`. InputError where a file is missing, of another format version, or was altered.

    Without routes, which may be larger than all the rest, digests are not compared.
    """
    if not path.is_file():
        steps = recorded_steps(path.parent)
        raise InputError(
            f"recorded batch {path}: no such file; recorded steps: {', '.join(map(str, steps)) or 'none'} "
            "(recorder.record_batches says which are kept)"
        )
    try:
        return _load(path, json.loads(path.read_text()), with_routes)
    except InputError:
        raise
    except (*UNFIT, SafetensorError, OSError) as error:
        raise InputError(
            f"recorded batch {path}: altered or damaged ({type(error).__name__}: {shown(error)}); copy it again"
        ) from error


def _load(path: Path, described: dict[str, Any], with_routes: bool) -> RecordedBatch:
    if described.get("format_version") != FORMAT_VERSION:
        raise InputError(
            f"recorded batch {path}: format_version {shown(described.get('format_version'), 60)}, this version reads "
            f"{FORMAT_VERSION}"
        )
    abouts = described["sequences"]
    sequences: list[Any] = [None] * len(abouts)
    parts = described["parts"]
    numbers = [part["sequences"] for part in parts]
    if sorted(i for its in numbers for i in its) != list(range(len(abouts))):
        raise ValueError(f"its parts do not hold each of {len(abouts)} sequences once")
    minibatches = described["minibatches"]
    if sorted(i for indices in minibatches for i in indices) != list(range(len(abouts))):
        raise ValueError(f"its mini-batches do not hold each of {len(abouts)} sequences once")
    for file, its, part in zip(parts_of(path, described), numbers, parts, strict=True):
        if not file.is_file():
            raise InputError(f"recorded batch {path}: its part {file.name} is missing; was the folder copied whole?")
        if with_routes and part.get("sha256") not in (None, _digest(file)):
            raise ValueError(f"{file.name} is not the file that was recorded: its SHA-256 is another")
        with safe_open(file, "numpy") as stored_arrays:
            names = [name for name in stored_arrays.keys() if with_routes or not name.startswith("route")]  # noqa: SIM118
            arrays = {name: stored_arrays.get_tensor(name) for name in names}
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
    names = [name for name in (*_PER_TOKEN, "loss_mask") if name in arrays]
    due = {"tokens": ends[-1]} | dict.fromkeys(names, responses[-1])
    for name, count in due.items():
        if arrays[name].shape != (count,):
            raise ValueError(f"{name} has the shape {arrays[name].shape}, expected ({count},)")
    for name in (name for name in SET_ARRAYS if name in arrays):
        if (arrays[name].ndim, len(arrays[name])) != (2, responses[-1]):
            raise ValueError(f"{name} has the shape {arrays[name].shape}, expected ({responses[-1]}, …)")
    of_head = arrays.get("head_tokens", arrays.get("kept_tokens"))
    owners = {"head_logprobs": of_head, "teacher_set_logprobs": arrays.get("teacher_tokens", of_head)}
    for name, tokens in owners.items():
        if name in arrays and (tokens is None or tokens.shape != arrays[name].shape):
            raise ValueError(f"{name} has another shape than the tokens that it belongs to")
    for name in (*_LOGPROBS, *owners):
        if name in arrays and (arrays[name] > MAX_LOGPROB).any():  # NaN is what an alarm may have recorded
            raise ValueError(f"{name} holds a value that is not a log-prob")
    if (arrays["tokens"] < 0).any():
        raise ValueError("tokens holds a negative number")


def _sequence(arrays: dict[str, np.ndarray], i: int, about: dict) -> Rollout:
    whole = slice(arrays["cu_seqlens"][i], arrays["cu_seqlens"][i + 1])
    response = slice(arrays["cu_response"][i], arrays["cu_response"][i + 1])
    rows = slice(whole.start - i, whole.stop - i - 1)
    fields = {name: arrays[name][response] for name in (*_PER_TOKEN, *SET_ARRAYS) if name in arrays}
    if "routed_experts" in arrays:
        fields["routed_experts"] = arrays["routed_experts"][rows]
        fields["route_checksums"] = np.concatenate(
            [arrays["route_checksums"][rows], arrays["route_layer_checksums"][i]]
        )
    content, end = arrays["tokens"][whole].astype(np.int32), about["prompt_length"]
    kept = {name: about[name] for name in ("id", "advantage", "reward")}
    mask = arrays["loss_mask"][response]
    return Rollout(prompt=content[:end], tokens=content[end:], sampled=mask, **kept, **fields)
