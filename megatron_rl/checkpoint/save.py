"""Checkpoints of the learner: Megatron's distributed format, readable under another layout, published atomically.

A checkpoint is a folder ``step_00000050``: Megatron's shards, ``trainer.json`` (step counters and the small states of
the loop: sampler, scheduler, monitor) and ``manifest.json`` (see `manifest`). A rank on which a save fails says so to
the others before any of them goes on: `SaveError` on all ranks, nothing published, older checkpoints as they were.
"""

from __future__ import annotations

import json
import queue
import shutil
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, TypeVar

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.base import StrategyAction, register_default_strategy
from megatron.core.dist_checkpointing.strategies.common import TorchCommonSaveStrategy
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.utils import unwrap_model

from megatron_rl.checkpoint import manifest
from megatron_rl.checkpoint.foreign import no_foreign_code
from megatron_rl.checkpoint.manifest import TRAINER_FILE, checkpoint_name
from megatron_rl.checkpoint.names import EXTRA_STATE
from megatron_rl.errors import Fault, InputError
from megatron_rl.process.ranks import broadcast_object, gather_objects, together, world_rank, world_size

WEIGHTS_FILE = "weights.json"  # marks a folder with weights alone, as `conversion.to_megatron` writes it

T = TypeVar("T")
Together = Callable[[Callable[[], Any]], Any]
"""Runs a part of a save that can fail on one rank alone, so that all ranks hear of it: `ranks.together`."""

# fully_reshardable: optimizer state by parameter, so that another TP/EP/PP/DP can load it.
CONTENT_METADATA = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "distrib_optim_fully_reshardable_mem_efficient": False,
    "chained_optim_avoid_prefix": True,
    "singleton_local_shards": True,
}


class SaveError(Fault):
    """A checkpoint could not be written; raised on every rank. The run itself is unharmed."""


def save_checkpoint(
    folder: Path,
    step: int,
    model: GPTModel,
    optimizer: MegatronOptimizer,
    trainer_state: dict[str, Any],
    values: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor,
    *,
    keep_last: int = 0,
    protected: Collection[int] = (),
) -> Path:
    """Write ``folder/step_…`` (every rank calls it) and return its path. An existing one of that step is replaced.

    ``values``: a tensor of the model → its values, wherever they are; the optimizer's own are read as they are.
    Then deletes all older checkpoints but the newest ``keep_last`` (0 keeps all) and those of the steps ``protected``.
    Raises `SaveError` on every rank where one of them could not write its part.
    """
    final = Path(folder) / checkpoint_name(step)
    partial = manifest.partial_path(final)

    def all_ranks(action: Callable[[], T]) -> T:
        return together(f"the checkpoint of step {step} could not be written", action, fault=SaveError, describe=_say)

    _allocate_moments(optimizer)
    try:
        all_ranks(lambda: _make_empty(partial))
        dist_checkpointing.save(
            _with_values(_sharded_state(model, optimizer, is_loading=False), values),
            str(partial),
            _Strategy(all_ranks),
            content_metadata=CONTENT_METADATA,
        )
        trainer = json.dumps(trainer_state, indent=1)
        hashes = all_ranks(lambda: _finish_files(partial, trainer))
        files = {name: about for share in gather_objects(hashes) for name, about in share.items()}
        all_ranks(lambda: _on_main(lambda: _publish(partial, final, files, keep_last, protected)))
    except SaveError:
        _on_main(lambda: shutil.rmtree(partial, ignore_errors=True))
        raise
    return final


def load_checkpoint(path: Path, model: GPTModel, optimizer: MegatronOptimizer, verify: bool = True) -> dict[str, Any]:
    """Fill model and optimizer from ``path``, written under any layout; returns the trainer state. Collective.

    ``verify``: compare every file with the hashes of the manifest first. Raises `InputError` where the checkpoint is
    not whole, or holds a pickle of anything but Megatron's and torch's descriptions of tensors.
    """
    path = Path(path)
    if verify and (problem := damage(path)):
        raise InputError(f"checkpoint {path}: {problem}; expected a complete folder step_…, as a run writes it")
    wanted = _sharded_state(model, optimizer, is_loading=True)
    wanted["model"] = _without_extra_state(wanted["model"])
    with no_foreign_code(path):
        state = dist_checkpointing.load(wanted, str(path))
    _fill(model, state["model"])
    _load_optimizer(optimizer, state["optimizer"])
    return json.loads((path / TRAINER_FILE).read_text())


