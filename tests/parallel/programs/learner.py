"""What the ranks of test_learner_layouts.py run."""

import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_rl.errors import InputError
from megatron_rl.learner.learner import Learner
from tests.support.layouts import leave_layout
from tests.support.plain_training import Limits
from tests.support.rounding import rounded
from tests.support.tiny import stored_rollouts, tiny_recipe


def train_on_stored_rollouts(
    num_steps: int = 5, minibatches: int = 1, head: int = 0, **sections: Any
) -> dict[str, Any]:
    """Losses, gradient norms and metrics of the first steps, log-probs after them, and the weights they end in."""
    learner = Learner(tiny_recipe(batch={"minibatches": minibatches}, **sections))
    before = learner.compute_logprobs(stored_rollouts(100))
    teacher = learner.recipe.teacher
    sets = teacher.top_k if teacher is not None and teacher.engine != "learner" else 0
    options = {"minibatches": minibatches, "head": head, "teacher": teacher is not None, "sets": sets}
    metrics = [learner.update(stored_rollouts(step, **options)) for step in range(num_steps)]
    after = learner.compute_logprobs(stored_rollouts(100))
    weights = {name: tensor.float().clone() for name, tensor in learner.export_weights()}
    return {"metrics": metrics, "before": before, "after": after, "weights": weights}


def refused(minibatches: int, **sections: Any) -> str:
    """What a learner says of a batch that has not what the recipe needs."""
    try:
        Learner(tiny_recipe(batch={"minibatches": minibatches}, **sections)).update(stored_rollouts(0, 24, minibatches))
    except InputError as error:
        return str(error)
    raise AssertionError("nothing was refused")


def exported(**sections: Any) -> dict[str, Any]:
    """Names of exported tensors that are no views of parameters, whether all follow a parameter that moves and one that
    changes where it is, and their dtypes where bf16 is asked for."""
    learner = Learner(tiny_recipe(**sections))
    places = {parameter.untyped_storage().data_ptr() for parameter in learner.model.parameters()}
    before = {name: (tensor.untyped_storage().data_ptr(), tensor.clone()) for name, tensor in learner.export_weights()}
    for parameter in learner.model.parameters():
        parameter.data = parameter.data + 1
    follow = [all(torch.equal(tensor, before[name][1] + 1) for name, tensor in learner.export_weights())]
    for parameter in learner.model.parameters():
        parameter.data.copy_(parameter.data - 1)
    follow.append(all(torch.equal(tensor, before[name][1] + 1 - 1) for name, tensor in learner.export_weights()))
    return {
        "copied": [name for name, (place, _) in before.items() if place not in places],
        "follow": follow,
        "rounded": {str(tensor.dtype) for _, tensor in learner.weights.export(dtype=torch.bfloat16)},
    }


def closed(**sections: Any) -> list[str]:
    """What a learner that was trained and closed has left behind, of its model and its optimizer."""
    learner = Learner(tiny_recipe(**sections))
    learner.update(stored_rollouts(0))
    held = [learner.module, learner.model, learner.optimizer, *learner.model.parameters()]
    held = [(type(thing).__name__, weakref.ref(thing)) for thing in held]
    for _ in range(2):
        learner.close()
    return [name for name, thing in held if thing() is not None]


def threads(**sections: Any) -> list[int]:
    """Of this process, after each of three learners that nobody closed."""
    results = []
    for _ in range(3):
        Learner(tiny_recipe(**sections)).update(stored_rollouts(0))
        leave_layout()
        results.append(len(list(Path("/proc/self/task").iterdir())))
    return results


def save_after(folder: str, num_steps: int, **sections: Any) -> dict[str, Any]:
    """Train, save, train on: what a run that loads the checkpoint must reproduce."""
    learner = Learner(tiny_recipe(**sections))
    for step in range(num_steps):
        learner.update(stored_rollouts(step))
    learner.step = num_steps
    path = learner.save(Path(folder), {"note": "kept"})
    return {"path": str(path), **_continue(learner, num_steps)}


def load_and_continue(path: str, **sections: Any) -> dict[str, Any]:
    learner = Learner(tiny_recipe(**sections))
    state = learner.load(Path(path))
    assert state == {"note": "kept"}, state
    return _continue(learner, learner.step)


def _continue(learner: Learner, first: int) -> dict[str, Any]:
    at_checkpoint = np.concatenate(learner.compute_logprobs(stored_rollouts(100)))
    metrics = [learner.update(stored_rollouts(first + i)) for i in range(2)]
    weights = {name: tensor.float().clone() for name, tensor in learner.export_weights()}
    return {"logprobs": at_checkpoint, "metrics": metrics, "weights": weights, "num_updates": learner.num_updates}


def largest_difference(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    assert a.keys() == b.keys()
    return max(float((a[name] - b[name]).abs().max()) for name in a)


def assert_same_training(result: dict, wanted: dict, names: Sequence[str], limits: Limits) -> None:
    """Two results of one training in other layouts: the same metrics, those of ``names`` and the weights alike."""
    for got, want in zip(result["metrics"], wanted["metrics"], strict=True):
        assert {n for n in got if "noise/" not in n} == {n for n in want if "noise/" not in n}
        for name in names:
            assert got[name] == rounded(want[name], 1000, scale=1 + abs(want[name]), dtype=torch.float32), name
    assert largest_difference(result["weights"], wanted["weights"]) <= limits.weights


def starting_weights(path: str, **sections: Any) -> dict[str, torch.Tensor]:
    """What a learner starts from, in Hugging Face names."""
    learner = Learner(tiny_recipe(model={"path": path}, **sections))
    return {name: tensor.clone() for name, tensor in learner.export_weights()}
