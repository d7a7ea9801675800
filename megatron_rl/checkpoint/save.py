"""Checkpoints of the learner: Megatron's distributed format, published atomically, read under whichever layout.

A checkpoint is a folder ``step_00000050``: Megatron's shards, ``trainer.json`` (step counters and the small states of
the loop: sampler, scheduler, monitor) and ``manifest.json`` (see `manifest`). A rank on which a save fails says so to
the others before any of them goes on: `SaveError` on all ranks, nothing published, older checkpoints as they were.

A save can go on in the background: the rank's share is copied to host memory once, a thread writes and hashes it, and
`PendingSave.finish` publishes it. It is a thread because a forked process must not inherit CUDA, and a spawned one
needs the share copied once more to shared memory and the libraries imported again. Writing and hashing leave the
interpreter free for training. The thread joins in no collective: those belong to the main thread, in one order.

A checkpoint from elsewhere is data: loading it runs no code from it. Megatron's distributed format has pickles in it:
the index (``.metadata``), which torch reads with plain `pickle`, and files that torch reads with or without
restrictions, depending on who calls.
"""

from __future__ import annotations

import contextlib
import enum
import json
import os
import pickle
import queue
import shutil
import threading
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any, TypeVar

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.utils import unwrap_model
from torch.distributed.checkpoint.metadata import Metadata

from megatron_rl.checkpoint import manifest
from megatron_rl.checkpoint.manifest import TRAINER_FILE, checkpoint_name
from megatron_rl.checkpoint.shards import (
    CONTENT_METADATA,
    Values,
    allocate_moments,
    as_it_is,
    keep_loaded,
    load_optimizer_settings,
    optimizer_settings,
    optimizer_slices,
    sharded_state,
    sharded_weights,
)
from megatron_rl.errors import Fault, InputError
from megatron_rl.model.names import EXTRA_STATE
from megatron_rl.process.host import write_whole
from megatron_rl.process.ranks import broadcast_object, gather_objects, gather_to_main, together, world_rank, world_size
from megatron_rl.process.run_files import read_json

INDEX_FILE = ".metadata"


@contextlib.contextmanager
def no_foreign_code(path: Path) -> Iterator[None]:
    """While this context is open, loading ``path`` runs no code from it.

    The index is read once by a reader that knows a few classes. Whatever torch unpickles is restricted to tensors and
    plain values.
    """
    with (path / INDEX_FILE).open("rb") as index:
        _IndexReader(index).load()
    name = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    except pickle.UnpicklingError as error:
        reason = next((line for line in str(error).splitlines() if "nsupported" in line), str(error).splitlines()[0])
        raise InputError(f"checkpoint {path}: holds more than tensors and plain values: {reason.strip()}") from error
    finally:
        os.environ.pop(name) if before is None else os.environ.update({name: before})


class _IndexReader(pickle.Unpickler):
    """Reads the index of a checkpoint, which torch pickles, and no other class.

    A pickle may call what it names and set its attributes: `dataclass` on a class whose annotations it has set compiles
    them. So of a module only the classes that it defines are allowed, not the modules and functions that it imports.
    """

    _MODULES = ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.planner")
    _NAMES = (
        ("torch", "Size"),
        ("torch.serialization", "_get_layout"),
        ("collections", "OrderedDict"),
        ("pathlib", "PosixPath"),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        ("torch.distributed.checkpoint.filesystem", "_StoragePrefix"),
    )

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _enum_member
        is_type = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype | torch.memory_format)
        if is_type or (module, name) in self._NAMES:
            return super().find_class(module, name)
        if module in self._MODULES and "." not in name:
            loaded = super().find_class(module, name)
            if isinstance(loaded, type) and loaded.__module__ == module:
                return loaded
        raise InputError(f"the checkpoint's index names {module}.{name}, which no run writes; it is not loaded")


def _enum_member(owner: Any, name: str) -> Any:
    """Replaces `getattr`: Python before 3.11.4 pickles the members of an enumeration as calls of it."""
    if isinstance(owner, type) and issubclass(owner, enum.Enum) and name in owner.__members__:
        return owner[name]
    raise InputError(f"the checkpoint's index takes {name!r} of {owner!r}, which no run writes; it is not loaded")


