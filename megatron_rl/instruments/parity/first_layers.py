"""A model cut down to its first layers, at full width: a folder that every engine reads like any other."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

from megatron_rl.checkpoint.hf_folder import HFFolder, check_weights, model_shapes, model_weights, write_hf_checkpoint
from megatron_rl.errors import InputError
from megatron_rl.instruments.parity.memory import GIB
from megatron_rl.model.architecture import Architecture, read_architecture, read_object
from megatron_rl.process.ranks import world_rank


def first_layers_of(a: Architecture, num_layers: int) -> Architecture:
    """The shape of the first layers of ``a``. Raises `InputError` where there are fewer, or none has experts."""
    fewest = fewest_layers(a)
    if not fewest <= num_layers <= a.num_layers:
        why = f": layer {fewest - 1} is the first with experts" if fewest > 1 else ""
        raise InputError(
            f"parity: --layers {num_layers}: the model has {a.num_layers} layers; {fewest} … {a.num_layers} are "
            f"allowed{why}"
        )
    return replace(a, num_layers=num_layers, moe_layers=a.moe_layers[:num_layers], unused_layers=0)


def fewest_layers(a: Architecture) -> int:
    """So many that one has experts, if any has."""
    return a.moe_layers.index(True) + 1 if a.is_moe else 1


def write_first_layers(model: Path, num_layers: int, folder: Path) -> None:
    """Write the first ``num_layers`` layers of ``model`` to ``folder``, with embedding, last norm and head.

    Every rank calls it; the first one writes. Only the tensors that stay are read.
    """
    source = HFFolder(model)
    whole = read_architecture(model)
    check_weights(source, whole)
    cut = first_layers_of(whole, num_layers)
    shapes = model_shapes(cut)
    size = sum(math.prod(shape) * source.dtype(name).itemsize for name, shape in shapes.items())
    if (free := shutil.disk_usage(folder.parent).free) < size:
        raise InputError(
            f"parity: --layers {num_layers} writes {size / GIB:.1f} GiB below {folder.parent}, where {free / GIB:.1f} "
            "are free; name another folder with TMPDIR, or ask for fewer layers"
        )
    write_hf_checkpoint(folder, model_weights(source, cut), model)
    if world_rank() == 0:
        file = folder / "config.json"
        config = read_object(file) | {"num_hidden_layers": num_layers}
        if "num_nextn_predict_layers" in config:
            config["num_nextn_predict_layers"] = 0
        if config.get("layer_types"):
            config["layer_types"] = config["layer_types"][:num_layers]
        if config.get("mlp_only_layers"):
            config["mlp_only_layers"] = [layer for layer in config["mlp_only_layers"] if layer < num_layers]
        file.write_text(json.dumps(config, indent=2) + "\n")
