"""Which GPU does each rank use?"""

from __future__ import annotations

import json
import os
import socket

from megatron_rl.doctor.outcome import Outcome, failed, not_run, passed
from megatron_rl.doctor.rendezvous import open_store, until
from megatron_rl.doctor.setting import Setting
from megatron_rl.process.devices import local_gpu, sharing


def binding(setting: Setting) -> Outcome:
    """Every rank has a GPU of its own, by LOCAL_RANK and CUDA_VISIBLE_DEVICES; the first rank's outcome counts."""
    import torch

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    index = local_gpu()
    node = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    store = open_store(rank)
    store.set(
        f"gpu/{rank}", json.dumps([str(torch.cuda.get_device_properties(index).uuid), node, torch.cuda.device_count()])
    )
    if rank:
        return not_run("the first rank reports")
    keys = [f"gpu/{i}" for i in range(size)]
    if not until(lambda: store.check(keys)):
        missing = [str(i) for i, key in enumerate(keys) if not store.check([key])]
        return failed(f"no answer of rank {', '.join(missing[:8])}", "See the logs of these ranks.")
    return judge_binding([tuple(json.loads(store.get(key))) for key in keys])


def judge_binding(gpus: list[tuple[str, str, int]]) -> Outcome:
    """``gpus``: for each rank its GPU's identifier, its node and how many GPUs it sees."""
    if problem := sharing(gpus):
        fix = "Give each rank a GPU: CUDA_VISIBLE_DEVICES of a rank names all GPUs of its node, or its own alone."
        return failed(problem, fix)
    seen = sorted({count for _, _, count in gpus})
    return passed(f"{len(gpus)} ranks use {len(gpus)} GPUs; each sees {' or '.join(map(str, seen))} of its node's")