def load_weights(path: Path, model: GPTModel, optimizer: MegatronOptimizer | None = None) -> None:
    """Fill ``model`` from the weights in ``path``, written under any layout; the optimizer's masters follow.

    Collective. Raises `InputError` where ``path`` has a manifest of `conversion.to_megatron` and differs from it.
    """
    has_manifest = all((Path(path) / name).is_file() for name in (WEIGHTS_FILE, manifest.MANIFEST_FILE))
    if has_manifest and (problem := damage(Path(path), WEIGHTS_FILE)):
        raise InputError(f"checkpoint {path}: {problem}; write it again with to-megatron")
    weights = unwrap_model(model).sharded_state_dict(metadata=dict(CONTENT_METADATA))
    with no_foreign_code(Path(path)):
        state = dist_checkpointing.load({"model": _without_extra_state(weights)}, str(path))
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


def _say(problem: BaseException) -> str:
    """The system's own error where one is the cause: torch's writer hides a full disk behind an assertion."""
    found: BaseException | None = problem
    while found is not None and not isinstance(found, OSError):
        found = found.__cause__ or found.__context__
    found = found or problem
    return f"{type(found).__name__}: {found}"


class _Common(TorchCommonSaveStrategy):
    """Writes common.pt on rank 0, as Megatron does, and keeps an error until all ranks meet in `_Strategy.save`."""

    problem: Exception | None = None

    def save_common(self, common_state_dict: Any, checkpoint_dir: Any) -> None:
        self.problem = None
        try:
            super().save_common(common_state_dict, checkpoint_dir)
        except Exception as error:  # noqa: BLE001 - the other ranks are on their way to the next collective
            self.problem = error

    def report(self) -> None:
        if self.problem is not None:
            raise self.problem


_common = _Common("torch", 1)
register_default_strategy(StrategyAction.SAVE_COMMON, "torch", 1, _common)


class _Strategy(TorchDistSaveShardedStrategy):
    """Megatron's format, written by this process.

    Upstream forks a writer for each file and waits for it without a limit, so that a killed writer stops the run. Where
    rank 0 cannot write the index, upstream leaves the other ranks waiting.
    """

    def __init__(self, all_ranks: Together):
        super().__init__("torch_dist", 1)
        self._all_ranks = all_ranks

    def _get_save_and_finalize_callbacks(self, writer: Any, prepared: Any) -> Any:
        return writer, prepared[1]

    def save(self, sharded_state_dict: Any, checkpoint_dir: Any) -> None:
        self._all_ranks(_common.report)
        # A queue for writers in other processes. There are none here, and upstream would start a process to make it.
        filesystem_async._results_queue = queue.Queue()
        writer, index = self.async_save(sharded_state_dict, checkpoint_dir)
        results = gather_objects(self._all_ranks(lambda: _write(writer)))
        config = CheckpointingConfig(self.backend, self.version)
        self._all_ranks(lambda: _on_main(lambda: (writer.finish(index, results), save_config(config, checkpoint_dir))))


def _write(writer: FileSystemWriterAsync) -> list[Any]:
    results: list[Any] = []
    transforms = [writer.transforms] if hasattr(writer, "transforms") else []
    for bucket in writer.write_buckets or []:
        answers, counter = queue.Queue(), queue.Queue()
        counter.put(0)
        FileSystemWriterAsync.write_preloaded_data(transforms, 0, _in_host_memory(bucket), answers, counter, True)
        _, found = answers.get()
        if isinstance(found, Exception):
            raise found
        results += found
    return results


def _in_host_memory(bucket: Any) -> Any:
    """One file's tensors at a time, so that a rank needs host memory for half of its shard at most."""
    file, key, (blobs, tensors) = bucket
    return file, key, (blobs, [(item, tensor.cpu()) for item, tensor in tensors])


