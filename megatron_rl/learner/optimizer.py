"""A model with Megatron's data parallelism and optimizer around it, and gradients that are sums."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer

from megatron_rl.config.learner import LearnerConfig
from megatron_rl.learner.model import DTYPES


def with_optimizer(
    model: torch.nn.Module, config: LearnerConfig, device: torch.device
) -> tuple[DistributedDataParallel, Any]:
    """``model`` wrapped for data parallelism, and Adam over its trainable parameters with fp32 masters, both sharded
    over data-parallel ranks. Gradients are added up in fp32 over microbatches and ranks, and divided by nothing."""
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
    """Megatron's reduction of gradients without its division by tokens: our losses carry their denominators."""
    finalize_model_grads(model, None, **kwargs)
