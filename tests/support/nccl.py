"""GPUs and NCCL as torch 2.13 drives them, for code that makes groups: which GPU a call is on, and when ranks hang.

    results = Job(nodes=2, gpus=8).run(monkeypatch, main)     # main() on every rank, each a thread with its environment

The rules are those of the shipped libtorch_cuda.so 2.13.0+cu130 and of its distributed_c10d.py:

* A collective runs on its tensor's GPU. The first call on another GPU of a group opens one more communicator there.
  All ranks have to open it at the same call, or those that do wait for ever (`ProcessGroupNCCL::initNCCLComm`).
* A barrier runs on device_ids[0], else on the group's device_id, else on the smallest index that the group has used,
  else on the process's first rank modulo its number of GPUs (`ProcessGroupNCCL::barrier`, `guessDeviceId`,
  `globalRank`, which keeps the rank of the first group that asks). `torch.cuda.set_device` has no part in it.
* With gloo beside NCCL and neither device_ids nor device_id, a barrier goes over gloo (`_get_object_coll_device`).
* A group with a device_id refuses tensors of other GPUs, and opens its communicator at once.
* Two ranks of a communicator on one GPU are an error.

Tensors are a CPU's, marked with the GPU that they would be on. A hang raises `RuntimeError` on all ranks of the
group, as a time-out does.
"""

import os
import threading
import time
from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

PATIENCE_S = 60.0  # of a rank for its peers; a rule that is broken is told at once
_own = threading.local()  # of a rank: its number, environment, group, current GPU


class Hang(RuntimeError):
    """Ranks of a group wait in different communicators."""


@dataclass
class Meeting:
    """Where the ranks of one group exchange what they bring to a call."""

    size: int
    barrier: threading.Barrier = field(init=False)
    brought: dict[int, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.barrier = threading.Barrier(self.size)

    def exchange(self, rank: int, item: Any) -> list[Any]:
        """The items of all ranks."""
        self.brought[rank] = item
        self.barrier.wait(PATIENCE_S)
        gathered = [self.brought[i] for i in range(self.size)]
        self.barrier.wait(PATIENCE_S)
        return gathered


@dataclass
class Group:
    """One rank's side of a process group."""

    meeting: Meeting
    rank: int
    backend: str
    device_id: torch.device | None
    communicators: list[int] = field(default_factory=list)  # their GPUs, in the order in which they were opened

    def __post_init__(self) -> None:
        if self.device_id is not None:
            self.call("connect", self.device_id.index)

    def call(self, name: str, gpu: int | None, item: Any = None) -> list[Any]:
        """A collective on ``gpu`` (None: over gloo), to which every rank brings an item."""
        ordinal = None
        if gpu is not None:
            if self.device_id is not None and gpu != self.device_id.index:
                raise RuntimeError(f"{name} on GPU {gpu}, the group is bound to GPU {self.device_id.index}")
            if gpu not in self.communicators:
                self.communicators.append(gpu)
            ordinal = self.communicators.index(gpu)
        gathered = self.meeting.exchange(self.rank, (name, ordinal, physical(gpu), item))
        if len({(call, number) for call, number, _, _ in gathered}) > 1:
            raise Hang(f"{name}: ranks wait in communicators {[number for _, number, _, _ in gathered]}")
        gpus = [where for _, _, where, _ in gathered if where is not None]
        if len(set(gpus)) < len(gpus):
            raise RuntimeError(f"{name}: Duplicate GPU detected: {gpus}")
        return [item for *_, item in gathered]

    def barrier_gpu(self, device_ids: list[int] | None) -> int | None:
        if device_ids:
            return device_ids[0]
        if self.device_id is not None:
            return self.device_id.index
        if "gloo" in self.backend:
            return None
        return min(self.communicators) if self.communicators else _own.first_rank % len(visible())


def visible() -> list[str]:
    """Names of the GPUs that this rank sees."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return [str(i) for i in range(_own.job.gpus)] if named is None else [name for name in named.split(",") if name]


def physical(gpu: int | None) -> tuple[int, str] | None:
    return None if gpu is None else (_own.rank // _own.job.per_node, visible()[gpu])


class Environment(MutableMapping):
    """os.environ with a rank's own variables on top."""

    def __init__(self, base: Any) -> None:
        self._base = base

    def _all(self) -> dict[str, str]:
        return {name: text for name, text in {**self._base, **getattr(_own, "environ", {})}.items() if text is not None}

    def __getitem__(self, name: str) -> str:
        return self._all()[name]

    def __setitem__(self, name: str, text: str) -> None:
        getattr(_own, "environ", self._base)[name] = text

    def __delitem__(self, name: str) -> None:
        if hasattr(_own, "environ"):
            _own.environ[name] = None
        else:
            del self._base[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._all())

    def __len__(self) -> int:
        return len(self._all())


class OnGpu(TorchFunctionMode):
    """Tensors of a device "cuda" are a CPU's, with the index in ``gpu``; what is computed of them is there, too."""

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.device.__get__ and hasattr(args[0], "gpu"):
            return torch.device("cuda", args[0].gpu)
        device = torch.device(kwargs.get("device") or "cpu")
        if device.type == "cuda":
            gpu = _own.current if device.index is None else device.index
            kwargs["device"] = "cpu"
        else:
            gpu = next((leaf.gpu for leaf in tree_leaves((args, kwargs)) if hasattr(leaf, "gpu")), None)
        result = func(*args, **kwargs)
        for leaf in tree_leaves(result) if gpu is not None else ():
            if isinstance(leaf, torch.Tensor):
                leaf.gpu = gpu
        return result


def gpu_of(values: torch.Tensor) -> int:
    if not hasattr(values, "gpu"):
        raise RuntimeError("No backend type associated with device type cpu")
    return values.gpu


@dataclass
class Job:
    """``per_node`` ranks (default: one a GPU) on each of ``nodes`` nodes of ``gpus`` GPUs."""

    nodes: int
    gpus: int = 8
    per_node: int = 0
    environment: Callable[[int], dict[str, str]] = lambda rank: {}
    """More variables of a rank, such as its CUDA_VISIBLE_DEVICES."""
    store: dist.Store = field(default_factory=dist.HashStore)
    meetings: dict[str, Meeting] = field(default_factory=dict)
    lock: Any = field(default_factory=threading.Lock)
    outcomes: dict[tuple[str, int], str] = field(default_factory=dict)
    """How each group came out on each of its ranks: "" or its error."""

    def __post_init__(self) -> None:
        self.per_node = self.per_node or self.gpus

    def run(self, monkeypatch: Any, function: Callable[[], Any]) -> list[Any]:
        """What ``function`` returns on each rank; the first error of a rank is raised."""
        self._install(monkeypatch)
        results: list[Any] = [None] * (self.nodes * self.per_node)
        errors: list[BaseException] = []

        def rank_main(rank: int) -> None:
            node, local = divmod(rank, self.per_node)
            _own.job, _own.rank, _own.group, _own.current, _own.clock = self, rank, None, 0, 0.0
            _own.environ = {"RANK": rank, "LOCAL_RANK": local, "WORLD_SIZE": len(results), "SLURM_PROCID": rank}
            _own.environ |= {"LOCAL_WORLD_SIZE": self.per_node, "SLURM_NTASKS": len(results), "SLURM_LOCALID": local}
            _own.environ = {name: str(number) for name, number in _own.environ.items()}
            _own.environ |= {"SLURMD_NODENAME": f"node{node}"} | self.environment(rank)
            try:
                with OnGpu():
                    results[rank] = function()
            except BaseException as error:  # noqa: BLE001 - raised below
                errors.append(error)

        threads = [threading.Thread(target=rank_main, args=(rank,), daemon=True) for rank in range(len(results))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(2 * PATIENCE_S)
        if errors:
            raise errors[0]
        return results

    def bad_groups(self) -> set[str]:
        return {name for (name, _), problem in self.outcomes.items() if problem}

    def _install(self, monkeypatch: Any) -> None:
        monkeypatch.setattr(os, "environ", Environment(os.environ))
        cuda = {
            "is_available": lambda: True,
            "device_count": lambda: len(visible()),
            "current_device": lambda: _own.current,
            "set_device": lambda device: setattr(_own, "current", torch.device(device).index),
            "get_device_properties": lambda index: SimpleNamespace(uuid="GPU-{}-{}".format(*physical(index))),
        }
        for name, function in cuda.items():
            monkeypatch.setattr(torch.cuda, name, function)
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *_: torch.device("cuda"))
        monkeypatch.setattr(dist, "PrefixStore", lambda name, store: name)
        for function in (init_process_group, destroy_process_group, is_initialized, barrier, all_reduce):
            monkeypatch.setattr(dist, function.__name__, function)
        monkeypatch.setattr(dist, "all_to_all_single", all_to_all_single)


def steady(module: Any, monkeypatch: Any) -> None:
    """Give ``module`` a clock of a rank's own that goes on by one at every look: all links are equally fast."""

    def look() -> float:
        _own.clock += 1.0
        return _own.clock

    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=look, monotonic=time.monotonic, sleep=time.sleep))


