"""Cost of the pass for old log-probs: its share of training, which an update without it saves.

    python -m tools.bench.old_logprobs [--sequences 64] [--length 128] [--rounds 9]

arXiv 2510.26788 §2.1 puts it at about 25% of training. By arithmetic it is a forward pass beside forward and backward:
1 / (1 + 3) where nothing else counts. Measured on the tiny model, one CPU thread, both in alternating rounds.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

import numpy as np

from megatron_rl.config import load_recipe
from megatron_rl.learner.learner import Learner
from megatron_rl.learner.process_groups import shutdown
from megatron_rl.types import Batch, Sequence
from tools.bench.lib.timing import alternate, medians

ROOT = Path(__file__).resolve().parents[2]

PROMPT = 8


def batch(num_sequences: int, length: int) -> Batch:
    random = np.random.default_rng(0)
    response = length - PROMPT
    sequences = [
        Sequence(
            id=f"bench:{i}/0",
            tokens=random.integers(3, 98, length),
            prompt_length=PROMPT,
            inference_logprobs=np.full(response, -1.0, dtype=np.float32),
            loss_mask=np.ones(response, dtype=bool),
            advantage=float(i % 2) - 0.5,
            reward=float(i % 2),
            policy_versions=np.zeros(response, dtype=np.int32),
        )
        for i in range(num_sequences)
    ]
    return Batch(0, sequences, [list(range(num_sequences))])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    learner = Learner(load_recipe(ROOT / "recipes" / "tiny" / "grpo.yaml", ["learner.optimizer.lr=1e-9"]))
    work = batch(options.sequences, options.length)
    sides = {"old log-probs": lambda: learner.compute_logprobs(work), "update": lambda: learner.update(work)}
    times = alternate(options.rounds, sides)
    shares = sorted(old / (old + update) for old, update in zip(*times.values(), strict=True))
    seconds = ", ".join(f"{name} {median:.3f} s" for name, median in medians(times).items())
    print(f"{options.sequences} × {options.length} tokens: {seconds}")
    median = statistics.median(shares)
    print(f"share of training that is skipped: median {median:.0%}, {shares[0]:.0%} to {shares[-1]:.0%}")
    shutdown()


if __name__ == "__main__":
    main()
