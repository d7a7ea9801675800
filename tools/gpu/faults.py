"""Faults that a script plants to see whether its verdict tells: each changes something in the rank that calls it."""

from __future__ import annotations

import os


def _second() -> bool:
    return os.environ["RANK"] == "1"


def rounded() -> None:
    """The second rank's weights are rounded to bf16 when they have been loaded."""
    import torch

    from megatron_rl.learner.learner import Learner

    own = Learner.__init__

    def init(self, *arguments, **options) -> None:
        own(self, *arguments, **options)
        if _second():
            with torch.no_grad():
                for parameter in self.module.parameters():
                    parameter.copy_(parameter.to(torch.bfloat16).to(parameter.dtype))
            self.optimizer.reload_model_params()

    Learner.__init__ = init


def other_route() -> None:
    """Generation sends one token in each step through other experts than the update does."""
    from megatron_rl.exact import step

    own = step.route

    def route(logits, *rest):
        probs, chosen = own(logits, *rest)
        chosen = chosen.clone()
        chosen[0] = (chosen[0] + 1) % logits.shape[-1]
        return probs, chosen

    step.route = route


def dropped() -> None:
    """Gradients of data-parallel ranks are not added up."""
    from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup as Group

    Group.start_grad_sync = Group.finish_grad_sync = lambda self, *_, **__: None


def patience() -> None:
    """A rank waits an hour for another, whatever the recipe says."""
    from datetime import timedelta

    from megatron_rl.learner import process_groups

    process_groups.timedelta = lambda **_: timedelta(hours=1)


def dropped_broadcast() -> None:
    """The sender of weights leaves its second broadcast out."""
    from megatron_rl.rollout.servers.weight_broadcast import WeightGroup

    own, calls = WeightGroup.broadcast, []

    def broadcast(self, tensor):
        calls.append(tensor)
        return calls and _Done() if self.rank == 0 and len(calls) == 2 else own(self, tensor)

    WeightGroup.broadcast = broadcast


class _Done:
    """A call that has been completed, without having done anything."""

    def is_completed(self) -> bool:
        return True

    def wait(self) -> None: ...


def rounded_weights() -> None:
    """The sender rounds the last tensor of each update."""
    import torch

    from megatron_rl.rollout.servers.weight_broadcast import Sender

    own = Sender.send

    def send(self, tensors):
        *most, (name, last) = list(tensors)
        return own(self, [*most, (name, last.to(torch.float16).to(last.dtype))])

    Sender.send = send


def slow_update() -> None:
    """Each update computes its gradients forty times."""
    _repeated("megatron_rl.learner.learner", "Learner", "update")


def slow_generation() -> None:
    """Each batch is sampled forty times."""
    _repeated("megatron_rl.rollout.vllm_engine", "VllmGenerator", "rollout")


def _repeated(module: str, owner: str, name: str) -> None:
    import importlib

    kind = getattr(importlib.import_module(module), owner)
    own = getattr(kind, name)
    setattr(kind, name, lambda *arguments, **options: [own(*arguments, **options) for _ in range(40)][-1])


def unmarked() -> None:
    """Nothing marks expert weights, as TransformerEngine leaves them."""
    from megatron_rl.learner import model

    def only_their_optimizer(module) -> None:
        for name, parameter in module.named_parameters():
            if ".experts." in name:
                parameter.allreduce = False

    model.mark_expert_parameters = only_their_optimizer


def lost_moments() -> None:
    """A load brings Adam's second moments back at half."""
    import torch

    from megatron_rl.learner.learner import Learner

    own = Learner.load

    def load(self, *arguments, **options):
        state = own(self, *arguments, **options)
        with torch.no_grad():
            for optimizer in self.optimizer.chained_optimizers:
                for moments in optimizer.optimizer.state.values():
                    moments["exp_avg_sq"].mul_(0.5)
        return state

    Learner.load = load
