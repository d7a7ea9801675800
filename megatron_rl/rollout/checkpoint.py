"""What a Hugging Face checkpoint holds, read from the headers of its files."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from safetensors import safe_open

from megatron_rl.errors import InputError
from megatron_rl.rollout.generator import RolloutError


def checkpoint_files(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint: those of its index, or the single one."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return [folder / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
    files = [folder / "model.safetensors"]
    if not files[0].is_file():
        raise InputError(f"model.path: {folder} holds neither model.safetensors nor model.safetensors.index.json")
    return files


def checkpoint_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Name → shape of every tensor, without reading the tensors."""
    shapes = {}
    for file in checkpoint_files(folder):
        with safe_open(file, "pt") as tensors:
            shapes |= {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
    return shapes


def checkpoint_tensors(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor, one at a time."""
    for file in checkpoint_files(folder):
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - not a mapping
                yield name, tensors.get_tensor(name)


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


def checked(
    weights: Iterable[tuple[str, torch.Tensor]], shapes: dict[str, tuple[int, ...]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Pass ``weights`` on, and raise `RolloutError` unless they are exactly the tensors of ``shapes``.

    vLLM keeps the old weights of a layer that no tensor arrives for and only warns, which would let generation drift
    from the learner unseen. Tied models may send `lm_head.weight` too.
    """
    seen: set[str] = set()
    for name, tensor in weights:
        if name in seen:
            raise RolloutError(f"weight update: {name} was sent twice")
        if name not in shapes and name != "lm_head.weight":
            raise RolloutError(f"weight update: {name} is not in the engine's checkpoint")
        if tuple(tensor.shape) != shapes.get(name, tuple(tensor.shape)):
            raise RolloutError(
                f"weight update: {name} has shape {tuple(tensor.shape)}, the engine expects {shapes[name]}"
            )
        seen.add(name)
        yield name, tensor
    missing = sorted(set(shapes) - seen)
    if missing:
        raise RolloutError(f"weight update: {len(missing)} of {len(shapes)} tensors were not sent, first {missing[:3]}")
