"""Records a traced program: bytes of live tensors by device, and every collective."""

from __future__ import annotations

import contextlib
import re
import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._C._distributed_c10d import FakeWork
from torch.distributed import ProcessGroup
from torch.distributed._tools.fake_collectives import CollectiveOp, non_functional_collectives
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

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
