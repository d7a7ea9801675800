"""What ranks of test_parity.py run: the learner's taps under a layout, held to the checkpoint on the first rank."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_rl.instruments.parity import witnesses
from megatron_rl.instruments.parity.compare import compare
from megatron_rl.instruments.parity.definition import Checkpoint
from megatron_rl.instruments.parity.delta_net import evaluation_of
from megatron_rl.model.architecture import read_architecture
from tools.dev.parity_bench import changed


def learner_errors(
    path: str,
    parallel: dict[str, int],
    dtype: str,
    exact: bool = False,
    exchange: str | None = None,
    other_rope: bool = False,
) -> dict[str, Any]:
    """Operators beyond their bounds, and those that have no tap. ``exchange``: a parameter of layer 1 whose shards two
    tensor-parallel ranks exchange before. ``other_rope``: frequencies of the rotation are 1% higher."""
    model = Path(path)
    setup = witnesses.of_model(model, dtype, device="cpu")
    learner = setup.learner.model_copy(update={"parallel": type(setup.learner.parallel)(**parallel)})
    setup = witnesses.replace(setup, learner=learner)
    architecture = read_architecture(model)
    with witnesses.learner_model(setup, architecture, exact) as module:
        fault = nullcontext()
        if exchange is not None:
            parameter = dict(module.decoder.layers[1].named_parameters())[exchange]
            fault = changed((parameter, _of_other_rank(parameter.detach())))
        if other_rope:
            frequencies = module.rotary_pos_emb.inv_freq
            fault = changed((frequencies, 1.01 * frequencies))
        with fault:
            record = witnesses.learner_record(setup, architecture, module, exact)
    checkpoint = Checkpoint(model)
    result = compare(checkpoint, [record])
    return {
        "missing": sorted({*evaluation_of(checkpoint, record).taps()} - {error.tap for error in result.errors}),
        "num_experts": architecture.num_experts if architecture.is_moe else 0,
        "beyond": [error.tap for error in result.failures],
        "experts": sorted({group.expert for group in record.experts.get(1, ())}),
    }


def _of_other_rank(x: torch.Tensor) -> torch.Tensor:
    group = parallel_state.get_tensor_model_parallel_group()
    parts = [torch.empty_like(x) for _ in range(group.size())]
    dist.all_gather(parts, x.contiguous(), group=group)
    return parts[1 - group.rank()]
