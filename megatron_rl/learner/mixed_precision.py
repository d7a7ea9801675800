"""Precision on the learner's side: loss scaling, overflows, an fp32 head, and the fp32 master copy of the weights.

Megatron-Core builds one gradient scaler for each of the optimizers that it chains (dense weights, experts), each of
which sees its own gradients alone, but scales the loss by the first one's. An overflow in the experts only would leave
two different scales and, from then on, expert gradients that are off by their ratio. `LossScaler` is one scale for all
of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.grad_scaler import DynamicGradScaler

from megatron_rl.config.learner import LossScaleConfig
from megatron_rl.process.ranks import gather_objects


class LossScaler(DynamicGradScaler):
    """Megatron's dynamic loss scale, shared by chained optimizers; or a constant 1 that only looks for overflows.

    The optimizers report through `update`; the scale moves once per step, in `settle`, so that all of them unscale by
    the value that the loss was multiplied with.
    """

    def __init__(self, config: LossScaleConfig | None):
        self.dynamic = config is not None
        config = config or LossScaleConfig(initial=1.0)
        super().__init__(
            initial_scale=config.initial,
            min_scale=config.minimum,
            growth_factor=2.0,
            backoff_factor=config.backoff_factor,
            growth_interval=config.growth_interval,
            hysteresis=config.hysteresis,
        )

    def update(self, found_inf: bool) -> None:
        """Called by each optimizer after it has looked at its gradients. The scale moves later, in `settle`."""

    def settle(self, overflow: bool) -> None:
        """End of a step: move the scale. ``overflow``: an optimizer found infinity or NaN."""
        if self.dynamic:
            super().update(overflow)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue; a run that changes its dtype at the checkpoint starts with the scale of its recipe."""
        if self.dynamic and state_dict and state_dict["dynamic"]:
            super().load_state_dict(state_dict)

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"dynamic": self.dynamic}


class OverflowGuard:
    """Steps the optimizer, skips updates with non-finite gradients whatever the dtype, and counts them.

    ``optimizer``: Megatron's, made with a loss scale, whose scalers are replaced. ``loss_scale`` None: bf16 or fp32.
    ``names``: parameter → what to call it, in the order of the forward pass; asked for only after an overflow.
    """

    def __init__(
        self,
        optimizer: MegatronOptimizer,
        loss_scale: LossScaleConfig | None,
        max_consecutive: int,
        names: Callable[[], Iterable[tuple[str, torch.nn.Parameter]]],
    ):
        self.optimizer, self.max_consecutive, self._names = optimizer, max_consecutive, names
        self.scaler = LossScaler(loss_scale)
        for chained in optimizer.chained_optimizers:
            chained.grad_scaler = self.scaler
        self.overflow_steps = 0  # of the whole run
        self.consecutive = 0
        self.first_tensor = ""  # of the latest overflow

    def step(self) -> tuple[bool, float | None]:
        """One optimizer step: (applied?, global gradient norm or None where skipped). Collective."""
        updated, grad_norm, _ = self.optimizer.step()
        if updated:
            self.consecutive = 0
        else:
            self.overflow_steps += 1
            self.consecutive += 1
            self.first_tensor = self._first_non_finite()
        self.scaler.settle(overflow=not updated)
        return updated, grad_norm

    def _first_non_finite(self) -> str:
        """The tensor with an infinite or NaN gradient that the backward pass reached first, over all ranks.

        The backward pass carries a fault from a later layer to all earlier ones, so it began in the last of them in the
        order of the forward pass.
        """
        mine = [
            (order, name)
            for order, (name, parameter) in enumerate(self._names())
            if not math.isfinite(parameter.main_grad.sum().item()) and not parameter.main_grad.isfinite().all()
        ]
        stage = parallel_state.get_pipeline_model_parallel_rank()
        places = gather_objects((stage, *max(mine)) if mine else None)
        return max((item for item in places if item is not None), default=(0, 0, "no single tensor"))[2]

    def metrics(self) -> dict[str, float]:
        """`precision/*`: the loss scale of the next update and the updates skipped so far in the run."""
        return {
            "precision/loss_scale": float(self.scaler.scale),
            "precision/overflow_steps": float(self.overflow_steps),
        }

    @property
    def reason_to_end(self) -> str | None:
        """Why the run cannot go on, or None."""
        if self.consecutive < self.max_consecutive:
            return None
        return (
            f"{self.consecutive} updates in a row had infinite or NaN gradients (learner.max_consecutive_overflows: "
            f"{self.max_consecutive}; loss scale {float(self.scaler.scale):g}); first in the backward pass: "
            f"{self.first_tensor}"
        )

    def state_dict(self) -> dict[str, Any]:
        """Counters; the scale itself is part of Megatron's optimizer state."""
        return {"overflow_steps": self.overflow_steps, "consecutive": self.consecutive, "tensor": self.first_tensor}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.overflow_steps, self.consecutive = state["overflow_steps"], state["consecutive"]
        self.first_tensor = state["tensor"]


