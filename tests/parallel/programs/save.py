"""What the ranks of test_save_faults.py run: a save that fails on one of them, and a scorer that does."""

import errno
import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_rl.checkpoint import manifest
from megatron_rl.checkpoint import save as checkpoint
from megatron_rl.config.learner import ParallelConfig
from megatron_rl.errors import Fault, InputError
from megatron_rl.learner.learner import Learner
from megatron_rl.learner.process_groups import initialize
from megatron_rl.process.ranks import on_main_rank, together, world_rank
from tests.support.patience import PATIENCE_S
from tests.support.tiny import stored_rollouts, tiny_recipe

PLACES = {
    "state on rank 1": (checkpoint, "sharded_state", 1),
    "common.pt on rank 0": (checkpoint, "_write_common", 0),
    "shards on rank 1": (checkpoint, "_write", 1),
    "index on rank 0": (checkpoint.FileSystemWriterAsync, "finish", 0),
    "manifest on rank 0": (manifest, "write_manifest", 0),
}


def _full(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def save_while_one_rank_cannot(folder: str, in_background: bool) -> dict[str, Any]:
    """Messages of failed saves by place, seconds of the slowest, and what a save after them holds."""
    learner = Learner(tiny_recipe(learner={"parallel": {"tensor": 2, "expert": 2}}))
    learner.update(stored_rollouts(0))
    learner.step, results, slowest = 1, {}, 0.0
    learner.save(Path(folder), {})
    for place, (owner, name, rank) in PLACES.items():
        own = getattr(owner, name)
        if world_rank() == rank:
            setattr(owner, name, _full)
        learner.step, start = 2, time.monotonic()
        try:
            learner.begin_save(Path(folder), {}, keep_last=1, in_background=in_background).finish()
        except checkpoint.SaveError as error:
            results[place] = str(error)
        slowest = max(slowest, time.monotonic() - start)
        setattr(owner, name, own)
        dist.barrier()
        results[place + ", left"] = sorted(path.name for path in Path(folder).iterdir())
        dist.barrier()
    before = {name: tensor.clone() for name, tensor in learner.export_weights()}
    save = learner.begin_save(Path(folder), {"note": "kept"}, keep_last=1, in_background=in_background)
    if in_background:
        learner.update(stored_rollouts(1))  # of what it writes, nothing may change
    path = save.finish()
    learner.update(stored_rollouts(1))
    state = learner.load(path)
    after = dict(learner.export_weights())
    same = all(torch.equal(before[name], after[name]) for name in before)
    left = sorted(path.name for path in Path(folder).iterdir())
    return {"found": results, "slowest": slowest, "same": same, "state": state, "left": left}


def fail_on_one_rank() -> list[str]:
    """What each rank hears of an action that failed on another, or on rank 0 alone."""
    said = []
    for rank, kind in ((1, RuntimeError), (0, InputError)):

        def action(rank=rank, kind=kind):
            if world_rank() == rank:
                raise kind("out of order")
            return "done"

        try:
            together("rewards", action)
        except (Fault, InputError) as error:
            said.append(f"{type(error).__name__}: {error}")
    assert together("all is well", lambda: "done") == "done"
    try:
        on_main_rank(lambda: (_ for _ in ()).throw(InputError("in use")))
    except InputError as error:
        said.append(str(error))
    assert on_main_rank(lambda: world_rank()) == 0
    return said


def _meet() -> dist.Store:
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), None, False)
    store.add("here", 1)
    while store.add("here", 0) < int(os.environ["WORLD_SIZE"]):
        time.sleep(0.02)
    return store


def wait_for_a_frozen_rank(seconds: float) -> dict[str, str]:
    """Group → what rank 0 hears in a collective that rank 1 does not join; rank 1 leaves when it has heard it."""
    store = _meet()  # joining has the same limit, and imports take longer on a busy machine
    initialize(ParallelConfig(tensor=2, timeout_minutes=seconds / 60), "cpu", seed=0)
    results = {}
    if dist.get_rank() == 1:
        store.wait(["heard"], timedelta(seconds=PATIENCE_S))
    else:
        for name, group in (("world", None), ("tensor", parallel_state.get_tensor_model_parallel_group())):
            try:
                dist.all_reduce(torch.ones(1), group=group)
            except RuntimeError as error:
                results[name] = str(error)
        store.set("heard", "")
    dist.destroy_process_group()
    return results
