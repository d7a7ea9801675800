"""Checkpoints between Hugging Face and Megatron on disk, one tensor at a time: no model, no ranks.

A run's checkpoint holds the whole of every tensor under a name of its own, in boxes that many ranks wrote, whatever
their layout (`CONTENT_METADATA`); Megatron shards while it loads. So a conversion is a table of names. Arithmetic is
needed for the padded vocabulary and what `fused` cuts apart alone. Both directions hold one entry of the table in
memory, or a layer's experts of gpt-oss, and the safetensors file being written.
"""

from __future__ import annotations

import hashlib
import io
import json
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.strategies.cached_metadata_filesystem_reader import CachedMetadataFileSystemReader
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from megatron_rl.checkpoint import manifest
from megatron_rl.checkpoint.fused import join_qkv, put_together, split_qkv, take_apart
from megatron_rl.checkpoint.hf_folder import (
    SHOWN,
    HFFolder,
    Sampling,
    check_weights,
    copy_companions,
    some,
    write_hf_checkpoint,
)
from megatron_rl.checkpoint.manifest import MANIFEST_FILE, TRAINER_FILE, partial_path
from megatron_rl.checkpoint.save import INDEX_FILE, WEIGHTS_FILE, no_foreign_code
from megatron_rl.checkpoint.shards import CONTENT_METADATA
from megatron_rl.errors import InputError
from megatron_rl.model.architecture import Architecture, read_architecture
from megatron_rl.model.names import EXTRA_STATE, Stored, extra_states, stored_tensors

HF_FOLDER = "hf"  # below a Megatron folder that `to_megatron` wrote: config.json and tokenizer of the source
MASTER_PREFIX = "optimizer.state.param."  # of the fp32 master weights in a run's checkpoint
_COMMON_FILE = "common.pt"
_OPTIMIZER_PREFIX = "optimizer."
FILE_BYTES = 2**30  # of a safetensors file; writing one takes three times that in memory (measured)

Weights = Iterator[tuple[str, torch.Tensor]]


class MegatronFolder:
    """Tensors by key from a checkpoint in Megatron's distributed format, read on demand by one process.

    Raises `InputError` where ``path`` is no checkpoint, or its index holds anything but descriptions of tensors.
    """

    def __init__(self, path: Path):
        if not (path / INDEX_FILE).is_file():
            raise InputError(
                f"{path}: no file {INDEX_FILE} in it; expected a run's checkpoint (a folder step_…) or what "
                "to-megatron wrote"
            )
        self.path = path
        self.reader = CachedMetadataFileSystemReader(path)
        with no_foreign_code(path):
            metadata = self.reader.read_metadata().state_dict_metadata  # kept, so that the index is read once
        self.tensors = {key: meta for key, meta in metadata.items() if isinstance(meta, TensorStorageMetadata)}

    def check(self, a: Architecture, prefix: str = "") -> None:
        """Raise `InputError` unless the weights below ``prefix`` are exactly those of ``a``."""
        expected = {_key(entry, prefix): entry for entry in stored_tensors(a)}
        problems = []
        if missing := [key for key in expected if key not in self.tensors]:
            problems.append(f"lacks {some(missing)}")
        if any(".lora_" in key for key in self.tensors):
            raise InputError(
                f"{self.path}: holds adapters (learner.lora) beside the weights; a run with checkpoint.export_hf adds "
                "them up in its checkpoints/hf. To get it, train on from this checkpoint with --set "
                "checkpoint.export_hf=true"
            )
        others = [k for k in self.tensors if k not in expected and not k.startswith(_OPTIMIZER_PREFIX)]
        if others and not prefix:
            problems.append(f"holds tensors that this architecture has no place for: {some(others)}")
        for key, entry in expected.items():
            if key in self.tensors:
                shape = tuple(self.tensors[key].size)
                # Rows are padded to what the layout that wrote it could share evenly.
                fits = shape[0] >= entry.shape[0] and shape[1:] == entry.shape[1:]
                if shape != entry.shape and not (entry.sharding == "vocab" and fits):
                    problems.append(f"{key} has shape {shape}, config.json says {entry.shape}")
        if problems:
            raise InputError(
                f"{self.path}: does not hold the weights of a {a.model_type} as config.json describes it: "
                f"{'; '.join(problems[:SHOWN])}. Is it the config.json of the model that the run started from?"
            )

    def __call__(self, key: str) -> torch.Tensor:
        meta = self.tensors[key]
        tensor = torch.empty(meta.size, dtype=meta.properties.dtype)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a warning that there is no process group, which is intended
            # Flattened, each call would compare all names of the checkpoint: 11 ms instead of 1 with 72,000.
            planner = DefaultLoadPlanner(flatten_state_dict=False)
            dcp.load({key: tensor}, storage_reader=self.reader, planner=planner, no_dist=True)
        return tensor

    def hf_weights(self, a: Architecture, prefix: str = "", dtype: torch.dtype | None = None) -> Weights:
        """Yield ``(Hugging Face name, tensor)`` of every weight, rounded to ``dtype`` (None: as stored)."""
        held: list[torch.Tensor] = []  # what belongs to the same tensors of Hugging Face
        for entry in stored_tensors(a):
            tensor = self(_key(entry, prefix))
            tensor = tensor if dtype is None or entry.in_fp32 else tensor.to(dtype)
            if entry.part is not None:
                held.append(tensor)
            if not entry.is_last:
                continue
            if entry.sharding in ("qkv", "packed_qkv"):
                parts = split_qkv(tensor, a)
                parts = parts if entry.sharding == "qkv" else [torch.cat(parts)]
            elif held:
                parts, held = put_together(entry.sharding, held, a), []
            elif entry.sharding == "transposed":
                parts = [tensor.t().contiguous()]
            else:
                parts = [tensor[: entry.shape[0]] if entry.sharding == "vocab" else tensor]
            yield from zip(entry.hf_names, parts, strict=True)

    def num_bytes(self, a: Architecture, prefix: str, dtype: torch.dtype | None) -> int:
        stored = ((entry, self.tensors[_key(entry, prefix)].properties.dtype) for entry in stored_tensors(a))
        return sum(_numel(entry.shape) * (dtype or own).itemsize for entry, own in stored)