WEIGHTS_FILE = "weights.json"  # marks a folder with weights alone, as `conversion.to_megatron` writes it


def load_checkpoint(path: Path, model: GPTModel, optimizer: MegatronOptimizer, verify: bool = True) -> dict[str, Any]:
    """Fill model and optimizer from ``path``, written under any layout; returns the trainer state. Collective.

    Tensors are read into place: a rank's own weights, and of the optimizer what it owns.

    ``verify``: compare every file with the hashes of the manifest first. Raises `InputError` where the checkpoint is
    not whole, or holds a pickle of anything but Megatron's and torch's descriptions of tensors.
    """
    path = Path(path)
    if verify and (problem := damage(path)):
        raise InputError(f"checkpoint {path}: {problem}; expected a complete folder step_…, as a run writes it")
    with no_foreign_code(path):
        load_optimizer_settings(optimizer, dist_checkpointing.load_common_state_dict(str(path))["optimizer"])
        allocate_moments(optimizer)
        weights = sharded_weights(model)
        slices = dict(enumerate(optimizer_slices(optimizer, weights)))
        state = _load({"model": _without_extra_state(weights), "slices": slices}, path)
    _fill(model, state["model"])
    keep_loaded(optimizer)
    return read_json(path / TRAINER_FILE, {})


def load_weights(path: Path, model: GPTModel, optimizer: MegatronOptimizer | None = None) -> None:
    """Fill ``model`` from the weights in ``path``, written under any layout; the optimizer's masters follow.

    Collective. Raises `InputError` where ``path`` has a manifest of `conversion.to_megatron` and differs from it.
    """
    has_manifest = all((Path(path) / name).is_file() for name in (WEIGHTS_FILE, manifest.MANIFEST_FILE))
    if has_manifest and (problem := damage(Path(path), WEIGHTS_FILE)):
        raise InputError(f"checkpoint {path}: {problem}; write it again with to-megatron")
    with no_foreign_code(Path(path)):
        state = _load({"model": _without_extra_state(sharded_weights(model))}, path)
    _fill(model, state["model"])
    if optimizer is not None:
        optimizer.reload_model_params()


def damage(path: Path, marker: str = TRAINER_FILE) -> str | None:
    """Why the checkpoint ``path`` cannot be trusted, from sizes, then hashes; None where it is whole.

    ``marker``: see `manifest.incomplete`. Collective: each rank reads its share of the files, and all return the same.
    """
    problem = broadcast_object(manifest.incomplete(path, marker) if world_rank() == 0 else None)
    if problem is None:
        shares = gather_objects(manifest.altered_files(path, world_rank(), world_size(), marker))
        problem = next((problem for share in shares for problem in share), None)
    return problem


def _load(wanted: dict[str, Any], path: Path) -> dict[str, Any]:
    # Megatron's check of what is asked for gathers all ranks' descriptions on every rank. That every part of a tensor
    # was written, the save has made sure of.
    return dist_checkpointing.load(wanted, str(path), validate_access_integrity=False)


def _without_extra_state(weights: dict[str, Any]) -> dict[str, Any]:
    """The tensors alone. The states of FP8, which nothing here uses, are empty, and each kind of layer has others:
    TransformerEngine's norms want one that Megatron's own norms do not write."""
    return {name: tensor for name, tensor in weights.items() if EXTRA_STATE not in name}


def _fill(model: GPTModel, tensors: dict[str, Any]) -> None:
    """Load ``tensors``, all of the model's and no others; `RuntimeError` names those that differ."""
    result = unwrap_model(model).load_state_dict(tensors, strict=False)
    missing = [name for name in result.missing_keys if EXTRA_STATE not in name]
    if missing or result.unexpected_keys:
        raise RuntimeError(f"the checkpoint lacks {missing} and has {list(result.unexpected_keys)} beside the model's")


_FORMAT = ("torch_dist", 1)  # backend and version, in metadata.json
# megatron-core 0.19 has two planners, and takes NVIDIA's resiliency extension unless told.
_OWN_PLAN = {"async_strategy": "mcore"}

T = TypeVar("T")
Together = Callable[[Callable[[], Any]], Any]
"""Runs a part of a save that can fail on one rank alone, so that all ranks hear of it: `ranks.together`."""


