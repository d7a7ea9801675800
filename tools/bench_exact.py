#!/usr/bin/env python
"""What exactness costs: generation and update of the exact engine against vLLM and the ordinary learner.

    python tools/bench_exact.py [--dtype fp32] [--sequences 8 32 128] [--tokens 64] [--rounds 5]

Processor time of one thread, forced lengths, both sides in alternating rounds of one run. The physical limit of exact
generation is a forward pass of the same tokens in whole rows, which the last column gives: what generating token by
token in Python adds to it. Then: how many rows of plain kernels change bits with the batch on this machine, which is
what the exact engine is there to prevent.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402

from megatron_rl.batch import build_batch  # noqa: E402
from megatron_rl.config import Recipe, load_recipe  # noqa: E402
from megatron_rl.learner.distributed import shutdown  # noqa: E402
from megatron_rl.learner.invariant import BatchInvariant  # noqa: E402
from megatron_rl.learner.learner import Learner  # noqa: E402
from megatron_rl.rollout.exact import ExactGenerator  # noqa: E402
from megatron_rl.types import Prompt  # noqa: E402

PROMPT = 8


def recipe(engine: str, dtype: str, tokens: int) -> Recipe:
    values = [f"rollout.engine={engine}", f"rollout.dtype={dtype}", f"learner.dtype={dtype}", "reward={name: modsum}"]
    values += [f"rollout.max_response_length={tokens}", "rollout.stop_token_ids=[]", "rollout.verify_refit=false"]
    return load_recipe(ROOT / "recipes" / "tiny" / "grpo.yaml", [*values, "learner.optimizer.lr=1e-9"])


def exact_generator(learner: Learner, kv_cache: bool) -> ExactGenerator:
    learner.recipe.exact.kv_cache = kv_cache
    return ExactGenerator(
        learner.recipe.rollout,
        learner.recipe.exact,
        learner.decoder(),
        stop_token_ids=[],
        decode=lambda tokens: "",
        describe=learner.describe_precision,
    )


def vllm_generator(settings: Recipe):
    from megatron_rl.rollout.vllm_engine import VllmGenerator

    return VllmGenerator(settings.rollout, settings.model.path, max_prompt_length=PROMPT)


def seconds(function: Callable[[], object]) -> float:
    start = time.process_time()
    function()
    return time.process_time() - start


def medians(rounds: int, *functions: Callable[[], object]) -> list[float]:
    """Median processor seconds of each, one of each per round, after one round that does not count."""
    times = [[seconds(function) for function in functions] for _ in range(rounds + 1)][1:]
    return [statistics.median(column) for column in zip(*times, strict=True)]


def compare_engines(dtype: str, sizes: list[int], tokens: int, rounds: int) -> None:
    exact, plain = Learner(recipe("exact", dtype, tokens)), Learner(recipe("vllm", dtype, tokens))
    cached, uncached, vllm = exact_generator(exact, True), exact_generator(exact, False), vllm_generator(plain.recipe)
    print(f"{dtype}, prompts of {PROMPT}, {tokens} forced tokens; thousand tokens per second, and times its cost")
    print("sequences    vllm   exact  without cache  exact/vllm  exact/forward  update  exact update  ratio")
    for size in sizes:
        random = np.random.default_rng(size)
        prompts = [Prompt(f"p:{i}", random.integers(3, 98, PROMPT).tolist(), "") for i in range(size)]

        def generate(generator, prompts=prompts):
            return generator.rollout(prompts, 1, policy_version=0, step=0)

        batch = build_batch(0, generate(cached), exact.recipe)
        times = medians(
            rounds,
            lambda generate=generate: generate(vllm),
            lambda generate=generate: generate(cached),
            lambda generate=generate: generate(uncached),
            lambda batch=batch: exact.compute_logprobs(batch),
            lambda batch=batch: plain._update_minibatch(batch, 0),
            lambda batch=batch: exact._update_minibatch(batch, 0),
        )
        rate = [size * tokens / t / 1000 for t in times]
        print(
            f"{size:9} {rate[0]:7.2f} {rate[1]:7.2f} {rate[2]:14.2f} {times[1] / times[0]:11.1f} "
            f"{times[1] / times[3]:14.1f} {rate[4]:7.2f} {rate[5]:13.2f} {times[5] / times[4]:6.2f}",
            flush=True,
        )
    vllm.close()


def rows_that_change() -> None:
    """Rows of 1 to 199 among 200 whose bits differ from the same row in the whole batch."""
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
                    whole, changed, total = function(x), 0, 0
                    for size in (1, 2, 3, 5, 8, 16, 31, 64, 199):
                        for start in (0, 1, 200 - size):
                            part = x[start : start + size].clone()
                            changed += int((function(part) != whole[start : start + size]).any(1).sum())
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
