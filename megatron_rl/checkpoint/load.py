"""Reads checkpoints: each rank reads the shards of its own layout, whichever layout wrote them.

A checkpoint from elsewhere is data: loading it runs no code from it. Megatron's distributed format has pickles in it:
the index (``.metadata``), which torch reads with plain `pickle`, and files that torch reads with or without
restrictions, depending on who calls.
"""

from __future__ import annotations

import contextlib
import enum
import json
import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.utils import unwrap_model

from megatron_rl.checkpoint import manifest
from megatron_rl.checkpoint.manifest import TRAINER_FILE
from megatron_rl.checkpoint.sharded import (
    allocate_moments,
    keep_loaded,
    load_optimizer_settings,
    optimizer_slices,
    sharded_weights,
)
from megatron_rl.errors import InputError
from megatron_rl.model.names import EXTRA_STATE
from megatron_rl.process.ranks import broadcast_object, gather_objects, world_rank, world_size

INDEX_FILE = ".metadata"


@contextlib.contextmanager
def no_foreign_code(path: Path) -> Iterator[None]:
    """While this context is open, loading ``path`` runs no code from it.

    The index is read once by a reader that knows a few classes. Whatever torch unpickles is restricted to tensors and
    plain values.
    """
    with (path / INDEX_FILE).open("rb") as index:
        _IndexReader(index).load()
    name = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    except pickle.UnpicklingError as error:
        reason = next((line for line in str(error).splitlines() if "nsupported" in line), str(error).splitlines()[0])
        raise InputError(f"checkpoint {path}: holds more than tensors and plain values: {reason.strip()}") from error
    finally:
        os.environ.pop(name) if before is None else os.environ.update({name: before})


class _IndexReader(pickle.Unpickler):
    """Reads the index of a checkpoint, which torch pickles, and no other class.

    A pickle may call what it names and set its attributes: `dataclass` on a class whose annotations it has set compiles
    them. So of a module only the classes that it defines are allowed, not the modules and functions that it imports.
    """

    _MODULES = ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.planner")
    _NAMES = (
        ("torch", "Size"),
        ("torch.serialization", "_get_layout"),
        ("collections", "OrderedDict"),
        ("pathlib", "PosixPath"),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        ("torch.distributed.checkpoint.filesystem", "_StoragePrefix"),
    )

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _enum_member
        is_type = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype | torch.memory_format)
        if is_type or (module, name) in self._NAMES:
            return super().find_class(module, name)
        if module in self._MODULES and "." not in name:
            loaded = super().find_class(module, name)
            if isinstance(loaded, type) and loaded.__module__ == module:
                return loaded
        raise InputError(f"the checkpoint's index names {module}.{name}, which no run writes; it is not loaded")


def _enum_member(owner: Any, name: str) -> Any:
    """Replaces `getattr`: Python before 3.11.4 pickles the members of an enumeration as calls of it."""
    if isinstance(owner, type) and issubclass(owner, enum.Enum) and name in owner.__members__:
        return owner[name]
    raise InputError(f"the checkpoint's index takes {name!r} of {owner!r}, which no run writes; it is not loaded")


WEIGHTS_FILE = "weights.json"  # marks a folder with weights alone, as `conversion.to_megatron` writes it


def load_checkpoint(path: Path, model: GPTModel, optimizer: MegatronOptimizer, verify: bool = True) -> dict[str, Any]:
    """Fill model and optimizer from ``path``, written under any layout; returns the trainer state. Collective.

    Tensors are read into place: a rank's own weights, and of the optimizer what it owns.

    ``verify``: compare every file with the hashes of the manifest first. Raises `InputError` where the checkpoint is
    not whole, or holds a pickle of anything but Megatron's and torch's descriptions of tensors.
    """
    path = Path(path)
    if verify and (problem := damage(path)):
        raise InputError(f"checkpoint {path}: {problem}; expected a complete folder step_…, as a run writes it")
    with no_foreign_code(path):
        load_optimizer_settings(optimizer, dist_checkpointing.load_common_state_dict(str(path))["optimizer"])
        allocate_moments(optimizer)
        weights = sharded_weights(model)
        slices = dict(enumerate(optimizer_slices(optimizer, weights)))
        state = _load({"model": _without_extra_state(weights), "slices": slices}, path)
    _fill(model, state["model"])
    keep_loaded(optimizer)
    return json.loads((path / TRAINER_FILE).read_text())


def load_weights(path: Path, model: GPTModel, optimizer: MegatronOptimizer | None = None) -> None:
    """Fill ``model`` from the weights in ``path``, written under any layout; the optimizer's masters follow.

    Collective. Raises `InputError` where ``path`` has a manifest of `conversion.to_megatron` and differs from it.
    """
    has_manifest = all((Path(path) / name).is_file() for name in (WEIGHTS_FILE, manifest.MANIFEST_FILE))
    if has_manifest and (problem := damage(Path(path), WEIGHTS_FILE)):
        raise InputError(f"checkpoint {path}: {problem}; write it again with to-megatron")
    with no_foreign_code(Path(path)):
        state = _load({"model": _without_extra_state(sharded_weights(model))}, path)
    _fill(model, state["model"])
    if optimizer is not None:
        optimizer.reload_model_params()


def damage(path: Path, marker: str = TRAINER_FILE) -> str | None:
    """Why the checkpoint ``path`` cannot be trusted, from sizes, then hashes; None where it is whole.

    ``marker``: see `manifest.incomplete`. Collective: each rank reads its share of the files, and all return the same.
    """
    problem = broadcast_object(manifest.incomplete(path, marker) if world_rank() == 0 else None)
    if problem is None:
        shares = gather_objects(manifest.altered_files(path, world_rank(), world_size(), marker))
        problem = next((problem for share in shares for problem in share), None)
    return problem


def _load(wanted: dict[str, Any], path: Path) -> dict[str, Any]:
    # Megatron's check of what is asked for gathers all ranks' descriptions on every rank. That every part of a tensor
    # was written, the save has made sure of.
    return dist_checkpointing.load(wanted, str(path), validate_access_integrity=False)


def _without_extra_state(weights: dict[str, Any]) -> dict[str, Any]:
    """The tensors alone. The states of FP8, which nothing here uses, are empty, and each kind of layer has others:
    TransformerEngine's norms want one that Megatron's own norms do not write."""
    return {name: tensor for name, tensor in weights.items() if EXTRA_STATE not in name}


def _fill(model: GPTModel, tensors: dict[str, Any]) -> None:
    """Load ``tensors``, all of the model's and no others; `RuntimeError` names those that differ."""
    result = unwrap_model(model).load_state_dict(tensors, strict=False)
    missing = [name for name in result.missing_keys if EXTRA_STATE not in name]
    if missing or result.unexpected_keys:
        raise RuntimeError(f"the checkpoint lacks {missing} and has {list(result.unexpected_keys)} beside the model's")
