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
- ``routed_experts`` [S − B, L, K] where recorded: the last token of every sequence has no route. L counts MoE layers
- ``route_checksums`` [S − B] and ``route_layer_checksums`` [B, L] int64: see megatron_rl/routing/checksum.py

JSON: ``format_version``, ``step``, ``policy_version`` (optimizer steps before this batch), ``kept`` (an alarm asked for
it), ``minibatches``, ``metrics`` of the step, ``parts``, and per sequence ``id``, ``prompt_length``, ``advantage``,
``reward``. Batches of format version 2 have one part and do not name it.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from megatron_rl.errors import InputError
from megatron_rl.process.ranks import gather_objects, world_rank
from megatron_rl.types import Batch, Sequence

FORMAT_VERSION, READABLE = 3, (2, 3)
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
    return sorted(int(path.stem.removeprefix("step_")) for path in Path(folder).glob("step_*.json"))


def record_batch(
    folder: Path, batch: Batch, policy_version: int, metrics: Mapping[str, float] | None = None, keep: bool = False
) -> Path:
    """Write ``batch``: each rank the sequences that it speaks for (`Sequence.holder`), rank 0 those that all hold and
    the JSON file, whose path is returned. Collective.

    ``keep``: `keep_newest` never deletes it. Raises OSError on every rank where a disk is full or gone; nothing of the
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

    def write_part() -> None:
        if rank in parts:
            save_file(_arrays([batch.sequences[i] for i in parts[rank]]), partial)
            os.replace(partial, path.with_name(names[rank]))

    def describe() -> None:
        if rank == 0:
            partial.write_text(json.dumps(described, indent=1))
            os.replace(partial, path)

    try:
        _all_ranks(lambda: _make_room(path) if rank == 0 else None)
        _all_ranks(write_part)
        _all_ranks(describe)
    except OSError:
        for rest in (partial, path.with_name(names.get(rank, partial.name))):
            rest.unlink(missing_ok=True)
        raise
    return path


def _part_name(path: Path, number: int, count: int) -> str:
    return f"{path.stem}.safetensors" if count == 1 else f"{path.stem}.{number:04d}.safetensors"


def _make_room(path: Path) -> None:
    """For a step recorded again: never an old description beside new arrays, nor parts of another layout."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    for part in path.parent.glob(f"{path.stem}.*safetensors"):
        part.unlink()


def _all_ranks(action: Callable[[], None]) -> None:
    """Run ``action`` on every rank; `OSError` on all where it failed on one."""
    problem = None
    try:
        action()
    except (OSError, SafetensorError) as error:  # safetensors has its own for what is the disk's fault
        problem = error
    texts = gather_objects(None if problem is None else str(problem))
    first = next((text for text in texts if text is not None), None)
    if first is not None:
        raise problem if isinstance(problem, OSError) else OSError(first) from problem


def keep_newest(folder: Path, number: int) -> None:
    """Delete all but the newest ``number`` batches and those that an alarm asked for (rank 0 does)."""
    if world_rank() != 0:
        return
    for step in recorded_steps(folder)[:-number]:
        path = batch_path(folder, step)
        described = json.loads(path.read_text())
        if not described["kept"]:
            path.unlink()
            for part in parts_of(path, described):
                part.unlink()


def parts_of(path: Path, described: dict[str, Any]) -> list[Path]:
    """The files of a batch's arrays."""
    return [path.with_name(part["file"]) for part in described.get("parts", [{"file": f"{path.stem}.safetensors"}])]


def _arrays(sequences: list[Sequence]) -> dict[str, np.ndarray]:
    arrays = {
        "tokens": np.concatenate([s.tokens for s in sequences]),
        "cu_seqlens": np.cumsum([0, *(s.length for s in sequences)]),
        "cu_response": np.cumsum([0, *(s.response_length for s in sequences)]),
    }
    for name in (*_PER_TOKEN, "routed_experts"):
        values = [getattr(s, name) for s in sequences]
        if all(value is not None for value in values):
            arrays[name] = np.ascontiguousarray(np.concatenate(values))
    if "routed_experts" in arrays:
        checksums = [np.split(s.route_checksums, [len(s.tokens) - 1]) for s in sequences]
        arrays["route_checksums"] = np.concatenate([rows for rows, _ in checksums])
        arrays["route_layer_checksums"] = np.stack([layers for _, layers in checksums])
    return arrays


def load_batch(path: Path) -> RecordedBatch:
    """The inverse of `record_batch`. InputError where the file is missing or of another format version."""
    if not path.is_file():
        steps = recorded_steps(path.parent)
        raise InputError(
            f"recorded batch {path}: no such file; recorded steps: {', '.join(map(str, steps)) or 'none'} "
            "(recorder.record_batches says which are kept)"
        )
    described = json.loads(path.read_text())
    if described.get("format_version") not in READABLE:
        raise InputError(
            f"recorded batch {path}: format_version {described.get('format_version')!r}, this version reads "
            f"{' and '.join(map(str, READABLE))}"
        )
    abouts = described["sequences"]
    sequences: list[Any] = [None] * len(abouts)
    numbers = [part["sequences"] for part in described.get("parts", [{"sequences": range(len(abouts))}])]
    for file, its in zip(parts_of(path, described), numbers, strict=True):
        if not file.is_file():
            raise InputError(f"recorded batch {path}: its part {file.name} is missing; was the folder copied whole?")
        arrays = load_file(file)
        for place, i in enumerate(its):
            sequences[i] = _sequence(arrays, place, abouts[i])
    batch = Batch(described["step"], sequences, described["minibatches"])
    return RecordedBatch(batch, described["policy_version"], described["metrics"])


def _sequence(arrays: dict[str, np.ndarray], i: int, about: dict) -> Sequence:
    whole = slice(arrays["cu_seqlens"][i], arrays["cu_seqlens"][i + 1])
    response = slice(arrays["cu_response"][i], arrays["cu_response"][i + 1])
    rows = slice(whole.start - i, whole.stop - i - 1)
    fields = {name: arrays[name][response] for name in _PER_TOKEN if name in arrays}
    if "routed_experts" in arrays:
        fields["routed_experts"] = arrays["routed_experts"][rows]
        fields["route_checksums"] = np.concatenate(
            [arrays["route_checksums"][rows], arrays["route_layer_checksums"][i]]
        )
    return Sequence(tokens=arrays["tokens"][whole], **about, **fields)
