"""Log-probs and routes of a Hugging Face model, the reference that the engine is compared with."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from megatron_rl.rollout.generator import Sampling
from megatron_rl.types import Group


def load(path: Path, dtype: torch.dtype = torch.float32):
    from transformers import AutoModelForCausalLM

    # Experts one by one: transformers' grouped product has no float64.
    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype, experts_implementation="eager").eval()


@torch.no_grad()
def score(model, groups: list[Group], sampling: Sampling) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """For every rollout, in order: float64 log-probs [R] under ``sampling``, and sorted routes [P + R - 1, L, K]."""
    sequences = [(group.prompt.tokens, rollout.tokens) for group in groups for rollout in group.rollouts]
    length = max(len(prompt) + len(response) for prompt, response in sequences)
    # Padding on the right: causal attention keeps it away from what is compared.
    tokens = torch.zeros(len(sequences), length, dtype=torch.long)
    for row, (prompt, response) in enumerate(sequences):
        tokens[row, : len(prompt) + len(response)] = torch.tensor([*prompt, *response])
    output = model(input_ids=tokens, output_router_logits=True, use_cache=False)
    logprobs = distribution(output.logits, sampling)
    chosen = logprobs[:, :-1].gather(-1, tokens[:, 1:, None])[..., 0]
    top_k = model.config.num_experts_per_tok
    routes = torch.stack(
        [
            logits.view(len(sequences), length, -1).topk(top_k).indices.sort(-1).values
            for logits in output.router_logits
        ],
        2,
    )
    bounds = [(len(prompt), len(prompt) + len(response)) for prompt, response in sequences]
    return (
        [chosen[row, start - 1 : end - 1].numpy() for row, (start, end) in enumerate(bounds)],
        [routes[row, : end - 1].numpy() for row, (_, end) in enumerate(bounds)],
    )


def distribution(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """log of what is sampled from: temperature first, then top-k, then top-p of what is left."""
    logits = logits.double() / (sampling.temperature or 1.0)
    if sampling.top_k:
        threshold = logits.topk(sampling.top_k).values[..., -1:]
        logits = logits.masked_fill(logits < threshold, -torch.inf)
    if sampling.top_p < 1:
        ordered, order = logits.sort(-1, descending=True)
        probabilities = ordered.softmax(-1)
        # A token stays if those more probable than it do not yet reach top_p.
        dropped = probabilities.cumsum(-1) - probabilities >= sampling.top_p
        logits = logits.masked_fill(torch.zeros_like(dropped).scatter(-1, order, dropped), -torch.inf)
    return logits.log_softmax(-1)
