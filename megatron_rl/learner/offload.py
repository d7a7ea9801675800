"""Room for the engine: parts of the learner that leave the GPU while a colocated engine generates (`learner.offload`).

A part leaves by giving up storage: its bytes go to host memory, and the storage shrinks to nothing. Every tensor stays
the object it was, so that views into Megatron's buffers, optimizers and hooks stay valid, and it has the same bits when
it is back. Gradients are freed without a copy (Megatron's `offload_grad_buffers`): each update starts by zeroing them.

Megatron's own `offload_to_cpu` is not used. It copies to pageable memory, at a fraction of the bus, and allocates
it anew each time; it gives an fp32 model's optimizer weights of its own, which are views of the model's; it brings the
step counters of torch's Adam back to the GPU, which that optimizer refuses; and it does nothing on a CPU, so that no
test could run it. Its buffers' `offload_to_cpu` rounds host memory up to powers of two.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer

from megatron_rl.checkpoint.shards import distributed_optimizers
from megatron_rl.config.learner import OffloadConfig
from megatron_rl.errors import Fault

ALIGNMENT = 512  # bytes; the start of every tensor in host memory


class OffloadError(Fault):
    """Host memory for what leaves the GPU could not be had."""


class HostCopy:
    """Storages of ``device`` that can go to host memory and come back. The host memory is allocated once, in one piece,
    page-locked where the device is a GPU, and kept.

    ``expected``: bytes that will leave in the end, if that is more than what leaves first: a node that lacks them fails
    at the start.
    """

    def __init__(self, device: torch.device, expected: int = 0):
        self._expected = expected
        self._device, self._is_gpu = device, device.type == "cuda"
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._places: dict[int, torch.Tensor] = {}  # storage → its bytes in host memory
        self._away: dict[int, torch.UntypedStorage] = {}

    def leave(self, tensors: Iterable[torch.Tensor], are_as_they_came: bool = False) -> None:
        """Copy the storages of ``tensors`` to host memory and free them. Nothing happens where they are away.

        ``are_as_they_came``: what came back last is freed alone, as its values are in host memory."""
        if self._away:
            return
        storages = {_key(t): t.untyped_storage() for t in tensors if t.device.type == self._device.type}
        storages = {key: storage for key, storage in storages.items() if storage.nbytes()}
        if {key: storage.nbytes() for key, storage in storages.items()} != {
            k: p.numel() for k, p in self._places.items()
        }:
            self._allocate(storages)
        for key, storage in () if are_as_they_came else storages.items():
            self._places[key].copy_(_bytes(storage), non_blocking=True)
        if self._is_gpu:
            torch.cuda.current_stream().synchronize()
        for storage in storages.values():
            storage.resize_(0)
        self._away = storages

    def come_back(self) -> None:
        """Storage and values as they were. The stream that the copies are queued on is the one that reads them."""
        for key, storage in self._away.items():
            storage.resize_(self._places[key].numel())
            _bytes(storage).copy_(self._places[key], non_blocking=True)
        self._away = {}

    @property
    def is_away(self) -> bool:
        return bool(self._away)

    def holds(self, tensor: torch.Tensor) -> bool:
        return self.is_away and _key(tensor) in self._away

    def values(self, tensor: torch.Tensor) -> torch.Tensor:
        """A view of the host memory with the values of ``tensor``, which is away."""
        place = self._places[_key(tensor)].view(tensor.dtype)
        return place.as_strided(tensor.size(), tensor.stride(), place.storage_offset() + tensor.storage_offset())

    def _allocate(self, storages: dict[int, torch.UntypedStorage]) -> None:
        starts, end = {}, 0
        for key, storage in storages.items():
            starts[key] = end
            end += _aligned(storage.nbytes())
        self._places = {}
        if end > self._memory.numel():
            self._memory = torch.empty(0, dtype=torch.uint8)  # the old piece goes first
            self._memory = _host_memory(max(end, self._expected), pinned=self._is_gpu)
        self._places = {k: self._memory[start : start + storages[k].nbytes()] for k, start in starts.items()}


class Visitor:
    """Tensors that nothing changes, on a GPU only inside `here`, and else in host memory. On a CPU they stay."""

    def __init__(self, tensors: Iterable[torch.Tensor], device: torch.device):
        self._tensors, self._host = list(tensors), HostCopy(device)
        self._leaves = device.type == "cuda"
        self._leave(first=True)

    @contextmanager
    def here(self) -> Iterator[None]:
        self._host.come_back()
        try:
            yield
        finally:
            self._leave()

    def _leave(self, first: bool = False) -> None:
        if self._leaves:
            self._host.leave(self._tensors, are_as_they_came=not first)
            torch.cuda.empty_cache()


class Offload:
    """The three parts of one learner, and which of them are away. A method without effect costs nothing.

    ``model`` wraps ``module`` for data parallelism.
    """

    def __init__(
        self,
        config: OffloadConfig,
        model: DistributedDataParallel,
        module: torch.nn.Module,
        optimizer: MegatronOptimizer,
        device: torch.device,
    ):
        self.config, self._model, self._module, self._optimizer = config, model, module, optimizer
        self._device, self._is_gpu = device, device.type == "cuda"
        self._states, self._weights = HostCopy(device, self._expected_states()), HostCopy(device)

    # -- leaving

    def step_aside(self, weights: bool) -> None:
        """Everything that may leave while the engine generates; the weights only where ``weights`` says so."""
        if self.config.gradients:
            self._model.offload_grad_buffers(synchronize=self._is_gpu, empty_cache=False)
        if self.config.optimizer:
            self._states.leave(self._optimizer_states())
        if weights and self.config.weights:
            self._weights.leave(self._module.parameters())
        if self.config.is_on and self._is_gpu:
            torch.cuda.empty_cache()

    def before_passes(self) -> None:
        """What a forward pass needs is there; Adam's states are not, where they leave during passes, too."""
        if self.config.during_passes:
            self._states.leave(self._optimizer_states())
        self._weights.come_back()

    # -- coming back

    def before_gradients(self) -> None:
        """The gradient buffer exists, zeroed where it was away."""
        self._model.restore_grad_buffers(synchronize=False)

    def before_update(self) -> None:
        """Adam finds its states."""
        self._states.come_back()

    def come_back(self) -> None:
        """Everything is on the device."""
        self._weights.come_back()
        self.before_gradients()
        self.before_update()

    # -- reading what is away

    @property
    def is_all_here(self) -> bool:
        """Whether every tensor has its values where it is."""
        return not (self._states.is_away or self._weights.is_away)

    def host_values(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return ``tensor``, or a view of the host memory if it is away."""
        for copy in (self._states, self._weights):
            if copy.holds(tensor):
                return copy.values(tensor)
        return tensor

    def device_values(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return ``tensor``, or a copy on the device if it is away."""
        values = self.host_values(tensor)
        return values if values is tensor else values.to(self._device)

    @contextmanager
    def readable_optimizer(self) -> Iterator[None]:
        """Inside, Adam's tensors have their values though they are away: they lie in host memory.

        Not for the model's parameters. One that moves to another device loses the node that adds up its gradient, and
        with it Megatron's hooks.
        """
        moved = [(t, t.data) for t in self._optimizer_tensors() if self.host_values(t) is not t]
        try:
            for tensor, _ in moved:
                tensor.data = self.host_values(tensor)
            yield
        finally:
            for tensor, own in moved:
                tensor.data = own

    def _optimizer_states(self) -> list[torch.Tensor]:
        """Moments and master weights; not weights that the optimizer changes in place, which are the model's (fp32)."""
        models = {_key(parameter) for parameter in self._module.parameters()}
        return [tensor for tensor in self._optimizer_tensors() if _key(tensor) not in models]

    def _expected_states(self) -> int:
        """Bytes of Adam's states from its first update on: moments do not exist before."""
        models = {_key(parameter) for parameter in self._module.parameters()}
        num_bytes = 0
        for parameter in self._optimizer_tensors():
            if parameter.dtype == torch.float32:  # a master, or of an fp32 model a part of its weights
                num_bytes += (2 + (_key(parameter) not in models)) * _aligned(parameter.nbytes)
        return num_bytes

    def _optimizer_tensors(self) -> list[torch.Tensor]:
        tensors: list[Any] = []
        for chained in distributed_optimizers(self._optimizer):
            inner = chained.optimizer
            tensors += [p for group in inner.param_groups for p in group["params"]]
            # Step counters of torch's Adam are scalars on the CPU, whatever the device, and stay.
            tensors += [t for state in inner.state.values() for t in state.values() if torch.is_tensor(t) and t.dim()]
        return tensors


def _key(tensor: torch.Tensor) -> int:
    """Number of the storage, which it keeps while it is empty."""
    return tensor.untyped_storage()._cdata


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _host_memory(nbytes: int, pinned: bool) -> torch.Tensor:
    """Allocate ``nbytes`` of host memory. ``pinned``: page-locked by CUDA as they are; torch's own allocator of
    page-locked memory rounds a request up to a power of two, which for 40 GiB is 24 GiB too many."""
    try:
        memory = torch.empty(nbytes, dtype=torch.uint8)
    except RuntimeError as error:
        raise OffloadError(f"{nbytes / 2**30:.1f} GiB of host memory could not be had: {error}") from error
    if pinned and nbytes:
        cudart = torch.cuda.cudart()
        code = int(cudart.cudaHostRegister(memory.data_ptr(), nbytes, 0))
        if code:
            raise OffloadError(
                f"CUDA could not lock {nbytes / 2**30:.1f} GiB of host memory (error {code}); has the "
                "node as much, and does `ulimit -l` allow it? `megatron-rl plan` says what a node needs"
            )
        weakref.finalize(memory, cudart.cudaHostUnregister, memory.data_ptr())
    return memory
