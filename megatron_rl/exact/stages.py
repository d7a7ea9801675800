"""One forward pass of the policy outside Megatron's schedule, through all pipeline stages."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel


@torch.no_grad()
def forward(module: GPTModel, tokens: torch.Tensor, positions: torch.Tensor, packed: Any) -> torch.Tensor:
    """Logits [1, N, V/tp] of a packed row, on every stage, so that all stages draw the same tokens; float32 where there
    are several.

    A stage waits for the one before it: with P stages each works a P-th of the time. ``tokens`` [1, N], ``positions``
    [N], the places of the tokens in their sequences. Collective over the ranks of a pipeline.
    """
    if hasattr(module.rotary_pos_emb, "position_ids"):
        module.rotary_pos_emb.position_ids = positions
    arguments = {
        "input_ids": tokens,
        "position_ids": positions[None],
        "attention_mask": None,
        "packed_seq_params": packed,
    }
    group = parallel_state.get_pipeline_model_parallel_group()
    stage, last = group.rank(), group.size() - 1
    if last == 0:
        return module(**arguments)
    config, tensor = module.config, parallel_state.get_tensor_model_parallel_world_size()
    num_rows = tokens.numel()
    if stage > 0:
        rows = num_rows // tensor if config.sequence_parallel else num_rows
        hidden = torch.empty(rows, 1, config.hidden_size, dtype=config.pipeline_dtype, device=tokens.device)
        dist.recv(hidden, group=group, group_src=stage - 1)
        module.set_input_tensor(hidden)
    found = module(**arguments)
    if stage < last:
        dist.send(found.contiguous(), group=group, group_dst=stage + 1)
        found = torch.empty(1, num_rows, module.vocab_size // tensor, device=found.device)
    found = found.float().contiguous()
    dist.broadcast(found, group=group, group_src=last)
    return found
