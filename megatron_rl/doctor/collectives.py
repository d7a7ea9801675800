"""All-reduce and all-to-all between neighbouring ranks and over all of them: are they right, and how fast?

Neighbours in a ring measure in groups of their own, so that a rank which cannot be reached takes no other pair down.
NCCL between GPUs, else gloo. Bandwidths are those of the bus, by which all-reduce and all-to-all of any size compare.
"""

from __future__ import annotations

import os
import socket
import statistics
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from megatron_rl.doctor.checks import Outcome, Setting, failed, not_run, passed
from megatron_rl.doctor.nodes import WAIT_S, open_store, until
from megatron_rl.process.devices import barrier_devices, local_gpu

SLOW = 0.5  # of the median link of its kind: links of one fabric differ by percents, one that fell back by factors
BYTES = {"cuda": 64 << 20, "cpu": 4 << 20}
REPEATS = 5
KINDS = ("all_reduce", "all_to_all")
_EXACT = 1024  # values stay below 2**24 in fp32, and sums of them are exact

Link = dict[str, Any]  # {"ranks", "kind": "in a node" | "between nodes" | "all", "problem", "all_reduce", "all_to_all"}


def ring(size: int) -> list[list[tuple[int, int]]]:
    """Return pairs of neighbours in rounds; no rank is in two pairs of a round."""
    pairs = [(i, (i + 1) % size) for i in range(size if size > 2 else 1)]
    last = pairs[-1:] if len(pairs) % 2 and len(pairs) > 1 else []
    rest = pairs[: len(pairs) - len(last)]
    return [one_round for one_round in (rest[0::2], rest[1::2], last) if one_round]


def judge(links: list[Link], compare_speed: bool) -> list[str]:
    """What is wrong: links that failed or answered wrongly, and those far slower than the others of their kind."""
    bad = [f"{link['ranks']}: {link['problem']}" for link in links if link["problem"]]
    if not compare_speed:  # over loopback the processes compete for cores
        return bad
    for kind in {link["kind"] for link in links}:
        alike = [link for link in links if link["kind"] == kind and not link["problem"]]
        for name in KINDS if len(alike) > 2 else ():
            typical = statistics.median(link[name] for link in alike)
            bad += [
                f"{link['ranks']}: {name} {link[name]:.2f} GiB/s, the median {kind} is {typical:.2f}"
                for link in alike
                if link[name] < SLOW * typical
            ]
    return bad


def collectives(setting: Setting) -> Outcome:
    """Every rank's part; the first rank's outcome counts."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if size == 1:
        return not_run("one rank: there is no other")
    store = open_store(rank)
    store.set(f"node/{rank}", os.environ.get("SLURMD_NODENAME") or socket.gethostname())
    measure = Measurement(store, setting.device)
    for pair in [pair for one_round in ring(size) for pair in one_round if rank in pair]:
        measure(f"{pair[0]}-{pair[1]}", pair.index(rank), 2)
    measure("all", rank, size)
    store.set(f"bye/{rank}", "")
    if rank:
        return not_run("the first rank reports")
    links = [_link(store, f"{a}-{b}", (a, b)) for one_round in ring(size) for a, b in one_round]
    links.append(_link(store, "all", tuple(range(size))))
    until(lambda: store.check([f"bye/{i}" for i in range(size)]))  # the store ends with this process
    return _outcome(links, size, setting.device)


def _outcome(links: list[Link], size: int, device: str) -> Outcome:
    backend = "NCCL" if device == "cuda" else "gloo"
    table = {link["ranks"]: {name: link[name] for name in ("kind", *KINDS)} for link in links}
    figures = {"GiB/s": table, "mebibytes": BYTES[device] >> 20}
    if bad := judge(links, device == "cuda"):
        more = f" and {len(bad) - 4} more" if len(bad) > 4 else ""
        shown = "; ".join(bad[:4]) + more
        fix = (
            "NCCL_DEBUG=INFO shows the transport of each link; name the fabric with NCCL_IB_HCA and the interface with "
            "NCCL_SOCKET_IFNAME. Between GPUs of a node: nvidia-smi topo -m, nvidia-smi nvlink -s. A node whose links "
            "are all bad is to be left out: --exclude."
        )
        return failed(f"{backend}, {size} ranks: {shown}", fix, **figures)
    slowest = min((link for link in links if link["kind"] != "all"), key=lambda link: link["all_reduce"])
    whole = links[-1]
    return passed(
        f"{backend}, {size} ranks: sums and exchanges are exact; slowest pair {slowest['ranks']} "
        f"{slowest['all_reduce']:.2f} GiB/s, all {whole['all_reduce']:.2f} (all-to-all {whole['all_to_all']:.2f})",
        **figures,
    )


class Measurement:
    """This rank's part in groups of ranks; the slower or failing end of each counts."""

    def __init__(self, store: Any, device: str) -> None:
        import torch

        self.store, self.device = store, torch.device("cpu")
        if device == "cuda":
            self.device = torch.device("cuda", local_gpu())
            torch.cuda.set_device(self.device)
        self.length = BYTES[device] // 4

    def __call__(self, name: str, rank: int, size: int) -> None:
        import torch.distributed as dist

        problem, speeds = "", dict.fromkeys(KINDS, 0.0)
        try:
            dist.init_process_group(
                "nccl" if self.device.type == "cuda" else "gloo",
                store=dist.PrefixStore(name, self.store),
                rank=rank,
                world_size=size,
                timeout=timedelta(seconds=WAIT_S),
                device_id=self.device if self.device.type == "cuda" else None,
            )
            for kind, call in (("all_reduce", all_reduce), ("all_to_all", all_to_all)):
                right, seconds = call(self.length, rank, size, self.device)
                problem = problem or ("" if right else f"{kind} gave wrong values")
                share = (2 if kind == "all_reduce" else 1) * (size - 1) / size
                speeds[kind] = share * 4 * self.length / seconds / 2**30
        except RuntimeError as error:  # DistError and its kin are RuntimeErrors
            problem = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
        self.store.set(f"link/{name}/{rank}", "|".join([*(str(speeds[kind]) for kind in KINDS), problem]))


