"""Inside a server's worker processes: new weights, checksums, and what the model computes in which type.

A policy's tensors come from safetensors files or by broadcast from the trainer. Either way they are streamed into
vLLM's layerwise reload, by the same code as the in-process engine's (`worker_extension`), so that the result is the
same bit for bit. Importing this module registers the transfer engine and the fp32 router.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from vllm.distributed.weight_transfer.base import WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from megatron_rl.checkpoint.hf_folder import HFFolder, model_weights
from megatron_rl.model.architecture import read_architecture
from megatron_rl.rollout import worker_extension
from megatron_rl.rollout.fp32_modules import describe_model
from megatron_rl.rollout.servers.weight_broadcast import Amount, GroupError, GroupPlace, Receiver, WeightGroup
from megatron_rl.rollout.weights import parameter_checksums
from megatron_rl.rollout.worker_extension import StreamUpdate, StreamWeightTransfer

BACKEND = "megatron_rl_servers"

_log = logging.getLogger(__name__)


@dataclass
class ServerUpdate(WeightTransferUpdateInfo):
    """A weight update of a server.

    ``broadcast``: the fields of a `GroupPlace`. Without it: ``files`` with all tensors of one policy; empty: the
    checkpoint that the server started from."""

    files: list[str] = field(default_factory=list)
    broadcast: dict[str, Any] | None = None


class ServerWeightTransfer(StreamWeightTransfer):
    """Loads all tensors of one policy. ``amount``: what the last update brought."""

    update_info_cls = ServerUpdate
    amount = Amount(0, 0)
    _group: WeightGroup | None = None

    @torch.no_grad()
    def receive_weights(self, update_info: ServerUpdate) -> None:
        if update_info.broadcast is None:
            self._load(_Counted(_tensors(update_info.files) if update_info.files else self._own()))
        else:
            self._load(Receiver(self._joined(GroupPlace(**update_info.broadcast))))

    def _own(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors that the server started from."""
        path = Path(self.model_config.model)
        return model_weights(HFFolder(path), read_architecture(path))

    def _load(self, stream: Receiver | _Counted) -> None:
        super().receive_weights(StreamUpdate(stream))
        self.amount = stream.check()

    def _joined(self, place: GroupPlace) -> WeightGroup:
        """The group of ``place``: the one of the last update where that is it."""
        if self._group is None or self._group.place.name != place.name:
            self.leave()
            self._group = WeightGroup.join(place, place.rank + self.parallel_config.rank)
        return self._group

    def leave(self) -> None:
        """Leave the group; other members that wait for this worker fail."""
        group, self._group = self._group, None
        if group is not None:
            group.close()

    @torch.no_grad()
    def abandon(self) -> None:
        """End an update that did not get all tensors, so that the next one begins with every layer as it should be.

        Layers that are complete hold new weights, the others get back the storage that they had. What these held back
        of their new weights must go: vLLM would count it towards the next update.
        """
        self.leave()
        for layer in self.model.modules():
            info = get_layerwise_info(layer)
            info.loaded_weights, info.load_numel = [], 0
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        self.leave()
        super().shutdown()


class _Counted:
    """Tensors of files, counted."""

    def __init__(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        self._tensors, self._amount = tensors, Amount(0, 0)

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self._tensors:
            self._amount = Amount(self._amount.tensors + 1, self._amount.bytes + tensor.nbytes)
            yield name, tensor

    def check(self) -> Amount:
        return self._amount


def _tensors(files: list) -> Iterator[tuple[str, torch.Tensor]]:
    for file in files:
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - not a mapping
                yield name, tensors.get_tensor(name)


class ServerExtension(worker_extension.WorkerExtension):
    """Methods that every worker gains; `collective_rpc` calls them. Other attributes of ``self`` are vLLM's."""

    def replace_weights(self, update: dict[str, Any]) -> dict[str, Any]:
        """All of an update (the fields of `ServerUpdate`) in one call: the engine makes no step between its parts.

        Answers ``tensors`` and ``bytes``, or ``error`` and whether the group was at fault (``interrupted``). Nothing is
        raised: of several workers vLLM would leave the answers of the others in their queues, for the next call.
        """
        try:
            self.start_weight_update()
            self.update_weights(update)
            self.finish_weight_update()
        except Exception as error:  # noqa: BLE001 - whatever it is, the server has to close
            _log.exception("weight update failed")
            self._weight_update_active = False
            self.weight_transfer_engine.abandon()
            return {"error": f"{type(error).__name__}: {error}", "interrupted": isinstance(error, GroupError)}
        amount = self.weight_transfer_engine.amount
        return {"tensors": amount.tensors, "bytes": amount.bytes}

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
    WeightTransferEngineFactory.register_engine(BACKEND, ServerWeightTransfer)
