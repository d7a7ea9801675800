"""What test_stored_by_0_16.py runs: it reads what a run under megatron-core 0.16.1 left, and goes on from it."""

import zlib
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_rl.checkpoint.shards import distributed_optimizers
from megatron_rl.learner.learner import Learner
from megatron_rl.run.recorded_batches import load_batch
from megatron_rl.types import Rollout
from tests.support.tiny import stored_rollouts, tiny_recipe


def checksums(learner: Learner) -> dict[str, int]:
    """Of every weight, and of every master weight and moment."""
    results = {name: _checksum(tensor) for name, tensor in learner.export_weights()}
    for number, optimizer in enumerate(distributed_optimizers(learner.optimizer)):
        states = [
            *((f"master {place}", master) for place, master in enumerate(_masters(optimizer))),
            *(
                (f"{name} {place}", value)
                for place, state in enumerate(optimizer.optimizer.state.values())
                for name, value in state.items()
            ),
        ]
        results |= {f"optimizer {number}, {name}": _checksum(value) for name, value in states}
    return results


def _masters(optimizer: Any) -> list[torch.Tensor]:
    return [parameter for group in optimizer.optimizer.param_groups for parameter in group["params"]]


def _checksum(tensor: torch.Tensor) -> int:
    return zlib.crc32(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy())


def sums_of_batch(folder: str) -> list[dict[str, int]]:
    """Of every array of every sequence of a recorded batch."""
    names = {field.name: field.name for field in fields(Rollout)} | {"tokens": "whole", "loss_mask": "loss_mask"}
    return [
        {
            name: zlib.crc32(np.ascontiguousarray(value).tobytes())
            for name, ours in names.items()
            if name not in ("prompt", "sampled") and isinstance(value := getattr(sequence, ours), np.ndarray)
        }
        for sequence in load_batch(Path(folder)).batch.sequences
    ]


def read(folder: str) -> dict[str, Any]:
    """What the checkpoint holds, and that training goes on from it."""
    recipe = {
        "model": {"path": f"{folder}/model"},
        "learner": {"dtype": "bf16", "optimizer": {"lr": 1e-3}},
        "routing": {"bias_update_rate": 0.01},
    }
    learner = Learner(tiny_recipe(**recipe))
    state = learner.load(Path(folder, "run", "step_00000002"))
    sums, updates = checksums(learner), learner.num_updates
    metrics = learner.update(stored_rollouts(2))
    return {"state": state, "sums": sums, "updates": updates, "grad_norm": metrics["actor/grad_norm"]}