def all_reduce(length: int, rank: int, size: int, device: Any) -> tuple[bool, float]:
    """Whether the sum of [length] values is exact, and the median time."""
    import torch
    import torch.distributed as dist

    base = (torch.arange(length, device=device) % _EXACT).float()
    values = torch.empty_like(base)

    def call() -> None:
        dist.all_reduce(values)

    seconds = _timed(call, values, lambda: values.copy_(base).add_(rank))
    return bool(torch.equal(values, size * base + size * (size - 1) // 2)), seconds


def all_to_all(length: int, rank: int, size: int, device: Any) -> tuple[bool, float]:
    """Whether each rank got every other's part, and the median time."""
    import torch
    import torch.distributed as dist

    part = length // size
    base = (torch.arange(part, device=device) % _EXACT).float()
    # What rank i sends to rank j is base + i * size + j.
    sent = torch.cat([base + rank * size + j for j in range(size)])
    received = torch.empty_like(sent)

    def call() -> None:
        dist.all_to_all_single(received, sent)

    seconds = _timed(call, received, lambda: received.zero_())
    return bool(torch.equal(received, torch.cat([base + i * size + rank for i in range(size)]))), seconds


def _timed(call: Callable[[], None], values: Any, reset: Callable[[], Any]) -> float:
    import torch.distributed as dist

    times, device_ids = [], barrier_devices(values.device)
    for _ in range(1 + REPEATS):  # the first one sets up connections
        reset()
        values[0].item()
        dist.barrier(device_ids=device_ids)
        start = time.perf_counter()
        call()
        values[0].item()  # waits for the GPU
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def _link(store: Any, name: str, ranks: tuple[int, ...]) -> Link:
    """Return the worse of what the two ends of a link measured."""
    ends = range(len(ranks)) if name == "all" else range(2)
    nodes = {store.get(f"node/{rank}") if store.check([f"node/{rank}"]) else b"?" for rank in ranks}
    kind = "all" if name == "all" else "in a node" if len(nodes) == 1 else "between nodes"
    label = "all" if name == "all" else f"ranks {name}"
    if kind == "between nodes":
        label += f" ({', '.join(sorted(node.decode() for node in nodes))})"
    keys = [f"link/{name}/{end}" for end in ends]
    if not until(lambda: store.check(keys)):
        missing = [str(rank) for rank, key in zip(ranks, keys) if not store.check([key])]
        problem = f"no answer of rank {', '.join(missing[:8])}"
        return {"ranks": label, "kind": kind, "problem": problem} | dict.fromkeys(KINDS, 0.0)
    answers = [store.get(key).decode().split("|", len(KINDS)) for key in keys]
    speeds = {kind: min(float(end[i]) for end in answers) for i, kind in enumerate(KINDS)}
    return {"ranks": label, "kind": kind, "problem": next((end[-1] for end in answers if end[-1]), "")} | speeds
