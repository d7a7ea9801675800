"""What test_releases.py runs, each part under another release of megatron-core, each with an interpreter of its own.

python -m tests.parallel.programs.releases write|read FOLDER RESULT
"""

from __future__ import annotations

import json
import sys
import zlib
from pathlib import Path
from typing import Any

import torch
from megatron.core import __version__

from megatron_rl.checkpoint.shards import distributed_optimizers
from megatron_rl.learner.learner import Learner
from tests.support.tiny import stored_rollouts, tiny_recipe


def learner_on_one_rank() -> Learner:
    return Learner(tiny_recipe())


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


def write(folder: Path) -> dict[str, Any]:
    """Two updates, then a checkpoint."""
    learner = learner_on_one_rank()
    for step in range(2):
        learner.update(stored_rollouts(step))
    learner.step = 2
    path = learner.save(folder, {"note": "kept"})
    return {"path": str(path), "state": {"note": "kept"}, "sums": checksums(learner)}


def read(folder: Path) -> dict[str, Any]:
    """What the checkpoint holds, and that training goes on from it."""
    learner = learner_on_one_rank()
    state = learner.load(folder)
    sums, updates = checksums(learner), learner.num_updates
    metrics = learner.update(stored_rollouts(2))
    return {"state": state, "sums": sums, "updates": updates, "grad_norm": metrics["actor/grad_norm"]}


if __name__ == "__main__":
    action = {"write": write, "read": read}[sys.argv[1]]
    outcome = {"release": __version__, "python": sys.version_info[:2], **action(Path(sys.argv[2]))}
    Path(sys.argv[3]).write_text(json.dumps(outcome))
