"""Logits of a checkpoint under transformers and under the learner's model: the last proof of a conversion."""

from __future__ import annotations

from pathlib import Path

import torch

from megatron_rl.checkpoint.architecture import read_architecture
from megatron_rl.checkpoint.load import load_weights
from megatron_rl.config.learner import LearnerConfig
from megatron_rl.learner.model import build_model
from megatron_rl.learner.process_groups import initialize


def logit_difference(hf: Path, megatron: Path, num_tokens: int = 64) -> tuple[float, float]:
    """Largest |difference| of logits of transformers' model of ``hf`` and ours of ``megatron``; largest |logit|.

    fp32, random tokens, on the CPU; both models are held at once.
    """
    from transformers import AutoModelForCausalLM  # seconds to import: only where logits are asked for

    a, config = read_architecture(hf), LearnerConfig(dtype="fp32")
    model = build_model(a, config, initialize(config.parallel, "cpu", seed=0)).eval()
    load_weights(megatron, model)
    theirs = AutoModelForCausalLM.from_pretrained(hf, dtype=torch.float32, attn_implementation="eager")
    tokens = torch.randint(a.vocab_size, (1, num_tokens), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        ours = model(tokens, torch.arange(num_tokens)[None], attention_mask=None)[..., : a.vocab_size]
        wanted = theirs(tokens).logits
    return float((ours - wanted).abs().max()), float(wanted.abs().max())
