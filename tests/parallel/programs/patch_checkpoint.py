"""Rank programs for the tests of checkpointing and of optimizers with a patched megatron.core."""

import queue
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.rerun_state_machine import get_rerun_state_machine

from tests.parallel.programs.patch import Job
from tests.parallel.programs.patch_layouts import DOUBLE, Layout


class Run:
    """A job with its optimizer."""

    def __init__(self, layout: Layout, **options: Any):
        self.job = Job(layout)
        config = {"optimizer": "adam", "lr": 1e-2, "weight_decay": 0.1, "clip_grad": 1.0, **options}
        distributed = layout.ddp.get("use_distributed_optimizer", False)
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(use_distributed_optimizer=distributed, **config), self.job.chunks
        )

    def train(self, steps: int) -> list[float]:
        """Gradient norm of each step."""
        norms = []
        for _ in range(steps):
            self.optimizer.zero_grad()
            self.job.run()
            done, norm, _ = self.optimizer.step()
            assert done
            norms.append(float(norm))
        return norms

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: value.detach().clone() for name, value in self.job.chunks[0].module.named_parameters()}

    def sharded_state(self, sharding: str, is_loading: bool) -> dict[str, Any]:
        model = self.job.chunks[0].module.sharded_state_dict()
        metadata = {"distrib_optim_sharding_type": sharding}
        return {
            "model": model,
            "optimizer": self.optimizer.sharded_state_dict(model, is_loading=is_loading, metadata=metadata),
        }


def resumed_and_uninterrupted(layout: Layout, sharding: str, folder: str, resume_layout: Layout) -> dict[str, Any]:
    """Train 2 + 3 steps; and train 3 steps from the checkpoint of the second, with a fresh model and optimizer."""
    # One process writes and reads the queue of a synchronous save; megatron.core would start a server for it.
    filesystem_async._results_queue = queue.Queue()
    run = Run(layout)
    run.train(2)
    dist_checkpointing.save(run.sharded_state(sharding, is_loading=False), folder)
    norms = run.train(3)
    fresh = Run(resume_layout)
    for chunk in fresh.job.chunks:
        for parameter in chunk.module.parameters():
            parameter.data.zero_()
    state = dist_checkpointing.load(fresh.sharded_state(sharding, is_loading=True), folder)
    fresh.job.chunks[0].module.load_state_dict(state["model"])
    with torch.no_grad():  # upstream's loader of dp_reshardable states forgets it for fp32 parameters
        fresh.optimizer.load_state_dict(state["optimizer"])
    resumed_norms = fresh.train(3)
    return {"norms": norms, "resumed_norms": resumed_norms, "weights": run.weights(), "resumed": fresh.weights()}


def rounding_of_gradients(steps: int) -> list[float]:
    """Norm of the difference between float32's and float64's gradients, step by step: rounding, and what Adam makes of
    it, on one rank."""
    single, double = Run(Layout()), Run(DOUBLE, clip_grad=0.0)
    distances = []
    for _ in range(steps):
        gradients = []
        for run in (single, double):
            run.optimizer.zero_grad()
            run.job.run()
            parts = [parameter.main_grad for parameter in run.job.chunks[0].module.parameters()]
            gradients.append(torch.cat([part.double().view(-1) for part in parts]))
            if run is double:  # Megatron clips float32 alone
                torch._foreach_mul_(parts, min(1.0, 1.0 / (float(gradients[1].norm()) + 1e-6)))
            assert run.optimizer.step()[0]
        distances.append(float((gradients[0] - gradients[1]).norm()))
    return distances


def losses_with_scaling() -> dict[str, Any]:
    """Scale and steps done of an fp16 optimizer that meets an overflow in its second step."""
    layout = Layout(options={"fp16": True, "params_dtype": torch.float16, "pipeline_dtype": torch.float16})
    run = Run(
        layout,
        fp16=True,
        params_dtype=torch.float16,
        initial_loss_scale=1024.0,
        min_loss_scale=1.0,
        loss_scale_window=2,
        hysteresis=1,
    )
    for chunk in run.job.chunks:  # Giving gradient memory away and taking it back leaves gradients usable.
        chunk.offload_grad_buffers()
        chunk.restore_grad_buffers()
    scales, done = [], []
    for step in range(4):
        run.optimizer.zero_grad()
        for chunk in run.job.chunks:
            for parameter in chunk.module.parameters():
                parameter.main_grad.fill_(float("inf") if step == 1 else 1.0)
        done.append(bool(run.optimizer.step()[0]))
        scales.append(float(run.optimizer.get_loss_scale()))
    return {"scales": scales, "done": done}


def nan_report() -> str:
    """The message with which a NaN in the gradients ends the step."""
    job = Job(Layout(ddp={"check_for_nan_in_grad": True}))
    get_rerun_state_machine().current_iteration = 7
    next(job.chunks[0].module.parameters()).data.fill_(float("nan"))
    try:
        job.run()
    except RuntimeError as error:
        return str(error)
    return "nothing was noticed"