def compute_head_in_fp32(output_layer: torch.nn.Module) -> None:
    """Make a Megatron output layer return fp32 logits, from hidden states and weights turned into fp32.

    The weights keep the learner's dtype: vLLM's fp32 head reads the engine's weights in the same way, so that both
    multiply the same numbers. A subclass cannot do it, because `GPTModel` names the
    layer's class itself.
    """

    def to_fp32(module: torch.nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        weight = kwargs.get("weight")
        weight = module.weight if weight is None else weight  # tied embeddings arrive as an argument
        return (args[0].float(), *args[1:]), {**kwargs, "weight": weight.float()}

    output_layer.register_forward_pre_hook(to_fp32, with_kwargs=True)


def describe_model(model: GPTModel) -> dict[str, str]:
    """Aspect → what the built model does: the learner's column of the precision contract."""
    config, names = model.config, {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
    dtype = names[config.params_dtype]
    dtypes = {
        "dtype": dtype,
        "attention": type(model.decoder.layers[0].self_attention.core_attention).__name__,
        "rope": f"Megatron, {'fused' if config.apply_rope_fusion else 'unfused'}",
        "activation": f"Megatron, {'fused' if config.bias_activation_fusion else 'unfused'}",
    }
    if config.num_moe_experts:
        dtypes["router"] = config.moe_router_dtype or dtype
    if model.post_process:
        dtypes["head"] = "fp32" if model.output_layer._forward_pre_hooks else dtype
    return dtypes


def master_reader(
    optimizer: MegatronOptimizer, values: Callable[[torch.Tensor], torch.Tensor]
) -> Callable[[torch.nn.Parameter], torch.Tensor]:
    """A function parameter → its whole fp32 master copy, gathered from the data-parallel ranks that share it.

    ``values``: a tensor of the optimizer → what it holds, on its device (see `Offload`). Collective over the
    parameter's data-parallel group. A shard of zeros and a sum leave every value as it is.
    """
    owner = {p: o for o in optimizer.chained_optimizers for p in getattr(o, "model_param_group_index_map", ())}

    @torch.no_grad()
    def read(parameter: torch.nn.Parameter) -> torch.Tensor:
        whole = torch.zeros(parameter.numel(), dtype=torch.float32, device=parameter.device)
        if parameter in owner:  # this rank holds a part of it
            sharded = owner[parameter]
            group_index, order = sharded.model_param_group_index_map[parameter]
            part = sharded._get_model_param_range_map(parameter)["param"]
            whole[part.start : part.end] = values(sharded.optimizer.param_groups[group_index]["params"][order])
        is_expert = not getattr(parameter, "allreduce", True)
        group = (
            parallel_state.get_expert_data_parallel_group()
            if is_expert
            else parallel_state.get_data_parallel_group(with_context_parallel=True)
        )
        if group.size() > 1:
            dist.all_reduce(whole, group=group)
        return whole.view(parameter.shape)

    return read