def _make_empty(partial: Path) -> None:
    if world_rank() == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)


def _finish_files(partial: Path, trainer: str) -> dict[str, dict[str, int | str]]:
    """Hashes of the files that this rank wrote. Rank 0 also hashes the files that belong to no rank."""
    names = [path.name for path in partial.glob(f"__{world_rank()}_*")]
    if world_rank() == 0:
        manifest.write_durably(partial / TRAINER_FILE, trainer)
        names += [path.name for path in partial.iterdir() if not path.name.startswith("__")]
    return manifest.hash_files(partial, names)


def _publish(partial: Path, final: Path, files: dict, keep_last: int, protected: Collection[int]) -> None:
    manifest.write_manifest(partial, files)
    manifest.publish(partial, final)
    manifest.prune(final.parent, keep_last, protected)


def _on_main(action: Callable[[], Any]) -> None:
    if world_rank() == 0:
        action()


def _sharded_state(model: GPTModel, optimizer: MegatronOptimizer, is_loading: bool) -> dict[str, Any]:
    weights = unwrap_model(model).sharded_state_dict(metadata=dict(CONTENT_METADATA))
    return {
        "model": weights,
        "optimizer": optimizer.sharded_state_dict(weights, is_loading=is_loading, metadata=dict(CONTENT_METADATA)),
    }


def _with_values(state: dict[str, Any], values: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, Any]:
    """``state`` with `values` in the place of its tensors."""
    for sharded in nested_values(state):
        if isinstance(sharded, ShardedTensor | ShardedTensorFactory) and sharded.data is not None:
            sharded.data = values(sharded.data)
    return state


def _without_extra_state(weights: dict[str, Any]) -> dict[str, Any]:
    """The tensors alone. The states of FP8, which nothing here uses, are empty, and each kind of layer has others:
    TransformerEngine's norms want one that Megatron's own norms do not write."""
    return {name: tensor for name, tensor in weights.items() if EXTRA_STATE not in name}


def _fill(model: GPTModel, tensors: dict[str, Any]) -> None:
    """Load ``tensors``, all of the model's and no others; `RuntimeError` names those that differ."""
    found = unwrap_model(model).load_state_dict(tensors, strict=False)
    missing = [name for name in found.missing_keys if EXTRA_STATE not in name]
    if missing or found.unexpected_keys:
        raise RuntimeError(f"the checkpoint lacks {missing} and has {list(found.unexpected_keys)} beside the model's")


def _load_optimizer(optimizer: MegatronOptimizer, state: dict[str, Any]) -> None:
    """Load ``state``, which torch's Adam wrote or TransformerEngine's: settings that only one of them has stay as they
    were, and the number of steps is a whole number for TransformerEngine's kernel."""
    inner = [
        chained.optimizer
        for chained in optimizer.chained_optimizers
        if not getattr(chained, "is_stub_optimizer", False)
    ]
    own = [[{k: v for k, v in group.items() if k != "step"} for group in adam.param_groups] for adam in inner]
    optimizer.load_state_dict(state)
    for adam, settings in zip(inner, own, strict=True):
        for group, kept in zip(adam.param_groups, settings, strict=True):
            for key, value in kept.items():
                group.setdefault(key, value)
            if "step" in group and not isinstance(adam, torch.optim.Adam | torch.optim.AdamW):
                group["step"] = int(group["step"])


def _allocate_moments(optimizer: MegatronOptimizer) -> None:
    """Give Adam its initial zeros where no update has been applied: Megatron cannot write absent state."""
    for chained in optimizer.chained_optimizers:
        if getattr(chained, "is_stub_optimizer", False) or any(chained.optimizer.state.values()):
            continue
        chained.init_state_fn(chained.optimizer, chained.config)
        if isinstance(
            chained.optimizer, (torch.optim.Adam, torch.optim.AdamW)
        ):  # torch counts steps by parameter, fused Adam by group
            for state in chained.optimizer.state.values():
                state.setdefault("step", torch.tensor(0.0))
