"""A model with Megatron's data parallelism and optimizer around it, and gradients that are sums."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.moe.router import TopKRouter

from megatron_rl.config.learner import LearnerConfig, OptimizerConfig, ScheduleConfig
from megatron_rl.config.recipe import schedule_problems
from megatron_rl.errors import InputError
from megatron_rl.learner.model import DTYPES
from megatron_rl.schedule import LengthDecay

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
        brought back the group's older ones. 0.16.1 writes `lr_mult` into every group and no longer reads it.
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
    if problems := schedule_problems(config, lr, weight_decay, total_updates):
        raise InputError("; ".join(problems))
    grows = config.weight_decay_end is not None
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
        end_wd=config.weight_decay_end if grows else weight_decay,
        wd_incr_steps=max(total_updates, 1),
        wd_incr_style=config.weight_decay_style if grows else "constant",
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,
        length_decay=LengthDecay(config) if config.style == STYLE else None,
    )


def with_optimizer(
    model: torch.nn.Module, config: LearnerConfig, device: torch.device
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
    wrapped.config.grad_scale_func = adam.scale_loss
    wrapped.config.finalize_model_grads_func = _add_up_grads
    return wrapped, adam


def unhook(model: DistributedDataParallel) -> None:
    """Take Megatron's hooks off the gradient accumulators of a ``model`` that is given up: they refer to it from C++,
    where Python's garbage collection does not look, and would keep it and its process groups."""
    for accumulator in model.grad_accs:
        accumulator.register_hook(lambda *_: None).hooks_dict_ref().clear()  # a handle of Megatron's own is not kept
    model.grad_accs.clear()


def _add_up_grads(model: list[torch.nn.Module], num_tokens: torch.Tensor | None, **kwargs: Any) -> None:
    """Megatron's reduction of gradients without its division by tokens: our losses carry their denominators.

    It moves the biases of routers by the tokens that each expert got, and Megatron 0.16 leaves these counts to grow."""
    finalize_model_grads(model, None, **kwargs)
    for module in (module for chunk in model for module in chunk.modules()):
        if isinstance(module, TopKRouter) and module.expert_bias is not None:
            module.local_tokens_per_expert.zero_()
