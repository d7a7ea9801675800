"""What the ranks of test_router_biases.py run."""

from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_rl.checkpoint.state import model_tensors
from megatron_rl.learner.gradient_noise import set_advantages
from megatron_rl.learner.learner import Learner
from megatron_rl.run.acceptance import Snapshot
from megatron_rl.types import Batch
from tests.support.tiny import stored_rollouts, tiny_recipe


def grouped(step: int, minibatches: int = 1) -> Batch:
    """With the groups that `min_variance` wants."""
    batch = stored_rollouts(step, minibatches=minibatches)
    for number, sequence in enumerate(batch.sequences):
        sequence.group = number // 4
    return batch


def loads(**sections: Any) -> dict[str, Any]:
    """Choices that each update counted by layer and expert, over all ranks, and the biases that it ended in."""
    learner = Learner(tiny_recipe(batch={"minibatches": 2}, **sections))
    biases, counted = learner.router_biases, []
    take = biases.take_load

    def taken() -> None:
        take()
        for load in biases._load:
            whole = load.clone()
            dist.all_reduce(whole, group=parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True))
            counted.append(whole.tolist())

    biases.take_load = taken
    learner.update(grouped(0, minibatches=2))
    return {
        "layers": [router.layer_number for router in biases._routers],
        "counted": counted,
        "biases": [router.expert_bias.tolist() for router in biases._routers],
    }


def changed_by(action: str, **sections: Any) -> dict[str, Any]:
    """What an ``action`` that is no update changes of a model."""
    learner = Learner(tiny_recipe(**sections))
    before = {name: tensor.clone() for name, tensor in model_tensors(learner.module).items()}
    batch = grouped(0)
    if action == "log-probs":
        learner.compute_logprobs(batch)
    elif action == "scores":
        set_advantages(learner.scorer, batch, [0] * len(batch.sequences), "min_variance")
    elif action == "undone":
        snapshot = Snapshot(learner)
        learner.update(batch)
        assert learner.num_updates == 1
        snapshot.restore()
    else:
        assert learner.update(batch)["actor/update_skipped"] == 1.0
    after = model_tensors(learner.module)
    return {
        "changed": [name for name in before if not torch.equal(before[name], after[name])],
        "biases": sum(name.endswith("expert_bias") for name in before),
        "updates": learner.num_updates,
    }
