"""What the rank of test_rope_scaling.py runs."""

from pathlib import Path

import torch

from megatron_rl.checkpoint.shards import WeightMap
from megatron_rl.config.learner import LearnerConfig
from megatron_rl.layers.attention import PackedSequences
from megatron_rl.learner.model import build_model
from megatron_rl.learner.process_groups import initialize
from megatron_rl.model.architecture import read_architecture
from tests.support.plain_training import load


@torch.no_grad()
def logits_of_both(path: str, length: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """[length, V] of our learner's model and of transformers' in fp32, and of the latter in float64, for the same
    random tokens."""
    architecture, config = read_architecture(Path(path)), LearnerConfig(dtype="fp32")
    model = build_model(architecture, config, initialize(config.parallel, "cpu", 0))
    WeightMap(model, architecture).load(Path(path))
    tokens = torch.randint(3, 98, (1, length), generator=torch.Generator().manual_seed(0))
    model.rotary_pos_emb.position_ids = torch.arange(length)
    packed = PackedSequences.from_lengths([length], torch.device("cpu"))
    ours = model(tokens, None, None, packed_seq_params=packed).flatten(0, 1)
    single, double = (load(path, dtype)(tokens).logits[0] for dtype in (torch.float32, torch.float64))
    return ours, single, double
