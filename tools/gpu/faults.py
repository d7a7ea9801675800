"""Faults that a script plants to see whether its verdict tells: each changes something in the rank that calls it."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any
from unittest import mock


def rounded() -> None:
    """The second rank's weights are rounded to bf16 when they have been loaded."""
    import torch

    from megatron_rl.learner.learner import Learner

    own = Learner.__init__

    def init(self, *arguments, **options) -> None:
        own(self, *arguments, **options)
        if os.environ["RANK"] == "1":
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
    done = SimpleNamespace(is_completed=lambda: True, wait=lambda: None)

    def broadcast(self, tensor):
        calls.append(tensor)
        return done if self.rank == 0 and len(calls) == 2 else own(self, tensor)

    WeightGroup.broadcast = broadcast


def rounded_weights() -> None:
    """The sender rounds the last tensor of each update."""
    import torch

    from megatron_rl.rollout.servers.weight_broadcast import Sender

    own = Sender.send

    def send(self, tensors):
        *most, (name, last) = list(tensors)
        return own(self, [*most, (name, last.to(torch.float16).to(last.dtype))])

    Sender.send = send


def slow() -> None:
    """Each batch is sampled, and each update computed, ten times."""
    from megatron_rl.learner.learner import Learner
    from megatron_rl.rollout.vllm_engine import VllmGenerator

    for kind, name in ((Learner, "update"), (VllmGenerator, "rollout")):
        own = getattr(kind, name)
        setattr(kind, name, lambda *arguments, own=own, **options: [own(*arguments, **options) for _ in range(10)][-1])


def unmarked() -> None:
    """Nothing marks expert weights: they pass for copies of those of other ranks."""
    from megatron_rl.learner import model

    def unmark(module: Any) -> None:
        for name, parameter in module.named_parameters():
            for mark in ("allreduce", "tensor_model_parallel") if ".experts." in name else ():
                vars(parameter).pop(mark, None)

    model.mark_expert_parameters = unmark


def lost_moments() -> None:
    """A load brings Adam's second moments back at half."""
    _of_the_doctor("lost_moments", "learner", "checkpoint")


def stale_engine() -> None:
    """An engine takes updates and keeps its weights."""
    _of_the_doctor("stale_engine", "engine", "refit")


def _of_the_doctor(program: str, module: str, check: str) -> None:
    """What a program of the doctor's tests breaks, without its check."""
    from tests.parallel.programs import doctor

    with mock.patch.object(getattr(doctor, module), check):
        getattr(doctor, program)(None)


def shifted_routes() -> None:
    """vLLM returns the experts of the row before."""
    import numpy as np
    from vllm.outputs import CompletionOutput

    own = CompletionOutput.__init__

    def init(self, *arguments: Any, **options: Any) -> None:
        own(self, *arguments, **options)
        if self.routed_experts is not None:
            self.routed_experts = np.roll(self.routed_experts, 1, axis=0)

    CompletionOutput.__init__ = init


def old_weights() -> None:
    """Servers get the weights of the update before, under the name of the new one."""
    from megatron_rl.rollout.servers.weight_broadcast import Sender

    own, kept = Sender.send, []

    def send(self, tensors: Any) -> Any:
        kept.append([(name, tensor.clone()) for name, tensor in tensors])
        return own(self, kept[-2:][0])

    Sender.send = send


def rounded_engine() -> None:
    """An engine in fp16 gets weights that were rounded to fp8, but for those that it is checked with at its start."""
    import torch

    from megatron_rl.rollout.vllm_engine import VllmGenerator

    own = VllmGenerator.refit

    def rounded(tensor: Any) -> Any:
        return tensor.to(torch.float8_e4m3fn).to(tensor.dtype) if tensor.dtype is torch.float16 else tensor

    def refit(self, weights: Any, policy_version: int) -> None:
        given = ((name, rounded(tensor)) for name, tensor in weights)
        return own(self, given if policy_version else weights, policy_version)

    VllmGenerator.refit = refit