def to_hf(
    source: Path,
    target: Path,
    model: Path,
    *,
    dtype: torch.dtype | None = None,
    master: bool = False,
    sampling: Sampling | None = None,
) -> dict[str, str]:
    """Write the weights of the Megatron checkpoint ``source`` to ``target`` in Hugging Face layout.

    Args:
        model: folder with the config.json and tokenizer that belong to them.
        dtype: what to round to; None: as stored.
        master: take the optimizer's fp32 master weights instead of the model's own.
        sampling: of the run that wrote it.

    Returns:
        SHA-256 by Hugging Face name of what was read; what was written has been compared with it.

    Raises:
        InputError: wrong, incomplete or altered source, target exists, disk too small.
    """
    check_whole(source)
    a, folder, prefix = read_architecture(model), MegatronFolder(source), MASTER_PREFIX if master else ""
    if master and not any(key.startswith(MASTER_PREFIX) for key in folder.tensors):
        raise InputError(f"{source}: holds no master weights (an fp32 run keeps none); leave --master out")
    folder.check(a, prefix)
    partial = _prepare(target, folder.num_bytes(a, prefix, dtype))
    digests: dict[str, str] = {}
    write_hf_checkpoint(partial, _tapped(folder.hf_weights(a, prefix, dtype), digests), model, FILE_BYTES, sampling)
    verify("written", HFFolder(partial).items(), digests)
    partial.rename(target)
    return digests


