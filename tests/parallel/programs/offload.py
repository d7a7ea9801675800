"""What the ranks of test_offload.py run: a learner that steps aside for an engine between its updates."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from megatron_rl.learner.learner import Learner
from megatron_rl.run.engines import hand_over, load_beside
from tests.support.tiny import stored_rollouts, tiny_recipe

PARTS = ("gradients", "states", "weights")


def host_bytes(offload: Any) -> int:
    """Host memory that this rank holds for what leaves."""
    return offload._states._memory.numel() + offload._weights._memory.numel()


def bytes_of_parts(learner: Learner) -> dict[str, int]:
    """Bytes of storage that each part has on the device now."""
    models = {p.untyped_storage()._cdata for p in learner.module.parameters()}
    states = [t for t in learner.offload._optimizer_tensors() if t.untyped_storage()._cdata not in models]
    buffers = [b.grad_data for b in learner.model.buffers + learner.model.expert_parallel_buffers]
    tensors = {"gradients": buffers, "states": states, "weights": list(learner.module.parameters())}
    return {
        part: sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in of_part}.values())
        for part, of_part in tensors.items()
    }


class Engine:
    """Takes weights, and notes what of the learner is on the device whenever it is called."""

    def __init__(self, learner: Learner):
        self.learner, self.calls, self.weights = learner, [], {}

    def _note(self, name: str) -> None:
        held = bytes_of_parts(self.learner)
        self.calls.append((name, sorted(part for part in PARTS if held[part])))

    def sleep(self) -> None:
        self._note("sleep")

    def wake(self) -> None:
        self._note("wake")

    def refit(self, weights: Iterable[tuple[str, torch.Tensor]], policy_version: int) -> None:
        self.weights = {name: tensor.float().clone() for name, tensor in weights}
        self._note("refit")

    def rollout(self) -> None:
        self._note("rollout")


def train(
    offload: dict[str, bool], folder: str = "", num_steps: int = 2, minibatches: int = 1, **sections: Any
) -> dict[str, Any]:
    """Updates with an engine in between; then a checkpoint while the learner is aside, and one more update."""
    sections["learner"] = {"optimizer": {"lr": 1e-2}, **sections.get("learner", {}), "offload": offload}
    learner = Learner(tiny_recipe(batch={"minibatches": minibatches}, **sections))
    engine, result = Engine(learner), {"metrics": [], "sent": [], "before": bytes_of_parts(learner)}
    learner.step_aside()
    result["host at the start"] = host_bytes(learner.offload)
    engine.rollout()
    for step in range(num_steps):
        _one_step(learner, engine, result, step, minibatches)
    if folder:
        learner.step = num_steps
        result["path"] = str(learner.save(Path(folder), {}))
        learner.export_hf(Path(folder, "hf"))
        engine._note("saved")
    _one_step(learner, engine, result, num_steps, minibatches)
    result["logprobs"] = learner.compute_logprobs(stored_rollouts(100))
    learner.offload.come_back()
    return result | {"calls": engine.calls, "after": bytes_of_parts(learner), "host": host_bytes(learner.offload)}


def resume(offload: dict[str, bool], path: str, minibatches: int = 1, **sections: Any) -> dict[str, Any]:
    """The update after the checkpoint."""
    sections["learner"] = {"optimizer": {"lr": 1e-2}, **sections.get("learner", {}), "offload": offload}
    learner = Learner(tiny_recipe(batch={"minibatches": minibatches}, **sections))
    engine, result = Engine(learner), {"metrics": [], "sent": []}
    learner.step_aside()
    load_beside(learner, engine, lambda: learner.load(Path(path)))
    _one_step(learner, engine, result, learner.step, minibatches)
    return result | {"calls": engine.calls}


def _one_step(learner: Learner, engine: Engine, record: dict[str, Any], step: int, minibatches: int) -> None:
    engine.sleep()
    record["metrics"].append(learner.update(stored_rollouts(step, minibatches=minibatches)))
    hand_over(learner, engine)
    record["sent"].append(engine.weights)
    engine.rollout()
