"""Inside a server's worker processes: weights from files, checksums, and what the model computes in which type.

The trainer writes a policy's tensors to safetensors files that servers can read; here they are streamed into vLLM's
layerwise reload, by the same code as the in-process engine's (`worker_extension`), so that the result is the same bit
for bit. Importing this module registers the transfer backend and the fp32 router.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import safe_open
from vllm.distributed.weight_transfer.base import WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

from megatron_rl.checkpoint.hf_folder import HFFolder
from megatron_rl.rollout import worker_extension
from megatron_rl.rollout.checksums import parameter_checksums
from megatron_rl.rollout.fp32_modules import describe_model
from megatron_rl.rollout.worker_extension import StreamUpdate, StreamWeightTransfer

BACKEND = "megatron_rl_files"


@dataclass
class FileUpdate(WeightTransferUpdateInfo):
    """``files``: files with all tensors of one policy; empty: the checkpoint that the server started from."""

    files: list[str] = field(default_factory=list)


class FileWeightTransfer(StreamWeightTransfer):
    """Loads all tensors of some files."""

    update_info_cls = FileUpdate

    @torch.no_grad()
    def receive_weights(self, update_info: FileUpdate) -> None:
        files = update_info.files or HFFolder(Path(self.model_config.model)).files
        super().receive_weights(StreamUpdate(_tensors(files)))


def _tensors(files: list) -> Iterator[tuple[str, torch.Tensor]]:
    for file in files:
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - not a mapping
                yield name, tensors.get_tensor(name)


class ServerExtension(worker_extension.WorkerExtension):
    """Methods that every worker gains; `collective_rpc` calls them. Other attributes of ``self`` are vLLM's."""

    def replace_weights(self, files: list[str]) -> None:
        """All of `FileUpdate` in one call: the engine makes no step between the parts of vLLM's weight update."""
        self.start_weight_update()
        self.update_weights({"files": files})
        self.finish_weight_update()

    def checksums(self) -> dict[str, int]:
        """Name → CRC-32 of every stored parameter and buffer of this worker."""
        return parameter_checksums(self.get_model())

    def describe(self) -> dict[str, str]:
        """Router dtype, attention backend, rope and activation, as `rollout.fp32_modules.describe_model` finds them."""
        return describe_model(self.get_model())

    def run_eagerly(self) -> None:
        """Let functions marked for torch.compile run as they are written: see `process_state.compilation`."""
        torch.compiler.set_stance("force_eager")


if BACKEND not in WeightTransferEngineFactory._registry:  # a re-import must not raise
    WeightTransferEngineFactory.register_engine(BACKEND, FileWeightTransfer)
