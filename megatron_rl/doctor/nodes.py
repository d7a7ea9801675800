"""Ranks and nodes of a job: how they meet, the GPU of each rank, one folder of runs and one time for all nodes."""

from __future__ import annotations

import json
import os
import shutil
import socket
import time
import uuid
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

from megatron_rl.doctor.checks import Outcome, Setting, failed, not_run, passed
from megatron_rl.doctor.machine import MOST_SKEW_S
from megatron_rl.process.devices import local_gpu, sharing

WAIT_S = 60.0  # for a peer


def open_store(rank: int) -> Any:
    from torch.distributed import TCPStore

    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return TCPStore(address, port, None, rank == 0, timeout=timedelta(seconds=2 * WAIT_S), wait_for_workers=False)


def until(condition: Callable[[], bool], seconds: float = WAIT_S) -> bool:
    """Wait until it holds; False where it does not in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


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
    """Fail if two ranks share a GPU. ``gpus``: each rank's GPU identifier, its node, and how many GPUs it sees."""
    if problem := sharing(gpus):
        fix = "Give each rank a GPU: CUDA_VISIBLE_DEVICES of a rank names all GPUs of its node, or its own alone."
        return failed(problem, fix)
    seen = sorted({count for _, _, count in gpus})
    return passed(f"{len(gpus)} ranks use {len(gpus)} GPUs; each sees {' or '.join(map(str, seen))} of its node's")


SEEN_S = 30.0  # network file systems keep old listings for some seconds


def together(setting: Setting) -> Outcome:
    """One process of each node takes part; the first rank's outcome counts."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    per_node = int(os.environ["LOCAL_WORLD_SIZE"])
    if int(os.environ["LOCAL_RANK"]):
        return not_run("the first rank of each node takes part")
    store, node, nodes = open_store(rank), rank // per_node, size // per_node
    if node == 0:
        store.set("token", uuid.uuid4().hex)
    folder = Path(setting.shared) / f".doctor-{store.get('token').decode()}"
    unseen = _write_and_look(store, folder, node, nodes)
    store.set(f"unseen/{node}", ",".join(map(str, unseen)))
    store.set(f"name/{node}", os.environ.get("SLURMD_NODENAME") or socket.gethostname())
    if node:
        store.get(f"ping/{node}")
        store.set(f"pong/{node}", repr(time.time()))
        store.set(f"bye/{node}", "")
        return not_run("the first rank reports")
    try:
        names = {i: store.get(f"name/{i}").decode() for i in range(nodes)}
        missing = {names[i]: text.decode() for i in range(nodes) if (text := store.get(f"unseen/{i}"))}
        skews = {names[i]: _skew(store, i) for i in range(1, nodes)}
        until(lambda: store.check([f"bye/{i}" for i in range(1, nodes)]) if nodes > 1 else True, SEEN_S)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return judge(folder.parent, names, missing, skews)


def _write_and_look(store: Any, folder: Path, node: int, nodes: int) -> list[int]:
    """Leave a file for the others, and return the nodes whose files do not appear here in time."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / str(node)).write_text(f"{folder.name} {node}")
    except OSError as error:
        print(f"{folder}: {error}")
    store.set(f"written/{node}", "")
    until(lambda: store.check([f"written/{i}" for i in range(nodes)]), SEEN_S)
    until(lambda: not _unseen(folder, nodes), SEEN_S)
    return _unseen(folder, nodes)


def _unseen(folder: Path, nodes: int) -> list[int]:
    unseen = []
    for i in range(nodes):
        try:
            if (folder / str(i)).read_text() == f"{folder.name} {i}":
                continue
        except OSError:
            pass
        unseen.append(i)
    return unseen


def _skew(store: Any, node: int) -> float:
    """Seconds by which a node's clock is at least ahead (behind: negative); 0 where the way there explains it."""
    before = time.time()
    store.set(f"ping/{node}", "")
    there = float(store.get(f"pong/{node}"))
    return min(there - before, 0.0) + max(there - time.time(), 0.0)


def judge(folder: Path, names: dict[int, str], missing: dict[str, str], skews: dict[str, float]) -> Outcome:
    """Judge the shared folder. ``missing``: node → nodes whose files it does not see; ``skews``: node → seconds off."""
    figures = {"clock_skew_s": skews} if skews else {}
    if missing:
        seen = {n: ", ".join(names[int(i)] for i in which.split(",")) for n, which in missing.items()}
        problem = "; ".join(f"{name} does not see files of {others}" for name, others in seen.items())
        fix = "Put runs, model and checkout on a file system that all nodes mount; --shared names the folder."
        return failed(f"{folder}: {problem}", fix, **figures)
    if late := {name: skew for name, skew in skews.items() if abs(skew) > MOST_SKEW_S}:
        problem = ", ".join(f"{name} {skew:+.1f} s" for name, skew in late.items())
        return failed(f"clocks differ from {names[0]}'s: {problem}", "Start chrony or ntpd on these nodes.", **figures)
    worst = max(map(abs, skews.values()), default=0.0)
    return passed(
        f"seen by {len(names)} of {len(names)} nodes: {folder}; clocks at most {worst:.2f} s apart", **figures
    )