def to_megatron(source: Path, target: Path, *, dtype: torch.dtype | None = None) -> dict[str, str]:
    """Write the Hugging Face checkpoint ``source`` to ``target`` in the format of a run's checkpoint, weights only.

    Any layout loads it (`save.load_weights`). Arguments, result and errors as for `to_hf`.
    """
    a, folder = read_architecture(source), HFFolder(source)
    check_weights(folder, a)
    entries = {entry.key: entry for entry in stored_tensors(a)}
    digests: dict[str, str] = {}

    def type_of(entry: Stored) -> torch.dtype | None:
        return torch.float32 if entry.in_fp32 else dtype

    def read(key: str) -> torch.Tensor:
        entry = entries[key]
        wanted = type_of(entry)
        parts = [folder(name) if wanted is None else folder(name).to(wanted) for name in entry.hf_names]
        for name, part in zip(entry.hf_names, parts, strict=True):
            if name not in digests:  # one tensor may hold two entries
                digests[name] = digest(name, part)
        if entry.part is not None:
            return take_apart(entry.sharding, parts, a)[entry.part]
        if entry.sharding == "transposed":
            return parts[0].t()
        return join_qkv(parts, a) if entry.sharding in ("qkv", "packed_qkv") else parts[0]

    def placeholder(entry: Stored) -> torch.Tensor:
        return torch.empty(entry.shape, dtype=type_of(entry) or folder.dtype(entry.hf_names[0]), device="meta")

    placeholders: dict[str, Any] = {key: placeholder(entry) for key, entry in entries.items()}
    partial = _prepare(target, sum(tensor.nbytes for tensor in placeholders.values()))
    partial.mkdir(parents=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a warning that there is no process group, which is intended
        dcp.save(
            placeholders | {key: [None] for key in extra_states(a)},  # a list: one object for every shard
            storage_writer=dcp.FileSystemWriter(partial, thread_count=1),
            planner=_LazySave(read),
            no_dist=True,
        )
    torch.save({"content_metadata": CONTENT_METADATA}, partial / _COMMON_FILE)
    save_config(CheckpointingConfig("torch_dist", 1), str(partial))
    copy_companions(source, partial / HF_FOLDER)
    (partial / WEIGHTS_FILE).write_text(json.dumps({"architecture": a.model_type, "digest": total(digests)}) + "\n")
    names = [path.name for path in partial.iterdir() if path.is_file()]
    manifest.write_manifest(partial, manifest.hash_files(partial, names))
    verify("written", MegatronFolder(partial).hf_weights(a), digests)
    partial.rename(target)
    return digests


def _key(entry: Stored, prefix: str) -> str:
    """On disk; ``prefix``: of master weights, which buffers do not have."""
    return entry.key if entry.is_buffer else prefix + entry.key


class _LazySave(DefaultSavePlanner):
    """Saves what ``read`` returns for a key, called when the tensor is written; the state dict holds shapes."""

    def __init__(self, read: Callable[[str], torch.Tensor]):
        super().__init__(flatten_state_dict=False)
        self.read = read

    def resolve_data(self, write_item: Any) -> torch.Tensor | io.BytesIO:
        key = write_item.index.fqn
        return super().resolve_data(write_item) if EXTRA_STATE in key else self.read(key).contiguous()


# -- proof


def check_whole(source: Path) -> None:
    """Raise `InputError` where the files of ``source`` are not those that its manifest lists.

    What a run wrote must have a manifest. Folders of other programs, and of `to_megatron` where it wrote none, pass.
    """
    marker = TRAINER_FILE if (source / TRAINER_FILE).is_file() else WEIGHTS_FILE
    if marker == WEIGHTS_FILE and not (source / MANIFEST_FILE).is_file():
        return
    problems = manifest.incomplete(source, marker) or "; ".join(manifest.altered_files(source, marker=marker)[:SHOWN])
    if problems:
        raise InputError(
            f"{source}: {problems}; this checkpoint is not what was written. Take another one, or copy it again"
        )


def digest(name: str, tensor: torch.Tensor) -> str:
    """SHA-256 over name, dtype, shape and bytes."""
    hashed = hashlib.sha256(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
    hashed.update(tensor.contiguous().flatten().view(torch.uint8).numpy())
    return hashed.hexdigest()


def total(digests: dict[str, str]) -> str:
    """One hash of all tensors, whatever their order: equal for the same weights, however they are stored."""
    return hashlib.sha256("\n".join(digests[name] for name in sorted(digests)).encode()).hexdigest()


def verify(what: str, weights: Weights, expected: dict[str, str]) -> None:
    """Hash every tensor of ``weights`` again. Raises `InputError` naming those that are not as ``expected``."""
    digests = {name: digest(name, tensor) for name, tensor in weights}
    wrong = [name for name in expected.keys() | digests.keys() if expected.get(name) != digests.get(name)]
    if wrong:
        raise InputError(f"what was {what} differs from what was read: {some(sorted(wrong))}; is the disk sound?")


def _tapped(weights: Weights, digests: dict[str, str]) -> Weights:
    for name, tensor in weights:
        digests[name] = digest(name, tensor)
        yield name, tensor


def _prepare(target: Path, num_bytes: int) -> Path:
    """Where to write before the final name is given. Raises `InputError` where there is no room."""
    if target.exists():
        raise InputError(f"{target}: exists already; delete it or choose another name")
    partial = partial_path(target)
    shutil.rmtree(partial, ignore_errors=True)
    target.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(target.parent).free
    if free < num_bytes:
        raise InputError(
            f"{target}: needs {num_bytes / 2**30:.1f} GiB, {target.parent} has {free / 2**30:.1f} GiB free; "
            "choose another place, or a smaller --dtype"
        )
    return partial


def _numel(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()
