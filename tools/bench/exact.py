"""Cost of exactness: generation and update of the exact engine against vLLM and the ordinary learner.

    python -m tools.bench.exact [--dtype fp32] [--sequences 8 32 128] [--tokens 64] [--rounds 5]

Processor time of one thread, forced lengths, all sides in alternating rounds of one run. `modules` is exact generation
whose steps are passes of Megatron's modules, as those of layouts that share out the weights are. The physical limit of
exact generation is a forward pass of the same tokens in whole rows, which the column exact/forward gives: what
generating token by token in Python adds to it. Then: how many rows of plain kernels change bits with the batch on this
machine, which is what the exact engine is there to prevent.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import torch.nn.functional as F

from megatron_rl.batch import build_batch
from megatron_rl.config import Recipe, load_recipe
from megatron_rl.exact.invariant import BatchInvariant
from megatron_rl.learner.learner import Learner
from megatron_rl.learner.process_groups import shutdown
from megatron_rl.rollout import Generator
from megatron_rl.run.engines import start_generator
from megatron_rl.types import Group, Prompt
from tools.bench.lib.timing import alternate, medians

ROOT = Path(__file__).resolve().parents[2]

PROMPT = 8


def recipe(engine: str, dtype: str, tokens: int) -> Recipe:
    values = [f"rollout.engine={engine}", f"rollout.dtype={dtype}", f"learner.dtype={dtype}", "reward={name: modsum}"]
    values += [f"rollout.max_response_length={tokens}", "rollout.stop_token_ids=[]", "rollout.verify_refit=false"]
    values += [f"data.prompt.max_length={PROMPT}"]
    return load_recipe(ROOT / "recipes" / "tiny" / "grpo.yaml", [*values, "learner.optimizer.lr=1e-9"])


def generator_of(learner: Learner, kv_cache: bool = True, modules: bool = False) -> Generator:
    """The engine of the learner's recipe. Text is left out: no side needs it."""
    learner.recipe.exact.kv_cache = kv_cache
    generator = start_generator(learner.recipe, SimpleNamespace(decode=lambda tokens, **_: ""), learner)
    if modules:
        generator.policy.passes.step_forward = None
    return generator


def compare_engines(dtype: str, sizes: list[int], tokens: int, rounds: int) -> None:
    exact, plain = Learner(recipe("exact", dtype, tokens)), Learner(recipe("vllm", dtype, tokens))
    cached, modules, vllm = generator_of(exact), generator_of(exact, modules=True), generator_of(plain)
    uncached = generator_of(exact, kv_cache=False)
    print(f"{dtype}, prompts of {PROMPT}, {tokens} forced tokens; thousand tokens per second, and times its cost")
    print("sequences    vllm   exact  modules  without cache  exact/vllm  exact/forward  update  exact update  ratio")
    for size in sizes:
        random = np.random.default_rng(size)
        prompts = [Prompt(f"p:{i}", random.integers(3, 98, PROMPT).tolist(), "") for i in range(size)]

        def generate(generator: Generator, prompts: list[Prompt] = prompts) -> list[Group]:
            return generator.rollout(prompts, 1, policy_version=0, step=0)

        batch = build_batch(0, generate(cached), exact.recipe.batch, exact.recipe.objective)
        sides = {
            "vllm": partial(generate, vllm),
            "cached": partial(generate, cached),
            "modules": partial(generate, modules),
            "uncached": partial(generate, uncached),
            "forward": partial(exact.compute_logprobs, batch),
            "update": partial(plain._update_minibatch, batch, 0),
            "exact update": partial(exact._update_minibatch, batch, 0),
        }
        times = medians(alternate(rounds, sides))
        rate = {name: size * tokens / seconds / 1000 for name, seconds in times.items()}
        print(
            f"{size:9} {rate['vllm']:7.2f} {rate['cached']:7.2f} {rate['modules']:8.2f} "
            f"{rate['uncached']:14.2f} "
            f"{times['cached'] / times['vllm']:11.1f} {times['cached'] / times['forward']:14.1f} "
            f"{rate['update']:7.2f} {rate['exact update']:13.2f} {times['exact update'] / times['update']:6.2f}",
            flush=True,
        )
    vllm.close()


def rows_that_change() -> None:
    """Print how many rows differ in bits between a part of 1 to 199 rows and the whole batch of 200."""
    torch.manual_seed(0)
    print("rows that change with the batch     plain  invariant")
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        weight = (torch.randn(192, 128) / 10).to(dtype)
        for name, width, function in (
            ("product 128 → 192", 128, lambda x, weight=weight: F.linear(x, weight)),
            ("silu, rows of 33", 33, F.silu),
            ("exp, rows of 33", 33, torch.exp),
        ):
            x = torch.randn(200, width).to(dtype)
            counts = []
            for mode in (False, True):
                with BatchInvariant() if mode else torch.no_grad():
                    full, changed, total = function(x), 0, 0
                    for size in (1, 2, 3, 5, 8, 16, 31, 64, 199):
                        for start in (0, 1, 200 - size):
                            part = x[start : start + size].clone()
                            changed += int((function(part) != full[start : start + size]).any(1).sum())
                            total += size
                counts.append(f"{changed}/{total}")
            print(f"{str(dtype)[6:]:9} {name:22} {counts[0]:>9} {counts[1]:>10}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", choices=("fp32", "bf16", "fp16"), default="fp32")
    parser.add_argument("--sequences", type=int, nargs="+", default=[8, 32, 128])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    rows_that_change()
    compare_engines(options.dtype, options.sequences, options.tokens, options.rounds)
    shutdown()


if __name__ == "__main__":
    main()
