"""Log-probs and routes of a Hugging Face model, the reference that the engine is compared with."""

import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_rl.checkpoint.hf_folder import HFFolder
from megatron_rl.rollout.generator import Sampling
from megatron_rl.types import Group, Prompt, Rollout
from tests.support.in_double import widened
from tests.support.rounding import bound_from_double
from tests.support.tiny import DATA, MODEL
from tools.dev.make_tiny_checkpoint import build_tokenizer

TOKENIZER = build_tokenizer()


@functools.lru_cache(maxsize=8)
def load(path: Path, dtype: torch.dtype = torch.float32):
    from transformers import AutoModelForCausalLM

    # Experts one by one: transformers' grouped product has no float64.
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, experts_implementation="eager").eval()
    return widened(model) if dtype is torch.float64 else model


def rounding_bound(groups: list[Group], sampling: Sampling, path: Path = MODEL) -> float:
    """How far a float32 engine's log-probs of ``groups`` may lie from those of the same model in float64.

    Two engines, or one engine with another batch, lie twice as far apart at most. Weights that were moved by a tenth
    of their spread condition the log-probs as those of ``path`` do.
    """
    (single, _), (double, _) = (score(load(path, dtype), groups, sampling) for dtype in (torch.float32, torch.float64))
    longest = max(len(group.prompt.tokens) + len(rollout.tokens) for group in groups for rollout in group.rollouts)
    longest_sum = max(load(path).config.hidden_size, longest)  # of a product, or of attention
    return bound_from_double(np.concatenate(single), np.concatenate(double), longest_sum)


def prompts(number: int) -> list[Prompt]:
    """The first validation problems of the tiny model."""
    rows = [json.loads(line) for line in (DATA / "validation.jsonl").read_text().splitlines()[:number]]
    return [Prompt(id=row["id"], tokens=TOKENIZER.encode(row["problem"]), answer=row["answer"]) for row in rows]


def perturbed(seed: int) -> dict[str, torch.Tensor]:
    """The trained weights, each tensor moved by a tenth of its own spread: another policy, as far from random."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: tensor + 0.1 * tensor.std() * torch.randn(tensor.shape, generator=generator)
        for name, tensor in HFFolder(MODEL).items()
    }


class Keeping:
    """An engine that keeps what it rolled out."""

    def __init__(self, generator: Any) -> None:
        self.generator, self.groups = generator, []

    def rollout(self, *arguments, **options) -> list:
        self.groups = self.generator.rollout(*arguments, **options)
        return self.groups

    def sleep(self) -> None:
        self.generator.sleep()


@functools.cache
def responses(number: int = 64, length: int = 24) -> list[Group]:
    """Responses of the tiny model to the first validation prompts, drawn from its own distribution in float64."""
    model, draw, groups = load(MODEL, torch.float64), torch.Generator().manual_seed(0), []
    for asked in prompts(number):
        prompt, tokens = asked.tokens, list(asked.tokens)
        while len(tokens) < len(prompt) + length and tokens[-1] != TOKENIZER.eos_token_id:
            with torch.no_grad():
                probabilities = model(input_ids=torch.tensor([tokens])).logits[0, -1].softmax(-1)
            tokens.append(int(torch.multinomial(probabilities, 1, generator=draw)))
        rollout = Rollout(
            id=f"{asked.id}/0",
            prompt=prompt,
            tokens=np.array(tokens[len(prompt) :], np.int32),
            inference_logprobs=np.zeros(len(tokens) - len(prompt), np.float32),
            finish_reason="stop",
            policy_versions=np.zeros(len(tokens) - len(prompt), np.int32),
            text="",
        )
        groups.append(Group(asked, [rollout]))
    return groups


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


def flat(groups: list[Group], field: str) -> list:
    values = [getattr(rollout, field) for group in groups for rollout in group.rollouts]
    return [value.tolist() for value in values] if field == "tokens" else values


def assert_same(first: list[Group], second: list[Group], sampling: Sampling) -> None:
    """Equal but for the rounding of matrix products over batches of another shape."""
    assert flat(first, "tokens") == flat(second, "tokens")
    assert flat(first, "finish_reason") == flat(second, "finish_reason")
    bound = 2 * rounding_bound(first, sampling)
    left, right = (np.concatenate(flat(groups, "inference_logprobs")) for groups in (first, second))
    assert np.abs(left - right).max() <= bound
    for left, right in zip(flat(first, "routed_experts"), flat(second, "routed_experts"), strict=True):
        assert (np.sort(left, -1) == np.sort(right, -1)).all()
