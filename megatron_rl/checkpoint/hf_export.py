"""Writing a Hugging Face checkpoint from a stream of tensors, one file's worth in memory at a time."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file

from megatron_rl.process.ranks import together, world_rank

FILE_BYTES = 4 * 2**30  # largest file, as the hub's tools write them
_WEIGHT_FILES = (".safetensors", ".safetensors.index.json", ".bin", ".pt")


def write_hf_checkpoint(
    folder: Path, weights: Iterable[tuple[str, torch.Tensor]], source: Path, file_bytes: int = FILE_BYTES
) -> None:
    """Write ``weights`` to ``folder`` beside the configuration and tokenizer files of ``source``.

    Every rank calls it, because streaming the weights is collective; rank 0 writes, and needs memory for three times
    ``file_bytes``, the largest file. Raises `Fault` on every rank where rank 0 could not write.
    """
    stream = iter(weights)

    def write() -> None:
        try:
            if world_rank() == 0:
                _write(folder, stream, source, file_bytes)
        finally:
            for _ in stream:  # the other ranks are in the middle of the stream, even if rank 0's disk is full
                pass

    together(f"the Hugging Face checkpoint {folder} could not be written", write)


def _write(folder: Path, weights: Iterator[tuple[str, torch.Tensor]], source: Path, file_bytes: int) -> None:
    copy_companions(source, folder, leave_out=("README.md",))  # a model card speaks of other weights
    weight_map: dict[str, str] = {}
    total_size = 0
    dtypes: set[torch.dtype] = set()
    for number, tensors in enumerate(_in_files(weights, file_bytes), start=1):
        name = f"model-{number:05d}.safetensors"
        save_file(tensors, folder / name, metadata={"format": "pt"})
        (folder / name).chmod(_usual_mode())  # safetensors makes files that their owner alone can read
        weight_map |= dict.fromkeys(tensors, name)
        total_size += sum(tensor.nbytes for tensor in tensors.values())
        dtypes |= {tensor.dtype for tensor in tensors.values()}
    index = {"metadata": {"total_size": total_size}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    if len(dtypes) == 1:
        _state_dtype(folder / "config.json", dtypes.pop())


def _usual_mode() -> int:
    """The mode that new files get here."""
    umask = os.umask(0)
    os.umask(umask)
    return 0o666 & ~umask


def _state_dtype(file: Path, dtype: torch.dtype) -> None:
    """Write the dtype of the weights into config.json: readers that follow it would silently round them otherwise."""
    config = json.loads(file.read_text())
    # transformers 5 writes `dtype`, earlier releases `torch_dtype`; both read the latter.
    for key in [key for key in ("dtype", "torch_dtype") if key in config] or ["torch_dtype"]:
        config[key] = str(dtype).removeprefix("torch.")
    file.write_text(json.dumps(config, indent=2) + "\n")


def copy_companions(source: Path, folder: Path, leave_out: Collection[str] = ()) -> None:
    """Copy what belongs to a checkpoint besides its weights: configuration, tokenizer, licence."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in Path(source).iterdir():
        if file.is_file() and not file.name.endswith(_WEIGHT_FILES) and file.name not in leave_out:
            shutil.copy2(file, folder / file.name)


def _in_files(weights: Iterable[tuple[str, torch.Tensor]], file_bytes: int) -> Iterator[dict[str, torch.Tensor]]:
    tensors: dict[str, torch.Tensor] = {}
    num_bytes = 0
    for name, tensor in weights:
        if tensors and num_bytes + tensor.nbytes > file_bytes:
            yield tensors
            tensors, num_bytes = {}, 0
        tensors[name] = tensor.detach().cpu().clone()  # a copy: exported tensors may share memory with the model
        num_bytes += tensor.nbytes
    if tensors:
        yield tensors
