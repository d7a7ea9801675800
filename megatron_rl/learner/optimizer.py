"""A model with Megatron's data parallelism and optimizer around it, and gradients that are sums.

Precision on the learner's side: loss scaling, overflows, and the fp32 master copy of the weights.

Megatron-Core builds one gradient scaler for each of the optimizers that it chains (dense weights, experts), each of
which sees its own gradients alone, but scales the loss by the first one's. An overflow in the experts only would leave
two different scales and, from then on, expert gradients that are off by their ratio. `LossScaler` is one scale for all
of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import MegatronOptimizer, get_megatron_optimizer
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer.grad_scaler import DynamicGradScaler
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megatron_rl.config.learner import LearnerConfig, LossScaleConfig, OptimizerConfig, ScheduleConfig
from megatron_rl.config.recipe import schedule_problems
from megatron_rl.errors import InputError
from megatron_rl.learner.model import DTYPES
from megatron_rl.learner.router_biases import RouterBiases
from megatron_rl.process.ranks import gather_objects
from megatron_rl.schedule import LengthDecay


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
            min_scale=1.0,
            growth_factor=2.0,
            backoff_factor=0.5,
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
        """Continue; a run that changes its dtype at the checkpoint starts with the scale of its recipe.

        The scale grows when the count of good updates equals the interval, so a count beyond a shorter one is cut.
        """
        if self.dynamic and state_dict and state_dict["dynamic"]:
            super().load_state_dict(state_dict)
            self._growth_tracker = min(self._growth_tracker, self.growth_interval - 1)

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
        overflows = [
            (order, name)
            for order, (name, parameter) in enumerate(self._names())
            if not math.isfinite(parameter.main_grad.sum().item()) and not parameter.main_grad.isfinite().all()
        ]
        stage = parallel_state.get_pipeline_model_parallel_rank()
        places = gather_objects((stage, *max(overflows)) if overflows else None)
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


def describe_model(model: GPTModel) -> dict[str, str]:
    """Aspect → what the built model does: the learner's column of the precision contract."""
    config, names = model.config, {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
    dtype = names[config.params_dtype]
    mixers = [getattr(layer.self_attention, "core_attention", layer.self_attention) for layer in model.decoder.layers]
    dtypes = {
        "dtype": dtype,
        "attention": ", ".join(dict.fromkeys(type(mixer).__name__ for mixer in mixers)),
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


# Megatron's parameter scheduler with the length-decay style added.


STYLE = "length-decay"


class LengthDecayScheduler(OptimizerParamScheduler):
    """Drop-in for `OptimizerParamScheduler`: the same arguments by name, plus ``length_decay`` for its new style.

    ``num_steps`` is t: `step(1)` after each successful update, no call after one that was skipped for overflow.
    With ``lr_decay_style="length-decay"`` every parameter group gets max(max_lr · 2^−floor(t/T), min_lr)
    [arXiv 2602.01826, Algorithm 1] of its own `max_lr` and `min_lr` after Megatron's linear warm-up.
    `decay_now` halves the rate out of turn, in every style: the alarms' action.
    """

    def __init__(
        self, optimizer: Any, *, lr_decay_style: str, length_decay: LengthDecay | None = None, **kwargs: Any
    ) -> None:
        self.length_decay = None
        self.extra_halvings = 0
        # Megatron knows its own styles alone, and with the patches `schedule` one of this name with other settings.
        style = "constant" if lr_decay_style == STYLE else lr_decay_style
        super().__init__(optimizer, lr_decay_style=style, **kwargs)
        self.lr_decay_style, self.length_decay = lr_decay_style, length_decay
        self.step(0)

    def get_lr(self, param_group: dict) -> float:
        """The rate of this group at the present step, times its `lr_mult`.

        A group that no override touches (`default_config`) has the scheduler's bounds, also when a checkpoint has
        brought back the group's older ones. Megatron writes `lr_mult` into every group and does not read it.
        """
        max_lr, min_lr = self._bounds(param_group)
        if self.lr_decay_style != STYLE or self._warming_up:
            lr = super().get_lr({"max_lr": max_lr, "min_lr": min_lr})
        else:
            assert self.length_decay is not None, f"style {STYLE} needs the argument length_decay"
            lr = self.length_decay.lr(self.num_steps, max_lr, min_lr)
        if self.extra_halvings:
            lr = max(lr * 2.0**-self.extra_halvings, min(lr, min_lr))
        return lr * param_group.get("lr_mult", 1.0)

    def _bounds(self, param_group: dict) -> tuple[float, float]:
        if param_group.get("default_config", False):
            return self.max_lr, self.min_lr
        min_lr = param_group.get("min_lr")  # None: Megatron's optimizer was built without one
        return param_group.get("max_lr", self.max_lr), self.min_lr if min_lr is None else min_lr

    @property
    def _warming_up(self) -> bool:
        return self.lr_warmup_steps > 0 and self.num_steps <= self.lr_warmup_steps

    def observe_length(self, step: int, mean_length: float) -> int | None:
        """Show the schedule the mean response length (tokens) of a rollout batch, before its first update.

        ``step``: t, the optimizer steps applied so far (not rollout steps: a batch may be several updates). Returns
        the step of the surge, once, else None. Other styles ignore it.
        """
        if self.length_decay is None:
            return None
        surge_step = self.length_decay.observe(step, mean_length)
        self.step(0)  # a period that begins here applies to the next update
        return surge_step

    def decay_now(self) -> None:
        """Halve the rate from the next update on, down to `min_lr`; what an alarm with `decay_lr` asks for."""
        self.extra_halvings += 1
        self.step(0)

    @contextmanager
    def scaled(self, factor: float) -> Iterator[None]:
        """Every group's rate times ``factor`` inside, for one update; the schedule goes on as if it had not been."""
        groups = self.optimizer.param_groups
        rates = [group["lr"] for group in groups]
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate * factor
        try:
            yield
        finally:
            for group, rate in zip(groups, rates, strict=True):
                group["lr"] = rate

    def metrics(self) -> dict[str, float]:
        """`lr_sched/*` of the next update: the rate of a group without overrides, and the schedule's state."""
        values = {"lr_sched/lr": self.get_lr({}), "lr_sched/extra_halvings": float(self.extra_halvings)}
        if self.length_decay is not None:
            shadow = self.get_lr({})
            if not self._warming_up:
                shadow = self.length_decay.shadow_lr(self.num_steps, self.max_lr, self.min_lr)
            values |= {"lr_sched/shadow_lr": shadow, **self.length_decay.metrics(self.num_steps)}
        return values

    def state_dict(self) -> dict:
        """Megatron's, and what the length-decay style remembers; plain values."""
        state = super().state_dict() | {"extra_halvings": self.extra_halvings}
        if self.length_decay is not None:
            state["length_decay"] = self.length_decay.state_dict()
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from `state_dict`, or from one of Megatron's own scheduler (then nothing is remembered)."""
        if self.length_decay is not None and "length_decay" in state_dict:
            self.length_decay.load_state_dict(state_dict["length_decay"])
        self.extra_halvings = state_dict.get("extra_halvings", 0)
        self.num_steps = 0  # upstream adds the loaded number to the present one
        super().load_state_dict(dict(state_dict))
        self.step(0)  # upstream sets weight decay before it has read the loaded bounds


def build_scheduler(
    config: ScheduleConfig, optimizer_config: OptimizerConfig, optimizer: Any, total_updates: int
) -> LengthDecayScheduler:
    """The scheduler of a run of ``total_updates`` optimizer steps over Megatron's
    ``optimizer``.

    On resume the recipe's numbers win over the checkpoint's; the step and the schedule's memory are the checkpoint's.
    Raises `InputError` where the schedule does not fit the optimizer's numbers or the run's length.
    """
    lr, weight_decay = optimizer_config.lr, optimizer_config.weight_decay
    if problems := schedule_problems(config, lr, total_updates):
        raise InputError("; ".join(problems))
    return LengthDecayScheduler(
        optimizer,
        init_lr=min(config.warmup_from, lr) if config.warmup_steps else lr,
        max_lr=lr,
        min_lr=config.floor(lr),
        lr_warmup_steps=config.warmup_steps,
        # Constant and length-decay have no end, but upstream requires one after the warm-up.
        lr_decay_steps=max(config.decay_steps or total_updates, config.warmup_steps + 1),
        lr_decay_style=config.style,
        start_wd=weight_decay,
        end_wd=weight_decay,
        wd_incr_steps=max(total_updates, 1),
        wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,
        length_decay=LengthDecay(config) if config.style == STYLE else None,
    )


def with_optimizer(
    model: torch.nn.Module, config: LearnerConfig, device: torch.device, biases: RouterBiases
) -> tuple[DistributedDataParallel, Any]:
    """Return ``model`` wrapped for data parallelism, and Adam over its trainable parameters with fp32 masters, both
    sharded over data-parallel ranks. Gradients are added up in fp32 over microbatches and ranks, and divided by
    nothing."""
    optimizer, dtype = config.optimizer, config.dtype
    wrapped = DistributedDataParallel(
        model.config,
        DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True),
        model,
    )
    settings = MegatronOptimizerConfig(
        optimizer="adam",
        lr=optimizer.lr,
        weight_decay=optimizer.weight_decay,
        adam_beta1=optimizer.beta1,
        adam_beta2=optimizer.beta2,
        adam_eps=optimizer.eps,
        clip_grad=optimizer.clip_grad,
        params_dtype=DTYPES[dtype],
        bf16=dtype == "bf16",
        fp16=dtype == "fp16",
        loss_scale=1.0,  # a scaler makes Megatron look for infinite gradients; `OverflowGuard` puts its own there
        use_distributed_optimizer=True,
    )
    # Gloo twins of the groups are needed only where NCCL is the main backend.
    adam = get_megatron_optimizer(settings, [wrapped], use_gloo_process_groups=device.type == "cuda")
    _find_fp32_parameters(adam)
    wrapped.config.grad_scale_func = adam.scale_loss
    wrapped.config.finalize_model_grads_func = partial(_add_up_grads, biases)
    return wrapped, adam


def _find_fp32_parameters(adam: MegatronOptimizer) -> None:
    """Mend Megatron's map from parameters to Adam's, which puts those in fp32 first within a group: without this a
    model of both types takes the states of one parameter for another's."""
    for chained in adam.chained_optimizers:
        groups = zip(getattr(chained, "model_fp32_groups", ()), getattr(chained, "model_float16_groups", ()))
        for number, (in_fp32, others) in enumerate(groups):
            for order, parameter in enumerate([*in_fp32, *others]):
                chained.model_param_group_index_map[parameter] = number, order


def unhook(model: DistributedDataParallel) -> None:
    """Take Megatron's hooks off the gradient accumulators of a ``model`` that is given up: they refer to it from C++,
    where Python's garbage collection does not look, and would keep it and its process groups."""
    for accumulator in model.grad_accs:
        accumulator.register_hook(lambda *_: None).hooks_dict_ref().clear()  # a handle of Megatron's own is not kept
    model.grad_accs.clear()


def _add_up_grads(
    biases: RouterBiases, model: list[torch.nn.Module], num_tokens: torch.Tensor | None, **kwargs: Any
) -> None:
    """Megatron's reduction of gradients without its division by tokens: our losses carry their denominators."""
    biases.take_load()
    finalize_model_grads(model, None, **kwargs)
