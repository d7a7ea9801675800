"""Inside vLLM's worker processes: weight updates, through vLLM's own weight-transfer interface.

vLLM selects a `WeightTransferEngine` by the name of its backend. Ours is handed an iterator of (name, tensor) pairs in
the same process, so nothing is copied on the way and no file is written. Loading follows vLLM's layerwise reload: as
soon as a layer is complete, it is loaded, processed and copied into the storage it had, so that CUDA graphs stay valid.

On a CPU weights are packed for the kernels after loading. vLLM 0.30 leaves three things out, and raises no error:

* Unquantized MoE experts are packed after the first load only. Packing keeps their shape, so after a reload the kernel
  reads unpacked experts. They are packed here, exactly once in an update: packing twice is as wrong as not packing.
  `vllm_engine` checks at start that an update with the same weights leaves every parameter as it was.
* A linear layer computes with a packed copy. An output head tied to the embedding gets no tensor of its own in an
  update, and keeps its old copy. Every layer whose copy is still the old one is packed again here.
* On a processor with AMX packing widens biases to fp32, and an update then writes them unrounded. They take the type of
  their layer again before an update.

vLLM 0.30 also loses the attention sinks of gpt-oss in an update, on every device and without an error: its loader
copies them into the place of the old ones, where no memory is while a layer is loaded again. They are written here.

All experts of a layer are loaded at once (`load_stacks`). vLLM's layerwise reload spends 0.2 to 0.3 ms of Python on
every tensor, and a model of 48 layers with 128 experts sends 18,432 expert matrices: seconds of a step in which nothing
is copied. vLLM's loader of experts also takes the stack of one projection, [experts, out, in], in one call. Matrices
are therefore held until a projection of a layer is complete, then stacked and loaded. All other tensors pass through.
vLLM holds the stacks of a layer until the layer is complete, as it would hold the matrices. The extra memory is at most
the experts of one layer, while the last matrices are stacked.

On a CPU, tensor-parallel ranks of an engine add up through shared memory. vLLM names it after the port of its start.
An engine that joins an existing world has no such port, so all such engines of a machine would share one name: the
second of two would not start, nor any after a run that was killed. Names are therefore made unique here.

`ServerExtension` is the workers' part of a server: new weights, checksums, and what the model computes in which type. A
policy's tensors come from safetensors files or by broadcast from the trainer. Either way they are streamed into vLLM's
layerwise reload, by the same code as the in-process engine's, so that the result is the same bit for bit. Importing
this module registers both transfer engines and the fp32 router.
"""

from __future__ import annotations

import logging
import re
import secrets
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator, _CPUSHMDistributed
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.quantization.online.moe_base import OnlineMoEMethodBase
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.platforms import current_platform

from megatron_rl.checkpoint.hf_folder import HFFolder, model_weights
from megatron_rl.model.architecture import read_architecture
from megatron_rl.rollout import cpu_engine, route_store
from megatron_rl.rollout.precision import describe_model
from megatron_rl.rollout.servers.weight_broadcast import Amount, GroupError, GroupPlace, Receiver, WeightGroup
from megatron_rl.rollout.weights import parameter_checksums

_NAME = re.compile(r"(?P<block>.+\.experts)\.(?P<expert>\d+)\.(?P<projection>gate|up|down)_proj\.weight")
# Experts that arrive in the engine's dtype: they stay as they are, or are quantized once a layer is complete.
_METHODS = (UnquantizedFusedMoEMethod, OnlineMoEMethodBase)
_SINKS = ".self_attn.sinks"
# Projection → vLLM's parameter, and which part of it.
_PLACE = {"gate": ("w13_weight", "w1"), "up": ("w13_weight", "w3"), "down": ("w2_weight", "w2")}


