"""What the ranks of test_learner_precision.py run."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_rl.learner.learner import Learner
from megatron_rl.learner.optimizer import master_reader
from tests.support.tiny import stored_rollouts, tiny_recipe

ATTENTION = "decoder.layers.2.self_attention.linear_proj.weight"
EXPERT = "decoder.layers.1.mlp.experts.local_experts.0.linear_fc2.weight"
WATCHED = ("lr", "update_skipped", "grad_norm", "pg_loss")


def start(**sections: Any) -> Learner:
    """A learner whose rate changes at every update."""
    sections.setdefault("schedule", {"style": "linear", "warmup_steps": 2, "min_lr": 1e-5})
    return Learner(tiny_recipe(**sections))


class Injection:
    """Multiplies the gradient of one parameter by ``factor`` in the steps ``at``, before it is added up."""

    def __init__(self, learner: Learner, parameter: str, factor: float, at: range | tuple[int, ...], rank: int = 0):
        self.step = 0
        mine = dist.get_rank() == rank

        def multiply(gradient: torch.Tensor) -> torch.Tensor:
            return gradient * factor if mine and self.step in at else gradient

        named = dict(learner.module.named_parameters())
        if parameter in named:
            named[parameter].register_hook(multiply)


def train(
    num_steps: int,
    inject: dict[str, Any] | None = None,
    save_after: int | None = None,
    folder: str = "",
    first_batch: int = 0,
    **sections: Any,
) -> dict[str, Any]:
    """Per step: metrics, updates applied, largest change of a weight; and where it was saved."""
    learner = start(**sections)
    injection = Injection(learner, **inject) if inject else None
    steps, path = [], None
    before = weights(learner)
    for step in range(num_steps):
        if injection:
            injection.step = step
        metrics = learner.update(stored_rollouts(first_batch + step))
        after = weights(learner)
        steps.append(
            {
                **{name: metrics.get(f"actor/{name}") for name in WATCHED},
                "scale": metrics["precision/loss_scale"],
                "overflows": metrics["precision/overflow_steps"],
                "num_updates": learner.num_updates,
                "moved": max(float((after[name] - before[name]).abs().max()) for name in after),
                "tensor": learner.overflow.first_tensor,
                "reason": learner.overflow.reason_to_end,
            }
        )
        before = after
        if step == save_after:
            learner.step = step + 1
            path = str(learner.save(Path(folder), {}))
    finite = all(bool(tensor.isfinite().all()) for tensor in before.values())
    return {"steps": steps, "path": path, "weights": before, "finite": finite}


def resume(path: str, num_steps: int, **sections: Any) -> list[dict[str, Any]]:
    """Steps after a checkpoint: scale, counters and metrics."""
    learner = start(**sections)
    learner.load(Path(path))
    results = []
    for step in range(learner.step, learner.step + num_steps):
        metrics = learner.update(stored_rollouts(step))
        results.append(
            {
                **{name: metrics.get(f"actor/{name}") for name in WATCHED},
                "scale": metrics["precision/loss_scale"],
                "overflows": metrics["precision/overflow_steps"],
                "num_updates": learner.num_updates,
            }
        )
    return results


def weights(learner: Learner) -> dict[str, torch.Tensor]:
    return {name: tensor.float().clone() for name, tensor in learner.weights.export()}


def exported(num_steps: int, **sections: Any) -> dict[str, dict[str, torch.Tensor]]:
    """After some updates: what the engine is sent, the learner's own weights and the fp32 master copy."""
    learner = start(**sections)
    for step in range(num_steps):
        learner.update(stored_rollouts(step))
    return {
        "sent": {name: tensor.clone() for name, tensor in learner.export_weights()},
        "own": {name: tensor.clone() for name, tensor in learner.weights.export()},
        "master": {
            name: tensor.clone()
            for name, tensor in learner.weights.export(master_reader(learner.optimizer, learner.offload.device_values))
        },
    }


def fp32_parts(dtype: str, **parallel: Any) -> dict[str, Any]:
    """With both switches on: types of router and head, and their largest errors against fp32 products of what they
    read, relative to the sums of those products' magnitudes."""
    precision = {"fp32_head": True, "fp32_router": True}
    learner = start(learner={"dtype": dtype, "parallel": parallel}, precision=precision)
    dtypes: dict[str, list[tuple[torch.dtype, float]]] = {"head": [], "router": []}

    def compare(kind: str, hidden: torch.Tensor, weight: torch.Tensor, logits: torch.Tensor) -> None:
        hidden, weight = hidden.double(), weight.double()
        errors = (
            (hidden @ weight.t() - logits).abs() / (hidden.abs() @ weight.abs().t()) if not parallel else hidden * 0
        )
        error = float(errors.max())
        dtypes[kind].append((logits.dtype, error))

    def watch_router(router: Any) -> None:
        gating = router.gating

        def watched(hidden: torch.Tensor) -> torch.Tensor:
            logits = gating(hidden)
            compare("router", hidden.detach(), router.weight.detach(), logits.detach())
            return logits

        router.gating = watched

    for module in learner.module.modules():
        if type(module).__name__ == "TopKRouter":
            watch_router(module)
    if learner.module.post_process:
        learner.module.output_layer.register_forward_hook(
            lambda head, args, out: compare("head", args[0].detach(), head.weight.detach(), out[0].detach())
        )
    metrics = learner.update(stored_rollouts(0))
    return {"found": dtypes, "metrics": metrics, "description": learner.describe_precision()}
