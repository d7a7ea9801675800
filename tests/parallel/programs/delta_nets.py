"""What the ranks of test_delta_nets.py run: delta nets on a packed row, with the gradient of every weight."""

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import gather_from_tensor_model_parallel_region

from megatron_rl.checkpoint.shards import WeightMap
from megatron_rl.config.learner import LearnerConfig
from megatron_rl.layers.attention import PackedSequences
from megatron_rl.learner.model import build_model
from megatron_rl.learner.process_groups import initialize
from megatron_rl.model.architecture import read_architecture

LENGTHS = (29, 154, 1, 64, 70)  # less than a chunk, more than two, one token, exactly one chunk


def tokens_of(length: int, number: int) -> torch.Tensor:
    return torch.randint(3, 98, (length,), generator=torch.Generator().manual_seed(number))


def row(path: str, numbers: list[int] | None = None, **parallel: int) -> dict[str, Any]:
    """Log-probs of the sequences ``numbers`` of `LENGTHS` as one row, and gradients of their sum by Hugging Face's
    names."""
    numbers = list(range(len(LENGTHS))) if numbers is None else numbers
    config = LearnerConfig(dtype="fp32", parallel=parallel)
    model = build_model(read_architecture(path), config, initialize(config.parallel, "cpu", seed=0))
    weights = WeightMap(model, model_of := read_architecture(path))
    weights.load(path)
    sequences = [tokens_of(LENGTHS[n], n) for n in numbers]
    tail = -sum(map(len, sequences)) % config.parallel.tensor
    lengths = [*map(len, sequences), *[tail] * (tail > 0)]
    model.rotary_pos_emb.position_ids = torch.cat([torch.arange(n) for n in lengths])
    tokens = torch.cat([*sequences, torch.zeros(tail, dtype=torch.long)])[None]
    packed = PackedSequences.from_lengths(lengths, torch.device("cpu"))
    logits = model(tokens, model.rotary_pos_emb.position_ids[None], None, packed_seq_params=packed)
    logits = gather_from_tensor_model_parallel_region(logits)[0, :, : model_of.vocab_size]
    found, at = [], 0
    for sequence in sequences:
        own = logits[at : at + len(sequence) - 1].log_softmax(-1)
        found.append(own.gather(1, sequence[1:, None])[:, 0])
        at += len(sequence)
    torch.cat(found).sum().backward()
    for name, parameter in model.named_parameters():
        is_part = getattr(parameter, "sequence_parallel", False) or ".experts." in name
        if is_part and config.parallel.tensor > 1:
            dist.all_reduce(parameter.grad, group=weights.tp)  # each rank has its own tokens, or heads
    gradients = {name: value.clone() for name, value in weights.export(lambda parameter: parameter.grad)}
    return {"logprobs": [x.detach() for x in found], "gradients": gradients}
