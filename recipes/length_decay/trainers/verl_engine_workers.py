"""Length-decay schedule in verl: for verl/workers/engine_workers.py (docs/patches.md says where it is called)."""

import torch
from verl.utils.device import get_device_id


def observe_length(engine, data):
    if not hasattr(engine.lr_scheduler, "observe_length"):  # not of Megatron
        return
    mask = data["loss_mask"]  # 1 for each token of a response that is learned from
    tokens = (mask.values() if mask.is_nested else mask).sum()
    total = torch.tensor([float(tokens), data.shape[0]], dtype=torch.float64, device=get_device_id())
    torch.distributed.all_reduce(total, group=engine.get_data_parallel_group())
    engine.lr_scheduler.observe_length((total[0] / total[1]).item())