def load_stacks(
    model: torch.nn.Module, weights: Iterable[tuple[str, torch.Tensor]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Load the experts of ``weights`` (Hugging Face names) into ``model``; yields the tensors that are left to load.

    Tensors of experts that come quantized, or split over ranks expert by expert, are yielded as well: a stack needs all
    experts on every rank. Raises `RuntimeError` where a projection did not get all of its experts.
    """
    blocks = stackable_blocks(model)
    held: dict[tuple[str, str], dict[int, torch.Tensor]] = {}
    for name, tensor in weights:
        match = _NAME.fullmatch(name)
        if match is None or match["block"] not in blocks:
            yield name, tensor
            continue
        module, key = blocks[match["block"]], (match["block"], match["projection"])
        matrices = held.setdefault(key, {})
        matrices[int(match["expert"])] = tensor
        if len(matrices) == module.global_num_experts:
            _load(module, key[1], torch.stack([matrices[i] for i in range(len(matrices))]))
            del held[key]
    if held:
        (block, projection), matrices = next(iter(held.items()))
        raise RuntimeError(
            f"weight update: {len(matrices)} of {blocks[block].global_num_experts} matrices of "
            f"{block}.*.{projection}_proj.weight were sent"
        )


def stackable_blocks(model: torch.nn.Module) -> dict[str, RoutedExperts]:
    """Name of a block of experts in a checkpoint → vLLM's module, where that module holds all experts as they are."""
    return {
        name[: name.index(".experts") + len(".experts")]: module
        for name, module in model.named_modules()
        if isinstance(module, RoutedExperts)
        and isinstance(module.quant_method, _METHODS)
        and module.local_num_experts == module.global_num_experts
    }


def _load(module: RoutedExperts, projection: str, stack: torch.Tensor) -> None:
    parameter, part = _PLACE[projection]
    loaded = getattr(module, parameter)
    # Of a stack the loader reads no expert's number, but it asks whether that expert is on this rank.
    options = {"weight_name": parameter, "shard_id": part, "expert_id": 0, "return_success": True}
    if not loaded.weight_loader(loaded, stack, **options):
        raise RuntimeError(f"weight update: vLLM did not take {parameter} ({part}) of {module.layer_name}")


_make_group_name = _CPUSHMDistributed.make_group_name  # vLLM's


def install_group_names() -> None:
    """Put this into vLLM, before an engine of this process joins its ranks."""
    _CPUSHMDistributed.make_group_name = staticmethod(group_name)


def group_name(communicator: CpuCommunicator) -> str:
    """vLLM's name and 64 random bits of the group's first rank. Collective over the group."""
    bits = [secrets.token_hex(8)]
    dist.broadcast_object_list(bits, src=communicator.ranks[0], group=communicator.device_group)
    return f"{_make_group_name(communicator)}-{bits[0]}"


STREAM_BACKEND = "megatron_rl_stream"


@dataclass
class StreamInit(WeightTransferInitInfo):
    """Empty: sender and receiver are one process and have nothing to agree on."""


@dataclass
class StreamUpdate(WeightTransferUpdateInfo):
    """A weight update from the learner's memory. ``weights``: (name, tensor) pairs in Hugging Face names."""

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
        self._sinks: dict[str, torch.Tensor] = {}
        if self.device.type == "cpu":
            narrow_biases(self.model)
        initialize_layerwise_reload(self.model)

    @torch.no_grad()
    def receive_weights(self, update_info: StreamUpdate) -> None:
        weights = load_stacks(self.model, update_info.weights)
        self.model.load_weights(without_sinks(weights, self._sinks))

    @torch.no_grad()
    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        write_sinks(self.model, self._sinks)
        if self.device.type == "cpu":
            pack_cpu_experts(self.model)
            pack_stale_linears(self.model, self._old_copies)

    def shutdown(self) -> None:
        """Let go of the weights. After this, vLLM frees the memory pool that they lie in."""
        self.model = self._default_model = None
        self._old_copies = {}


def without_sinks(
    weights: Iterable[tuple[str, torch.Tensor]], sinks: dict[str, torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield ``weights`` (Hugging Face names) but for attention sinks, which are added to ``sinks``."""
    for name, tensor in weights:
        if name.endswith(_SINKS):
            sinks[name] = tensor.clone()
        else:
            yield name, tensor


def write_sinks(model: torch.nn.Module, sinks: dict[str, torch.Tensor]) -> None:
    """Write each rank's part of ``sinks`` into ``model``, where they are."""
    parameters = dict(model.named_parameters())
    for name, tensor in sinks.items():
        parameter = parameters[name.replace(".self_attn.", ".attn.")]
        own = len(parameter)
        parameter.copy_(tensor[own * get_tensor_model_parallel_rank() :][:own])


def narrow_biases(model: torch.nn.Module) -> None:
    """Give each bias the type of its layer, in which vLLM's loader rounds what it is sent. Packing may have widened it:
    call it before a reload, which packs again."""
    for module in model.modules():
        if isinstance(module, LinearBase) and module.bias is not None:
            module.bias.data = module.bias.data.to(module.params_dtype)


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


SERVER_BACKEND = "megatron_rl_servers"

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


class ServerExtension(WorkerExtension):
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
        """Router dtype, attention backend, rope and activation, as `precision.describe_model` finds them."""
        return describe_model(self.get_model())

    def run_eagerly(self) -> None:
        """Let functions marked for torch.compile run as they are written: see `process_state.compilation`."""
        torch.compiler.set_stance("force_eager")


route_store.install(on_cpu=current_platform.is_cpu())
if current_platform.is_cpu():
    cpu_engine.install_sampler()
    cpu_engine.install_rotary()
    cpu_engine.install_sinks()
    install_group_names()
for backend, engine in ((STREAM_BACKEND, StreamWeightTransfer), (SERVER_BACKEND, ServerWeightTransfer)):
    if backend not in WeightTransferEngineFactory._registry:  # a re-import must not raise
        WeightTransferEngineFactory.register_engine(backend, engine)
