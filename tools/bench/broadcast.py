"""Sending weights to a server by broadcast: processor time of the sending rank, against a memcpy of the same bytes.

    python -m tools.bench.broadcast [--experts 128] [--servers 1] [--dtype bf16] [--rounds 15]

A learner with random weights, one rank, and processes that take what it sends and drop it, over gloo on this machine.
`export` is the learner's stream alone, `send` packs and sends tensors that are there already, `push` does both;
`memcpy` copies every tensor into memory that is there. Rounds alternate; medians of processor time and of the rounds'
ratios. Receivers have processes of their own, whose time does not count.
"""

from __future__ import annotations

import argparse
import multiprocessing
import tempfile
import warnings
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from megatron_rl.learner.learner import Learner
from megatron_rl.rollout.servers.weight_broadcast import GroupError, GroupPlace, Receiver, Sender, WeightGroup
from tests.support.tiny import tiny_recipe
from tools.bench.lib.timing import alternate, median_ratio, medians
from tools.dev.make_tiny_checkpoint import build_model, build_tiny_config, save_checkpoint

warnings.filterwarnings("ignore")


def receive(place: GroupPlace, ended: Any) -> None:
    torch.set_num_threads(1)
    group = WeightGroup.join(place, place.rank)
    try:
        while True:
            receiver = Receiver(group)
            for _ in receiver:
                pass
            receiver.check()
            ended.release()
    except GroupError:  # the bench is over
        group.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--servers", type=int, default=1)
    parser.add_argument("--dtype", choices=("bf16", "fp16", "fp32"), default="bf16")
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(1)
    group = WeightGroup.open("127.0.0.1", "bench", 1 + options.servers, "gloo", 600.0)
    spawn = multiprocessing.get_context("spawn")
    ended = spawn.Semaphore(0)
    takers = [
        spawn.Process(target=receive, args=(replace(group.place, rank=rank), ended), daemon=True)
        for rank in range(1, 1 + options.servers)
    ]
    for taker in takers:
        taker.start()
    group.form()
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        config = build_tiny_config("qwen3_moe", "tiny", num_experts=options.experts, num_local_experts=options.experts)
        save_checkpoint(build_model(config), model)
        learner = Learner(tiny_recipe(model={"path": str(model)}, learner={"dtype": options.dtype}))
    sources = {name: tensor.clone() for name, tensor in learner.export_weights()}
    copies = {name: tensor.clone() for name, tensor in sources.items()}
    sender = Sender(group)

    def send(tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        sender.send(tensors)
        for _ in takers:  # the next update forgets what the store says of this one
            ended.acquire()

    times = alternate(
        options.rounds,
        {
            "memcpy": lambda: [copies[name].copy_(tensor) for name, tensor in sources.items()],
            "export": lambda: [None for _ in learner.export_weights()],
            "send": lambda: send(sources.items()),
            "push": lambda: send(learner.export_weights()),
        },
    )
    group.close()
    num_bytes = sum(tensor.nbytes for tensor in sources.values())
    print(f"{len(sources)} tensors, {num_bytes} bytes sent to {options.servers} servers")
    for name, median in medians(times).items():
        print(f"{name:<7} {1e3 * median:9.2f} ms, {median_ratio(times[name], times['memcpy']):7.2f} × memcpy")


if __name__ == "__main__":
    main()
