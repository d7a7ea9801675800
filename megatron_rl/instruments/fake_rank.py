"""Substitutions that make this process one rank of a job on GPUs, on a machine with neither.

| in training | in a trace |
|---|---|
| tensors on the GPU and in host memory | `FakeTensorMode`: shape, dtype, device and storage size, no values |
| a CUDA build of PyTorch | the device guard of the type "meta" for the type "cuda", where a CPU build has none |
| `torch.cuda`: device, streams, events, generators | one device of number 0; streams of `torch.cpu`, which do nothing |
| NCCL and Gloo groups | `FakeProcessGroup`: right sizes and ranks, collectives return at once |
| object collectives | every other rank answers what this one does |
| the model's files | its shape; `WeightMap.load` reads nothing |
| `Module.to`, which swaps tensors in place | new parameters with the same attributes: a fake tensor cannot be swapped |
| Megatron's random states, which it compares by value | no states: nothing that is traced draws numbers on a device |
| TransformerEngine's layers | the learner's own, as on a CPU; parameters are the same (`model.names`) |

All substitutions are undone at the end.

`Recorder` counts what the program does: bytes of live tensors by device, and every collective.
"""

from __future__ import annotations

import contextlib
import ctypes
import pickle
import re
import warnings
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import random as megatron_random
from torch._C._distributed_c10d import FakeWork
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed import ProcessGroup
from torch.distributed._tools.fake_collectives import CollectiveOp, non_functional_collectives
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_rl.checkpoint.shards import WeightMap
from megatron_rl.errors import InputError
from megatron_rl.learner import learner as learner_module
from megatron_rl.learner import model as model_module
from megatron_rl.learner.process_groups import shutdown
from megatron_rl.model.architecture import Architecture
from megatron_rl.process import fp32_products

DEVICE, HOST = "cuda", "cpu"

_c10d = torch.ops.c10d
COALESCED = {_c10d.reduce_scatter_tensor_coalesced_.default, _c10d.allgather_into_tensor_coalesced_.default}
_ENDINGS = re.compile(r"^c10d::_?|_tensor|_into|_coalesced|_base|_$")


@dataclass(frozen=True)
class Collective:
    """A kind of collective over one group."""

    kind: str  # c10d's name, or that of an object collective
    group: str  # Megatron's name of the group
    size: int  # number of its ranks


@dataclass
class Phase:
    """Peak memory and traffic of one part of a program."""

    name: str
    before: dict[str, int]  # device → bytes
    peak: dict[str, int]  # device → bytes, `before` included
    after: dict[str, int] = field(default_factory=dict)
    sent: dict[Collective, list[int]] = field(default_factory=lambda: defaultdict(lambda: [0, 0]))  # calls, bytes

    def transient(self, device: str) -> int:
        """Return the peak bytes beyond those at the beginning of the phase."""
        return self.peak[device] - self.before[device]

    def kept(self, device: str) -> int:
        """Return the bytes that the phase added at its end; negative if it freed more."""
        return self.after[device] - self.before[device]


