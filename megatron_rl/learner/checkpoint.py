"""Checkpoints of the learner: Megatron's distributed format, readable under another layout, published atomically.

A checkpoint is a folder ``step_00000050``: Megatron's shards plus ``trainer.json`` (step counters and the small states
of the loop: sampler, scheduler, monitor). It is written under a temporary name and renamed when every rank is done, so
a folder with the final name is complete.
"""

from __future__ import annotations

import json
import queue
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.utils import unwrap_model

from megatron_rl.errors import InputError
from megatron_rl.learner.distributed import world_rank, world_size

TRAINER_FILE = "trainer.json"
WEIGHTS_FILE = "weights.json"  # marks a folder with weights alone, as `conversion.to_megatron` writes it

# fully_reshardable: optimizer state by parameter, so that another TP/EP/PP/DP can load it.
CONTENT_METADATA = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "distrib_optim_fully_reshardable_mem_efficient": False,
    "chained_optim_avoid_prefix": True,
    "singleton_local_shards": True,
}


def checkpoint_name(step: int) -> str:
    return f"step_{step:08d}"


def list_checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    return sorted(path for path in Path(folder).glob("step_*") if (path / TRAINER_FILE).is_file())


def save_checkpoint(
    folder: Path, step: int, model: GPTModel, optimizer: MegatronOptimizer, trainer_state: dict[str, Any]
) -> Path:
    """Write ``folder/step_…`` (every rank calls it) and return its path. An existing one of that step is replaced."""
    final = Path(folder) / checkpoint_name(step)
    partial = final.with_name(f".partial-{final.name}")
    if world_rank() == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    _barrier()
    # Upstream collects results through a Manager, for saves that go on in another process. It starts one even for a
    # save that is waited for, as here: seconds, and a second run of the main script. A plain queue serves.
    filesystem_async._results_queue = queue.Queue()
    _allocate_moments(optimizer)
    dist_checkpointing.save(
        _sharded_state(model, optimizer, is_loading=False), str(partial), content_metadata=CONTENT_METADATA
    )
    if world_rank() == 0:
        (partial / TRAINER_FILE).write_text(json.dumps(trainer_state, indent=1))
        if final.exists():
            shutil.rmtree(final)
        partial.rename(final)
    _barrier()
    return final


def load_checkpoint(path: Path, model: GPTModel, optimizer: MegatronOptimizer) -> dict[str, Any]:
    """Fill model and optimizer from ``path``, written under any layout; returns the trainer state."""
    if not (Path(path) / TRAINER_FILE).is_file():
        raise InputError(f"checkpoint {path}: no {TRAINER_FILE} in it; expected a complete folder step_…")
    state = _sharded_state(model, optimizer, is_loading=True)
    state = dist_checkpointing.load(state, str(path))
    unwrap_model(model).load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return json.loads((Path(path) / TRAINER_FILE).read_text())


def load_weights(path: Path, model: GPTModel, optimizer: MegatronOptimizer | None = None) -> None:
    """Fill ``model`` from the weights in ``path``, written under any layout; the optimizer's masters follow."""
    weights = unwrap_model(model).sharded_state_dict(metadata=dict(CONTENT_METADATA))
    unwrap_model(model).load_state_dict(dist_checkpointing.load({"model": weights}, str(path))["model"])
    if optimizer is not None:
        optimizer.reload_model_params()


def prune_checkpoints(folder: Path, keep_last: int) -> None:
    """Delete all but the newest ``keep_last`` complete checkpoints (0 keeps all)."""
    if world_rank() == 0 and keep_last > 0:
        for path in list_checkpoints(folder)[:-keep_last]:
            shutil.rmtree(path)


def _sharded_state(model: GPTModel, optimizer: MegatronOptimizer, is_loading: bool) -> dict[str, Any]:
    weights = unwrap_model(model).sharded_state_dict(metadata=dict(CONTENT_METADATA))
    return {
        "model": weights,
        "optimizer": optimizer.sharded_state_dict(weights, is_loading=is_loading, metadata=dict(CONTENT_METADATA)),
    }


def _allocate_moments(optimizer: MegatronOptimizer) -> None:
    """Give Adam the zeros that it starts from where no update was applied yet: Megatron cannot write what is absent."""
    for chained in optimizer.chained_optimizers:
        if getattr(chained, "is_stub_optimizer", False) or any(chained.optimizer.state.values()):
            continue
        chained.init_state_fn(chained.optimizer, chained.config)
        if isinstance(
            chained.optimizer, (torch.optim.Adam, torch.optim.AdamW)
        ):  # its own count; fused Adam counts per group
            for state in chained.optimizer.state.values():
                state.setdefault("step", torch.tensor(0.0))


def _barrier() -> None:
    if world_size() > 1:
        dist.barrier()
