"""Length-decay schedule in slime: a file for PYTHONPATH, whose functions are named on slime's command line."""

from functools import partial

import torch
from megatron.core import mpu
from megatron.core.length_decay import LengthDecayConfig
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from slime.backends.megatron_utils import model as slime_model

latest = {}


def choose_style(args):
    config = LengthDecayConfig(mode="auto", num_steps_per_update=args.global_batch_size)
    args.lr_decay_style = "length-decay"
    slime_model.OptimizerParamScheduler = partial(OptimizerParamScheduler, length_decay_config=config)


def note_length(args, rollout_id, rollout_data):
    lengths = rollout_data["response_lengths"]
    total = torch.tensor([sum(lengths), len(lengths)], dtype=torch.float64)
    torch.distributed.all_reduce(total, group=mpu.get_data_parallel_group_gloo(with_context_parallel=True))
    latest["length"] = (total[0] / total[1]).item()


def observe_length(args, rollout_id, step_id, model, optimizer, opt_param_scheduler):
    if step_id == 0 and "length" in latest:  # a critic notes none, and keeps its rate
        opt_param_scheduler.observe_length(latest["length"])
