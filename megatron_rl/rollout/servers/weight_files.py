"""A policy's weights on their way to servers: safetensors files in a folder that both sides see.

Tensors are written in the dtype that the learner exports; servers convert them as the in-process engine does, so that
nothing is rounded twice. A file holds as many as fit in its size, so that no rank needs the whole model in memory.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors.torch import save_file

from megatron_rl.rollout.servers.client import Weights

FILE_BYTES = 2 << 30


class WeightFolder:
    """What was written to ``root``, one folder for each time; ``root`` is emptied at the start and at the end."""

    def __init__(self, root: Path) -> None:
        self.root, self._written = root, 0
        shutil.rmtree(root, ignore_errors=True)
        root.mkdir(parents=True)

    def write(self, tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> Weights:
        """Put all ``tensors`` on disk. A version may come twice, after an update that was skipped."""
        self._written += 1
        folder = self.root / f"{self._written:06d}_version_{version}"
        folder.mkdir()
        files: list[str] = []
        part: dict[str, torch.Tensor] = {}
        size = 0

        def flush() -> None:
            nonlocal part, size
            path = folder / f"part_{len(files):04d}.safetensors"
            save_file(part, path)
            files.append(str(path.resolve()))
            part, size = {}, 0

        for name, tensor in tensors:
            # A copy: exported tensors may be views of one buffer that the next one overwrites.
            part[name] = tensor.detach().to("cpu", copy=True).contiguous()
            size += part[name].nbytes
            if size >= FILE_BYTES:
                flush()
        if part:
            flush()
        return Weights(version, tuple(files))

    def remove_before(self, weights: Weights) -> None:
        """Remove what was written before ``weights``: no server is given it any more. Later ones may wait already."""
        first = Path(weights.files[0]).parent.name
        for folder in self.root.iterdir():
            if folder.name < first:
                shutil.rmtree(folder, ignore_errors=True)

    def close(self) -> None:
        shutil.rmtree(self.root, ignore_errors=True)