class Recorder(TorchDispatchMode):
    """Records memory and collectives; enter it inside the mode that makes tensors fake.

    A storage counts from the operation that returns it until it has no reference, as in a caching allocator but without
    rounding. The bytes of a collective are those of its larger side on this rank: the output of an all-gather, the
    input of a reduce-scatter. Calls over groups of one rank are left out.
    """

    def __init__(self, device: str = DEVICE) -> None:
        """Prepare a recorder. ``device``: the device type of the GPU; with "cpu", host memory counts as the GPU's."""
        super().__init__()
        self._place = {HOST: HOST, device: DEVICE}
        self.phases: list[Phase] = []
        self._live: dict[int, tuple[weakref.ref, int, str]] = {}  # address of the storage → it, bytes, device
        self._now = {DEVICE: 0, HOST: 0}

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[Phase]:
        """Record the body as one phase. Phases do not nest."""
        phase = Phase(name, dict(self._now), dict(self._now))
        self.phases.append(phase)
        try:
            yield phase
        finally:
            phase.after = dict(self._now)

    def held(self) -> dict[str, int]:
        """Return the current bytes by device."""
        return dict(self._now)

    def record(self, kind: str, group: Any, size: int) -> None:
        """Record one collective over the process group ``group`` with ``size`` bytes."""
        if self.phases and group.size() > 1:
            entry = self.phases[-1].sent[Collective(kind, _name(group), group.size())]
            entry[0] += 1
            entry[1] += size

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        # The fake process group has no kernel for coalesced collectives.
        result = FakeWork().boxed() if func in COALESCED else func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._see(tensor)
        if func in non_functional_collectives or func in COALESCED:
            size = max(nbytes(tree_leaves(side)) for side in args[:2])
            coalesced = func in COALESCED
            group = ProcessGroup.unbox(args[2]) if coalesced else CollectiveOp.get_process_group(func, args)
            self.record(_ENDINGS.sub("", func._schema.name), group, size)
        return result

    def _see(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key, device = storage._cdata, self._place.get(tensor.device.type)
        if key in self._live or device is None:
            return
        size = storage.nbytes()

        def gone(_: weakref.ref) -> None:
            del self._live[key]
            self._now[device] -= size

        self._live[key] = weakref.ref(storage, gone), size, device
        self._now[device] += size
        if self.phases:
            peak = self.phases[-1].peak
            peak[device] = max(peak[device], self._now[device])


def nbytes(items: Iterable[Any]) -> int:
    """Return the bytes of the tensors among ``items``; views count their own elements."""
    return sum(item.numel() * item.element_size() for item in items if isinstance(item, torch.Tensor))


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of the storages of ``tensors``, each once."""
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def _name(group: Any) -> str:
    name = (group.group_desc or "world").lower().replace("_group", "")
    return {"undefined": "world", "default_pg": "world"}.get(name, name)


_CUDA, _META, _NUM_DEVICE_TYPES = 1, 14, 15  # of c10::DeviceType; the table has more entries
_GUARDS = "_ZN3c104impl26device_guard_impl_registryE"  # c10::impl::device_guard_impl_registry

Substitution = tuple[Any, str, Any]
"""An object, the name of its attribute, and the attribute's temporary value."""


class _Fake(FakeTensorMode):
    avoid_device_init = True  # otherwise it calls `torch.cuda.is_available()`, which is true here


@contextlib.contextmanager
def fake_rank(rank: int, world_size: int, architecture: Architecture, device: str = "cuda") -> Iterator[Recorder]:
    """Make this process ``rank`` of ``world_size`` ranks with a GPU each; every path has a model of this shape.

    Only one can be active per process. Raises `InputError` if a process group exists. ``device``: with "cpu", nothing
    of CUDA is replaced. Autograd differentiates tensors on "cuda" only in a CUDA build.
    """
    if dist.is_initialized():
        raise InputError("trace: this process is part of a job; start the command outside of torchrun and srun")
    recorder, changes = Recorder(device), []
    if device == "cuda":
        _lend_guard()
        changes = _of_cuda()
    with contextlib.ExitStack() as stack:
        for target, name, value in [*changes, *_substitutions(architecture, recorder)]:
            stack.enter_context(mock.patch.object(target, name, value))
        stack.enter_context(mock.patch.dict("os.environ", {"LOCAL_RANK": "0"}))
        # Views of a checkpoint are kept by their tensor's address, which is 0 for all: nothing of them is read.
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
        stack.callback(shutdown)
        stack.enter_context(_Fake(allow_non_fake_inputs=True))
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
        stack.enter_context(recorder)
        yield recorder


def _lend_guard() -> None:
    """Register a device guard for "cuda" in a PyTorch without CUDA, because autograd asks for the device of tensors.

    No kernel runs, so an empty guard is enough. An existing guard stays.
    """
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    try:
        guards = (ctypes.c_void_p * _NUM_DEVICE_TYPES).in_dll(library, _GUARDS)
    except ValueError as error:
        raise InputError(f"trace: PyTorch {torch.__version__} has no table of device guards ({error})") from error
    guards[_CUDA] = guards[_CUDA] or guards[_META]


def _of_cuda() -> list[Substitution]:
    cuda, state = torch.cuda, torch.zeros(16, dtype=torch.uint8)
    substitutions: list[Substitution] = [
        (cuda, "is_available", lambda: True),
        (cuda, "device_count", lambda: 1),
        (cuda, "current_device", lambda: 0),
        (cuda, "get_device_capability", lambda device=None: (9, 0)),
        (cuda, "set_device", _nothing),
        (cuda, "synchronize", _nothing),
        (cuda, "empty_cache", _nothing),
        (cuda, "manual_seed", _nothing),
        (cuda, "get_rng_state", lambda device=None: state),
        (cuda, "set_rng_state", _nothing),
        (cuda, "default_stream", torch.cpu.current_stream),
        (cuda, "set_stream", _nothing),
        (megatron_random, "_get_cuda_rng_state", lambda *args, **kwargs: state),
        (megatron_random, "_set_cuda_rng_state", _nothing),
    ]
    return substitutions + [(cuda, name, getattr(torch.cpu, name)) for name in ("Stream", "stream", "current_stream")]


def _substitutions(architecture: Architecture, recorder: Recorder) -> list[Substitution]:
    return [
        (megatron_random.CudaRNGStatesTracker, "fork", lambda *args: contextlib.nullcontext()),
        (dist, "new_group", _in_fake(dist.new_group)),
        (dist, "all_gather_object", _all_gather_object(recorder)),
        (dist, "broadcast_object_list", _broadcast_object_list(recorder)),
        (torch.nn.Module, "to", _replace_parameters),
        (model_module, "TRANSFORMER_ENGINE_DEVICES", frozenset()),
        (learner_module, "read_architecture", lambda path: architecture),
        (fp32_products, "measured_products", lambda *args, **kwargs: {}),
        (WeightMap, "load", _nothing),
    ]


def _nothing(*args: Any, **kwargs: Any) -> None:
    pass


def _in_fake(new_group: Callable) -> Callable:
    def in_fake(*args: Any, backend: str | None = None, **kwargs: Any) -> Any:
        return new_group(*args, backend=None, **kwargs)  # the default group's backend

    return in_fake


def _all_gather_object(recorder: Recorder) -> Callable:
    def all_gather_object(gathered: list[Any], item: Any, group: Any = None) -> None:
        recorder.record("allgather_object", group or dist.group.WORLD, len(gathered) * _pickled(item))
        gathered[:] = [item] * len(gathered)

    return all_gather_object


def _broadcast_object_list(recorder: Recorder) -> Callable:
    def broadcast_object_list(items: list[Any], src: int | None = None, group: Any = None, **_: Any) -> None:
        recorder.record("broadcast_object", group or dist.group.WORLD, _pickled(items))

    return broadcast_object_list


def _pickled(item: Any) -> int:
    return len(pickle.dumps(item))


def _replace_parameters(
    module: torch.nn.Module, device: torch.device | None = None, dtype: torch.dtype | None = None
) -> torch.nn.Module:
    def moved(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().to(device=device, dtype=dtype if tensor.is_floating_point() else None)

    for part in module.modules():
        for name, parameter in part.named_parameters(recurse=False):
            new = torch.nn.Parameter(moved(parameter), parameter.requires_grad)
            new.__dict__.update(parameter.__dict__)
            part._parameters[name] = new
        for name, buffer in part.named_buffers(recurse=False):
            part._buffers[name] = moved(buffer)
    return module