class SaveError(Fault):
    """A checkpoint could not be written; raised on every rank. The run itself is unharmed."""

    @property
    def explains_itself(self) -> bool:
        """A disk that is full, or that fails, is not found in the code."""
        return not isinstance(self.__cause__, TypeError | AttributeError | LookupError | AssertionError)


def begin_save(
    folder: Path,
    step: int,
    model: GPTModel,
    optimizer: MegatronOptimizer,
    trainer_state: dict[str, Any],
    values: Values = as_it_is,
    *,
    keep_last: int = 0,
    protected: Collection[int] = (),
    in_background: bool = True,
) -> PendingSave:
    """Begin to write ``folder/step_…``, an existing one of which is replaced; `PendingSave.finish` publishes it, and
    deletes all older checkpoints but the newest ``keep_last`` (0 keeps all) and those of the steps ``protected``.
    Collective. Raises `SaveError` on every rank where one of them could not write its part.

    ``values``: see `sharded_state`. ``in_background``: a thread writes a copy of the state in host memory, so that
    training may go on. Otherwise `PendingSave.finish` writes the state itself, which must not change until then.
    """
    final = Path(folder) / checkpoint_name(step)
    partial = manifest.partial_path(final)

    def all_ranks(action: Callable[[], T]) -> T:
        return together(f"the checkpoint of step {step} could not be written", action, fault=SaveError, describe=_say)

    try:
        all_ranks(lambda: _make_empty(partial))
        shards, common = all_ranks(lambda: _state(model, optimizer, values, in_background))
        all_ranks(lambda: _on_main(lambda: _write_common(common, partial)))
        writer, index = all_ranks(lambda: _Strategy(*_FORMAT).async_save(shards, partial))
    except SaveError:
        _on_main(lambda: shutil.rmtree(partial, ignore_errors=True))
        raise
    trainer = json.dumps(trainer_state, indent=1)
    save = PendingSave(all_ranks, partial, final, writer, index, trainer, keep_last, protected)
    if in_background:
        save.start()
    return save


class PendingSave:
    """A save under way: the shards of this rank are planned, and written by a thread or in `finish`."""

    def __init__(
        self,
        all_ranks: Together,
        partial: Path,
        final: Path,
        writer: FileSystemWriterAsync,
        index: Metadata | None,
        trainer: str,
        keep_last: int,
        protected: Collection[int],
    ):
        self.path = final
        self._all_ranks, self._partial, self._writer, self._index = all_ranks, partial, writer, index
        self._trainer, self._keep_last = trainer, keep_last
        self.protected = set(protected)  # may grow until `finish`
        self._thread: threading.Thread | None = None
        self._written: Any = None
        self._problem: Exception | None = None

    def start(self) -> None:
        self._thread = threading.Thread(target=self._work, name=f"save {self.path.name}", daemon=True)
        self._thread.start()

    def is_done(self) -> bool:
        """Whether this rank has written its share, or failed to."""
        return self._thread is not None and not self._thread.is_alive()

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait for this rank's thread; no collective."""
        if self._thread is not None:
            self._thread.join(timeout_s)

    def finish(self) -> Path:
        """Wait until every rank has written its share, then publish; collective. Raises `SaveError` on every rank where
        one of them failed; nothing of it is left."""
        if self._thread is None:
            self._work()
        self.wait()
        try:
            self._all_ranks(self._report)
            shares = gather_to_main(self._written)
            self._all_ranks(lambda: _on_main(lambda: self._publish(shares)))
        except SaveError:
            _on_main(lambda: shutil.rmtree(self._partial, ignore_errors=True))
            raise
        return self.path

    def _work(self) -> None:
        try:
            results = _write(self._writer)
            self._written = results, _hash_own_files(self._partial)
        except Exception as error:  # noqa: BLE001 - `finish` tells all ranks
            self._problem = error

    def _report(self) -> None:
        if self._problem is not None:
            raise self._problem

    def _publish(self, shares: list[tuple[list[Any], dict[str, Any]]]) -> None:
        self._writer.finish(self._index, [results for results, _ in shares])
        save_config(CheckpointingConfig(*_FORMAT), str(self._partial))
        files = _finish_files(self._partial, self._trainer)
        for _, hashes in shares:
            files |= hashes
        manifest.write_manifest(self._partial, files)
        manifest.publish(self._partial, self.path)
        manifest.prune(self.path.parent, self._keep_last, self.protected)


