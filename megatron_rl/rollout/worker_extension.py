"""Weight updates inside vLLM, through its own weight-transfer interface.

vLLM calls a `WeightTransferEngine` that a backend name selects; ours is handed an iterator of (name, tensor) pairs in
the same process, so that nothing is copied on the way and no file is written. Importing this module registers it.
Loading follows vLLM's layerwise reload: as soon as a layer is complete, it is loaded, processed and copied into the
storage it had, so that CUDA graphs stay valid.

On a CPU weights are packed for the kernels after loading. vLLM 0.30 leaves two things out, and raises no error:

* Unquantized MoE experts are packed after the first load only. Packing keeps their shape, so after a reload the kernel
  reads unpacked experts. They are packed here, exactly once in an update: packing twice is as wrong as not packing.
  `vllm_engine` checks at start that an update with the same weights leaves every parameter as it was.
* A linear layer computes with a packed copy. An output head tied to the embedding gets no tensor of its own in an
  update, and keeps its old copy. Every layer whose copy is still the old one is packed again here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.platforms import current_platform

from megatron_rl.rollout import cpu_bookkeeping, cpu_sampler, cpu_shared_memory
from megatron_rl.rollout.expert_stacks import load_stacks

BACKEND = "megatron_rl_stream"


@dataclass
class StreamInit(WeightTransferInitInfo):
    """Empty: sender and receiver are one process and have nothing to agree on."""


@dataclass
class StreamUpdate(WeightTransferUpdateInfo):
    """``weights``: (name, tensor) pairs in Hugging Face names."""

    weights: Iterable[tuple[str, torch.Tensor]]


class StreamWeightTransfer(WeightTransferEngine[StreamInit, StreamUpdate]):
    """Loads a stream of tensors from the engine's own process."""

    init_info_cls = StreamInit
    update_info_cls = StreamUpdate
    supports_draft_weight_update = False

    def init_transfer_engine(self, init_info: StreamInit) -> None:
        pass

    def start_weight_update(self) -> None:
        self._old_copies = packed_copies(self.model)
        initialize_layerwise_reload(self.model)

    @torch.no_grad()
    def receive_weights(self, update_info: StreamUpdate) -> None:
        self.model.load_weights(load_stacks(self.model, update_info.weights))

    @torch.no_grad()
    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        if self.device.type == "cpu":
            pack_cpu_experts(self.model)
            pack_stale_linears(self.model, self._old_copies)

    def shutdown(self) -> None:
        pass


def pack_cpu_experts(model: torch.nn.Module) -> None:
    """Pack every MoE layer's expert weights for the CPU kernel. Not idempotent: call it once after each reload."""
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    for module in model.modules():
        kernel = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
        experts = getattr(kernel, "fused_experts", None)
        if isinstance(experts, CPUUnquantizedExperts) and hasattr(module, "w13_weight"):
            experts.process_weights_after_loading(module)


def packed_copies(model: torch.nn.Module) -> dict[str, Callable]:
    """Name of every layer that computes with a packed copy of its weight → the function that holds the copy."""
    functions = {name: getattr(module, "cpu_linear", None) for name, module in model.named_modules()}
    # torch's own function packs nothing: it reads the weight at every call.
    return {
        name: function for name, function in functions.items() if function not in (None, torch.nn.functional.linear)
    }


def pack_stale_linears(model: torch.nn.Module, old_copies: dict[str, Callable]) -> None:
    """Pack again the layers that still hold one of ``old_copies``. Raises where the unpacked weight is gone."""
    for name, module in model.named_modules():
        if name in old_copies and module.cpu_linear is old_copies[name]:
            if not module.weight.numel():
                raise RuntimeError(f"the weight update did not reach {name}")
            module.quant_method.process_weights_after_loading(module)


class WorkerExtension:
    """Named to vLLM as the worker extension so that every worker imports this module."""


if current_platform.is_cpu():
    cpu_sampler.install()
    cpu_shared_memory.install()
    cpu_bookkeeping.install()
if BACKEND not in WeightTransferEngineFactory._registry:  # a re-import must not raise
    WeightTransferEngineFactory.register_engine(BACKEND, StreamWeightTransfer)
