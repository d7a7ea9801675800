"""The one reader of checkpoints in Hugging Face layout: which files count, what they hold, which tokens end a response.

Learner, rollout engine and converter read a folder through `HFFolder`, so that all of them see the same tensors.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from megatron_rl.errors import InputError

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"


class HFFolder:
    """Tensors by name from the safetensors files of ``path``, opened once, read on demand.

    With an index only the files that it names count, each tensor from the file that the index gives for it. Without
    one, ``model.safetensors`` must be the only safetensors file. Raises `InputError` where a file is missing, damaged
    or ambiguous.
    """

    def __init__(self, path: Path):
        self.path = Path(path)
        index = self.path / INDEX_FILE
        self._file_of = self._read_index(index) if index.is_file() else self._read_single()

    def _read_index(self, index: Path) -> dict[str, str]:
        try:
            weight_map = json.loads(index.read_text())["weight_map"]
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(f"model.path: {index} is not an index of safetensors files ({error!r})") from error
        self._handles = {name: _open(self.path / name) for name in sorted(set(weight_map.values()))}
        held = {name: set(handle.keys()) for name, handle in self._handles.items()}
        lost = [tensor for tensor, name in weight_map.items() if tensor not in held[name]]
        if lost:
            raise InputError(f"model.path: {index} names {weight_map[lost[0]]} for {lost[0]}, which is not in it")
        return dict(weight_map)

    def _read_single(self) -> dict[str, str]:
        names = sorted(file.name for file in self.path.glob("*.safetensors"))
        if SINGLE_FILE not in names:
            raise InputError(f"model.path: {self.path} holds neither {SINGLE_FILE} nor {INDEX_FILE}")
        if others := [name for name in names if name != SINGLE_FILE]:
            raise InputError(
                f"model.path: {self.path} holds {SINGLE_FILE} and also {', '.join(others)}, and no {INDEX_FILE} says "
                "which of them count; move the others away"
            )
        self._handles = {SINGLE_FILE: _open(self.path / SINGLE_FILE)}
        return dict.fromkeys(self._handles[SINGLE_FILE].keys(), SINGLE_FILE)

    @property
    def names(self) -> list[str]:
        """Names of all tensors."""
        return list(self._file_of)

    @property
    def files(self) -> list[Path]:
        """The safetensors files that count."""
        return [self.path / name for name in self._handles]

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def __call__(self, name: str) -> torch.Tensor:
        """The tensor ``name``, read now. Raises `InputError` where there is none."""
        return self._handle(name).get_tensor(name)

    def shape(self, name: str) -> tuple[int, ...]:
        """From the header of its file; the tensor is not read."""
        return tuple(self._handle(name).get_slice(name).get_shape())

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name → shape of every tensor; none is read."""
        return {name: self.shape(name) for name in self._file_of}

    def dtype(self, name: str) -> torch.dtype:
        return self._handle(name).get_slice(name)[:0].dtype

    def items(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor, one at a time, file by file."""
        for name in sorted(self._file_of, key=lambda name: self._file_of[name]):
            yield name, self(name)

    def _handle(self, name: str) -> safe_open:
        if name not in self._file_of:
            raise InputError(f"model.path: the checkpoint in {self.path} has no tensor {name}; is it complete?")
        return self._handles[self._file_of[name]]


def _open(file: Path) -> safe_open:
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        raise InputError(f"model.path: {file} cannot be read ({error}); is the download complete?") from error


def read_stop_token_ids(folder: Path) -> list[int]:
    """``eos_token_id`` of generation_config.json, else of config.json. Raises `InputError` where neither has one."""
    for name in ("generation_config.json", "config.json"):
        file = folder / name
        eos = json.loads(file.read_text()).get("eos_token_id") if file.is_file() else None
        if eos is not None:
            return eos if isinstance(eos, list) else [eos]
    raise InputError(f"model.path: {folder} names no eos_token_id; give rollout.stop_token_ids")


def resolve_stop_token_ids(wanted: list[int] | None, folder: Path) -> list[int]:
    """What ends a response: ``wanted`` (`rollout.stop_token_ids`), or where that is None, what the checkpoint names."""
    return read_stop_token_ids(folder) if wanted is None else wanted