def _state(
    model: GPTModel, optimizer: MegatronOptimizer, values: Values, copied: bool
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What this rank writes, and what rank 0 writes for all. ``copied``: the tensors are copied to host memory."""
    allocate_moments(optimizer)
    shards = sharded_state(model, optimizer, values)
    if copied:
        _copy_to_host([shard for shard in nested_values(shards) if isinstance(shard, ShardedTensor)])
    return shards, {"optimizer": optimizer_settings(optimizer), "content_metadata": dict(CONTENT_METADATA)}


def _write_common(common: dict[str, Any], partial: Path) -> None:
    """In a file of its own, which every release reads; megatron-core 0.19 itself writes it into the shards."""
    torch.save(common, partial / COMMON_STATE_FNAME)


def _copy_to_host(shards: list[ShardedTensor]) -> None:
    """Give ``shards`` copies of their data; pinned where they come from a GPU, so that all are under way at once."""
    from_gpu = [shard.data.is_cuda for shard in shards]
    for shard, pinned in zip(shards, from_gpu, strict=True):
        copy = torch.empty(shard.data.shape, dtype=shard.data.dtype, pin_memory=pinned)
        shard.data = copy.copy_(shard.data, non_blocking=True)
    if any(from_gpu):
        torch.cuda.synchronize()


class _Strategy(TorchDistSaveShardedStrategy):
    """Megatron's plan of the files, in which every part of every tensor occurs once, but not its writers: they are
    forked, one for each file, and waited for without a limit, so that a killed writer stops the run."""

    def _get_save_and_finalize_callbacks(self, writer: Any, prepared: Any, *_: Any) -> Any:
        index = prepared[1]
        if index is not None:
            del index.all_local_plans  # Megatron puts a second copy of the index into it, for saves that reuse it
        return writer, index

    def async_save(self, sharded_state_dict: Any, checkpoint_dir: Any) -> Any:
        # A queue for writers in other processes. There are none here, and upstream would start a process to make it.
        filesystem_async._results_queue = queue.Queue()
        return super().async_save(sharded_state_dict, checkpoint_dir, **_OWN_PLAN)


def _write(writer: FileSystemWriterAsync) -> list[Any]:
    """Write this rank's files, and let go of each file's tensors once it is written."""
    results: list[Any] = []
    transforms = [writer.transforms] if hasattr(writer, "transforms") else []
    buckets = writer.write_buckets or []
    while buckets:
        answers, counter = queue.Queue(), queue.Queue()
        counter.put(0)
        bucket = _in_host_memory(buckets.pop(0))
        FileSystemWriterAsync.write_preloaded_data(transforms, 0, bucket, answers, counter, True)
        _, answer = answers.get()
        if isinstance(answer, Exception):
            raise answer
        results += answer
    return results


def _in_host_memory(bucket: Any) -> Any:
    """One file's tensors at a time, so that a rank needs host memory for half of its shard at most."""
    file, key, (blobs, tensors) = bucket
    return file, key, (blobs, [(item, tensor.cpu()) for item, tensor in tensors])


def _make_empty(partial: Path) -> None:
    if world_rank() == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)


def _hash_own_files(partial: Path) -> dict[str, dict[str, int | str]]:
    return manifest.hash_files(partial, [path.name for path in partial.glob(f"__{world_rank()}_*")])


def _finish_files(partial: Path, trainer: str) -> dict[str, dict[str, int | str]]:
    """Write the loop's state; hashes of the files that belong to no rank."""
    write_whole(partial / TRAINER_FILE, trainer, durable=True)
    return manifest.hash_files(partial, [path.name for path in partial.iterdir() if not path.name.startswith("__")])


def _on_main(action: Callable[[], Any]) -> None:
    if world_rank() == 0:
        action()


def _say(problem: BaseException) -> str:
    """The system's own error where one is the cause: torch's writer hides a full disk behind an assertion."""
    error: BaseException | None = problem
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__ or error.__context__
    if error is None and "inline_container" in str(problem):  # torch's words for a file that ends too soon
        return f"the file could not be written to its end, as where no space is left on the device ({problem})"
    error = error or problem
    return f"{type(error).__name__}: {error}"