# -- torch.distributed of a rank


def init_process_group(
    backend: str, *, store: str, rank: int, world_size: int, timeout: Any, device_id: torch.device | None = None
) -> None:
    if device_id is not None and device_id.index is None:
        raise ValueError("Please use a device_id with index.")
    if not hasattr(_own, "first_rank"):
        _own.first_rank = rank  # of a process, for good
    with _own.job.lock:
        meeting = _own.job.meetings.setdefault(store, Meeting(world_size))
    _own.name = (store, rank)
    _noted(lambda: setattr(_own, "group", Group(meeting, rank, backend, device_id)))


def destroy_process_group() -> None:
    _own.group = None


def is_initialized() -> bool:
    return _own.group is not None


def _noted(call: Callable[[], Any]) -> Any:
    outcomes = _own.job.outcomes
    outcomes.setdefault(_own.name, "")
    try:
        return call()
    except RuntimeError as error:
        outcomes[_own.name] = str(error)
        raise


def barrier(group: Any = None, async_op: bool = False, device_ids: list[int] | None = None) -> None:
    _noted(lambda: _own.group.call("barrier", _own.group.barrier_gpu(device_ids)))


def all_reduce(values: torch.Tensor) -> None:
    values.copy_(sum(_noted(lambda: _own.group.call("all_reduce", gpu_of(values), values.clone()))))


def all_to_all_single(received: torch.Tensor, sent: torch.Tensor) -> None:
    parts = _noted(lambda: _own.group.call("all_to_all", gpu_of(sent), sent.chunk(_own.group.meeting.size)))
    received.copy_(torch.cat([part[_own.group.rank] for part in parts]))
