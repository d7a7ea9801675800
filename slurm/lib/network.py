"""network.py DIR NODE…: run by srun once per node, before the ranks. Measures the network and names slow nodes.

Neighbours in a ring of the nodes time an all_reduce between the two of them, each pair in a group of its own: a node
that cannot be reached takes nobody else down. A node is as good as its better link, so that a bad one does not make its
neighbours look bad. If all are well, one all_reduce goes over all nodes. NCCL between the first GPUs, else gloo.

The first node writes DIR/network: lines `bad NODE REASON`, then a line `summary TEXT`.
Environment: MASTER_ADDR, MASTER_PORT, Slurm's variables of a step, and those of ours that slurm/README.md documents.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from datetime import timedelta
from pathlib import Path

from megatron_rl.doctor.rates import ring
from megatron_rl.process.devices import barrier_devices

SLOW = 0.5  # of the median node: links of one fabric differ by percents, a link that fell back to another by factors
REPEATS = 5

Links = dict[tuple[int, int], float]  # pair of neighbours → GiB/s; 0: no connection, or a wrong sum


def judge(links: Links, nodes: list[str], floor: float) -> dict[str, str]:
    """Why a node should not be used, for those that should not. ``floor``: least GiB/s, 0 for none."""
    best = {i: max(speed for pair, speed in links.items() if i in pair) for i in range(len(nodes))}
    typical = statistics.median(best.values())
    bad = {}
    for i, speed in best.items():
        if speed == 0:
            bad[nodes[i]] = "no connection with its neighbours"
        elif speed < max(floor, SLOW * typical):
            bad[nodes[i]] = f"{speed:.2f} GiB/s (median node {typical:.2f}, MRL_NETWORK_MIN_GIB_S {floor:g})"
    for (a, b), speed in links.items():
        if speed == 0 and nodes[a] not in bad and nodes[b] not in bad:
            bad[nodes[a]], bad[nodes[b]] = f"no connection with {nodes[b]}", f"no connection with {nodes[a]}"
    return bad


def speed_of(store, name: str, rank: int, size: int) -> float:
    """Bus bandwidth of an all_reduce over ``size`` processes, GiB/s; 0 where it fails or sums wrongly."""
    import torch
    import torch.distributed as dist

    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
    try:
        dist.init_process_group(
            "nccl" if on_gpu else "gloo",
            store=dist.PrefixStore(name, store),
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=seconds()),
            device_id=device if on_gpu else None,
        )
        values = torch.ones(mebibytes() * 2**18, device=device)
        times = []
        for _ in range(1 + REPEATS):  # the first one sets up connections
            values.fill_(1.0)
            dist.barrier(device_ids=barrier_devices(device))
            start = time.perf_counter()
            dist.all_reduce(values)
            values[0].item()  # waits for the GPU
            times.append(time.perf_counter() - start)
        if not bool((values == size).all()):
            return 0.0
        return 2 * (size - 1) / size * values.nbytes / statistics.median(times[1:]) / 2**30
    except RuntimeError as error:  # DistError and its kin are RuntimeErrors
        print(f"{name}: {error}", file=sys.stderr)
        return 0.0
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def seconds() -> float:
    return float(os.environ.get("MRL_NETWORK_SECONDS", 60))


def mebibytes() -> int:
    return int(os.environ.get("MRL_NETWORK_MIB", 64))


def measure(store, rank: int, num_nodes: int) -> None:
    """This node's part of every round; the lower end of a pair leaves the figure in the store."""
    for pair in [pair for round_pairs in ring(num_nodes) for pair in round_pairs if rank in pair]:
        speed = speed_of(store, f"pair {pair[0]}-{pair[1]}", pair.index(rank), 2)
        store.set(f"link/{pair[0]}-{pair[1]}/{pair.index(rank)}", str(speed))


def collect(store, num_nodes: int) -> Links:
    """Figures of all links, as the slower end saw them."""
    links = {}
    for pair in [pair for round_pairs in ring(num_nodes) for pair in round_pairs]:
        links[pair] = min(float(store.get(f"link/{pair[0]}-{pair[1]}/{end}")) for end in (0, 1))
    return links


def arrived(store, num_nodes: int) -> list[int]:
    """Which nodes have reached the store in time."""
    deadline = time.monotonic() + seconds()
    while time.monotonic() < deadline and not store.check([f"here/{i}" for i in range(num_nodes)]):
        time.sleep(0.1)
    return [i for i in range(num_nodes) if store.check([f"here/{i}"])]


def write(folder: Path, bad: dict[str, str], summary: str) -> None:
    lines = [f"bad {node} {reason}" for node, reason in bad.items()] + [f"summary {summary}"]
    (folder / ".network").write_text("\n".join(lines) + "\n")
    (folder / ".network").rename(folder / "network")


def lead(store, nodes: list[str], folder: Path) -> None:
    """The first node's part: who is there, what the links say, the verdict."""
    arrivals = arrived(store, len(nodes))
    absent = {nodes[i]: "does not reach the first node" for i in range(len(nodes)) if i not in arrivals}
    store.set("start", "" if absent else "yes")
    if absent:
        write(folder, absent, "not measured")
        return
    measure(store, 0, len(nodes))
    links = collect(store, len(nodes))
    bad = judge(links, nodes, float(os.environ.get("MRL_NETWORK_MIN_GIB_S", 0)))
    store.set("verdict", "bad" if bad else "good")
    summary = f"slowest link {min(links.values()):.2f} GiB/s"
    if not bad:
        speed = speed_of(store, "all", 0, len(nodes))
        summary += f", all_reduce of {mebibytes()} MiB over {len(nodes)} nodes {speed:.2f} GiB/s"
        if speed == 0:
            bad = dict.fromkeys(nodes, "pairs of nodes work, all together do not")
    write(folder, bad, summary)
    for i in range(1, len(nodes)):
        store.get(f"bye/{i}")  # the store ends with this process


def follow(store, rank: int, num_nodes: int) -> None:
    store.set(f"here/{rank}", "")
    if store.get("start") == b"yes":
        measure(store, rank, num_nodes)
        if store.get("verdict") == b"good":
            speed_of(store, "all", rank, num_nodes)
        store.set(f"bye/{rank}", "")


def main() -> None:
    from torch.distributed import TCPStore

    rank, num_nodes = int(os.environ["SLURM_PROCID"]), int(os.environ["SLURM_NTASKS"])
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    # A node may be in every round, and wait for a peer that is late.
    wait = timedelta(seconds=4 * seconds())
    store = TCPStore(address, port, None, rank == 0, timeout=wait, wait_for_workers=False)
    if rank == 0:
        store.set("here/0", "")
        lead(store, sys.argv[2:], Path(sys.argv[1]))
    else:
        follow(store, rank, num_nodes)


if __name__ == "__main__":
    main()
