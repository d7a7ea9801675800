"""Handing weights to the rollout engine: bytes and processor time, against a memcpy of the same bytes.

    python -m tools.bench.refit [--model recipes/tiny/model] [--dtype bf16] [--rounds 15]

One process, learner and vLLM side by side as in a colocated run. `export` is the stream of whole tensors alone,
`refit` the whole update including the engine's own packing and checks, `memcpy` a copy of every tensor of the stream
into memory that is there already. Rounds alternate; medians of processor time and of the rounds' ratios.
"""

from __future__ import annotations

import argparse
import warnings
from pathlib import Path

from megatron_rl.learner.learner import Learner
from megatron_rl.rollout.vllm_engine import VllmGenerator
from tests.support.tiny import MODEL, tiny_recipe
from tools.bench.lib.timing import alternate, median_ratio, medians

warnings.filterwarnings("ignore")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--dtype", choices=("bf16", "fp16", "fp32"), default="bf16")
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    recipe = tiny_recipe(
        model={"path": str(options.model)}, learner={"dtype": options.dtype}, rollout={"dtype": options.dtype}
    )
    learner = Learner(recipe)
    generator = VllmGenerator(recipe.rollout, recipe.model.path, max_prompt_length=16)
    copies = {name: tensor.clone() for name, tensor in learner.export_weights()}
    sources = {name: tensor.clone() for name, tensor in copies.items()}
    sides = {
        "memcpy": lambda: [copies[name].copy_(tensor) for name, tensor in sources.items()],
        "export": lambda: [None for _ in learner.export_weights()],
        "refit": lambda: generator.refit(learner.export_weights(), 0),
    }
    times = alternate(options.rounds, sides)
    num_bytes = sum(tensor.nbytes for tensor in copies.values())
    stored = sum(p.nbytes for p in learner.module.parameters())
    print(f"{len(copies)} tensors, {num_bytes} bytes sent, {num_bytes / stored:.3f} of the learner's parameters")
    for name, median in medians(times).items():
        print(f"{name:<7} {1e3 * median:9.2f} ms, {median_ratio(times[name], times['memcpy']):7.1f} × memcpy")
    generator.close()


if __name__ == "__main__":
    main()
