"""Learner forward + backward against the same model in transformers: tokens per second, side by side in one run.

    python -m tools.bench.learner [--model recipes/tiny/model] [--sequences 8] [--length 256] [--rounds 15]

All compute the log-prob of every next token in fp32 and its gradient, at one thread, in alternating rounds; the median
of the rounds' ratios, with their middle half, is the figure to quote (absolute speeds drift with the machine). The last
line says how far they are from the arithmetic: 6 FLOPs per active parameter and token, plus attention, at this core's
measured matmul rate.
"""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from megatron_rl.checkpoint.shards import WeightMap
from megatron_rl.config.learner import LearnerConfig
from megatron_rl.layers.attention import PackedSequences
from megatron_rl.learner.logprobs import token_logprobs
from megatron_rl.learner.model import build_model
from megatron_rl.learner.process_groups import initialize, shutdown
from megatron_rl.model.architecture import Architecture, read_architecture
from tools.bench.lib.timing import alternate, medians, spread

ROOT = Path(__file__).resolve().parents[2]


def megatron_step(path: Path, tokens: torch.Tensor):
    architecture, config = read_architecture(path), LearnerConfig(dtype="fp32")
    model = build_model(architecture, config, initialize(config.parallel, "cpu", 0))
    WeightMap(model, architecture).load(path)
    num, length = tokens.shape
    positions = torch.arange(num * length).reshape(num, length)[:, :-1].flatten()
    packed = PackedSequences.from_lengths([length] * num, torch.device("cpu"))
    model.rotary_pos_emb.position_ids = torch.arange(length).repeat(num)

    def step() -> float:
        logits = model(tokens.reshape(1, -1), None, None, packed_seq_params=packed).flatten(0, 1)
        labels = tokens[:, 1:].flatten()
        logprobs, _ = token_logprobs(logits, positions, labels, vocab_size=architecture.vocab_size)
        logprobs.mean().backward()
        return logprobs.mean().item()

    return step


def transformers_step(path: Path, tokens: torch.Tensor):
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="sdpa")
    model.set_experts_implementation("grouped_mm")  # the fastest of its implementations on a CPU

    def step() -> float:
        logits = model(tokens).logits[:, :-1]
        logprobs = logits.log_softmax(-1).gather(-1, tokens[:, 1:, None])
        logprobs.mean().backward()
        return logprobs.mean().item()

    return step


def flops(a: Architecture, num: int, length: int) -> float:
    """Forward + backward of ``num`` sequences: three times two FLOPs per multiply-add of the forward pass."""
    attention = a.hidden_size * a.head_dim * (2 * a.num_heads + 2 * a.num_kv_heads)
    moe = 3 * a.hidden_size * a.moe_ffn_hidden_size * a.experts_per_token + a.hidden_size * a.num_experts
    dense = 3 * a.hidden_size * a.ffn_hidden_size
    mlp = sum(moe if is_moe else dense for is_moe in a.moe_layers)
    per_token = a.num_layers * attention + mlp + a.vocab_size * a.hidden_size
    scores = a.num_layers * a.num_heads * a.head_dim * length  # causal: half of length, for scores and for values
    return 6.0 * (per_token + scores) * num * length


def matmul_rate() -> float:
    a, b = torch.randn(512, 512), torch.randn(512, 512)
    return 2 * 512**3 / medians(alternate(20, {"matmul": lambda: a @ b}))["matmul"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=ROOT / "recipes" / "tiny" / "model")
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(1)
    architecture = read_architecture(options.model)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(3, architecture.vocab_size, (options.sequences, options.length), generator=generator)
    sides = {"megatron_rl": megatron_step(options.model, tokens)}
    sides["transformers"] = transformers_step(options.model, tokens)
    results = [step() for step in sides.values()]
    difference = max(results) - min(results)
    assert difference < 1e-5, f"the models disagree by {difference}: nothing to compare"
    times = alternate(options.rounds, sides)
    print(
        f"{options.model.name}, {options.sequences} × {options.length} tokens, fp32, 1 thread, {options.rounds} rounds"
    )
    work, rate = flops(architecture, *tokens.shape), matmul_rate()
    for name, median in medians(times).items():
        share = work / median / rate
        print(f"{name:>13}: {tokens.numel() / median:8.0f} tokens/s of processor time, {share:.0%} of the matmul rate")
    for slower, faster in itertools.combinations(reversed(sides), 2):
        print(f"{slower} takes {spread(times[slower], times[faster])} times as long as {faster}")
    print(f"one matmul of 512³ runs at {rate / 1e9:.0f} GFLOP/s; a step is {work / 1e9:.1f} GFLOP")
    shutdown()


if __name__ == "__main__":
    main()
