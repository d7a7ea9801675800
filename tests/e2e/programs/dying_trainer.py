"""A trainer that dies while it sends weights. Arguments: a checkpoint, the servers' token, and their addresses."""

import asyncio
import os
import signal
import sys
import threading
from dataclasses import replace
from pathlib import Path

import torch

from megatron_rl.checkpoint.hf_folder import HFFolder
from megatron_rl.rollout.servers.client import ServerClient, Weights
from megatron_rl.rollout.servers.rendezvous import Address
from megatron_rl.rollout.servers.weight_broadcast import Sender, WeightGroup


async def push(url: str, token: str, weights: Weights) -> None:
    await ServerClient(Address(url, url), token, 60.0).push(weights)


def main(checkpoint: str, token: str, *urls: str) -> None:
    group = WeightGroup.open("127.0.0.1", "dying", 1 + len(urls), "gloo", 60.0)
    for rank, url in enumerate(urls, 1):
        weights = Weights(9, broadcast=replace(group.place, rank=rank))
        threading.Thread(target=asyncio.run, args=(push(url, token, weights),), daemon=True).start()
    group.form()

    def tensors():
        for number, (name, tensor) in enumerate(HFFolder(Path(checkpoint)).items()):
            if number == 70:
                os.kill(os.getpid(), signal.SIGKILL)
            yield name, torch.zeros_like(tensor)

    Sender(group, 1 << 14).send(tensors())


if __name__ == "__main__":
    main(*sys.argv[1:])
