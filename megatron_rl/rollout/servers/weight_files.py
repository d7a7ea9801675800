"""A policy's weights on their way to servers: safetensors files in a folder that both sides see.

Tensors are written in the dtype that the learner exports; servers convert them as the in-process engine does, so that
nothing is rounded twice. A file holds as many as fit in its size, so that no rank needs the whole model in memory.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors.torch import save_file

from megatron_rl.errors import InputError
from megatron_rl.rollout.servers.client import Weights

FILE_BYTES = 2 << 30
MARKER = ".weights-of-run"
"""File in a run's folder of weights that names the run directory. A folder without it is never removed."""


class WeightFolder:
    """A run's own subfolder of ``parent``, with one folder for each write.

    The name holds a hash of ``run_dir``, so that several runs can share ``parent``. Whatever else ``parent`` holds is
    left alone. The subfolder of a run that was killed is removed when the run starts again; its lock ensures that no
    other process is using it. Raises `InputError` where ``parent`` cannot be used.
    """

    def __init__(self, parent: Path, run_dir: Path) -> None:
        run = str(run_dir.resolve())
        self._parent, self._made_parent, self._written = parent, not parent.exists(), 0
        self.root = parent / f"megatron_rl-{run_dir.name}-{hashlib.sha256(run.encode()).hexdigest()[:12]}"
        try:
            parent.mkdir(parents=True, exist_ok=True)
            self._remove_leftover(run)
            self.root.mkdir()
            (self.root / MARKER).write_text(run + "\n")
        except OSError as error:
            raise InputError(
                f"rollout.servers.weights_dir: {parent} cannot be used ({error}); name a folder that this run can "
                "write to, such as /dev/shm"
            ) from error

    def _remove_leftover(self, run: str) -> None:
        if not os.path.lexists(self.root):
            return
        marker = self.root / MARKER
        if self.root.is_symlink() or not marker.is_file() or marker.read_text().strip() != run:
            raise InputError(
                f"rollout.servers.weights_dir: {self.root} exists and was not made by this run; it is not touched. "
                "Move it away or name another folder"
            )
        shutil.rmtree(self.root)

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
            if folder.is_dir() and folder.name < first:
                shutil.rmtree(folder, ignore_errors=True)

    def close(self) -> None:
        """Remove the run's own subfolder, and ``parent`` where this object made it and nothing else is in it."""
        shutil.rmtree(self.root, ignore_errors=True)
        if self._made_parent:
            with contextlib.suppress(OSError):  # another run is using it, or it is gone
                self._parent.rmdir()
