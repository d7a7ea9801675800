"""Reading checkpoints: each rank reads the shards of its own layout, whichever layout wrote them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megatron.core import dist_checkpointing
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.utils import unwrap_model

from megatron_rl.checkpoint import manifest
from megatron_rl.checkpoint.foreign import no_foreign_code
from megatron_rl.checkpoint.manifest import TRAINER_FILE
from megatron_rl.checkpoint.names import EXTRA_STATE
from megatron_rl.checkpoint.sharded import (
    allocate_moments,
    keep_loaded,
    load_optimizer_settings,
    optimizer_slices,
    sharded_weights,
)
from megatron_rl.errors import InputError
from megatron_rl.process.ranks import broadcast_object, gather_objects, world_rank, world_size

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
    found = unwrap_model(model).load_state_dict(tensors, strict=False)
    missing = [name for name in found.missing_keys if EXTRA_STATE not in name]
    if missing or found.unexpected_keys:
        raise RuntimeError(f"the checkpoint lacks {missing} and has {list(found.unexpected_keys)} beside the model's")
