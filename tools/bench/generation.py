"""Generation on a CPU with what we change in vLLM against vLLM as it is, in one engine in turn.

The changes are the sampler and the book-keeping of `rollout/cpu_engine.py`; each is left out alone, and both. Blocks of
the key/value cache have another size too: an engine of its own has vLLM's 128 tokens.

    python -m tools.bench.generation [--compiled] [--prompts 8] [--group 8] [--length 64] [--rounds 25]

Same requests and weights, and but for the blocks the same engine object; the samplers draw other responses of the same
distribution, all of one length. Processor time, one thread; the ratio is the median over rounds, with its middle half.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.engine.logprobs import LogprobsProcessor
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler
from vllm.v1.sample.sampler import Sampler

from megatron_rl.config import Recipe, load_recipe
from megatron_rl.data import load_prompts, load_tokenizer
from megatron_rl.rollout import cpu_engine, engine_arguments
from megatron_rl.rollout.vllm_engine import VllmGenerator
from tools.bench.lib.timing import alternate, medians, spread

ROOT = Path(__file__).resolve().parents[2]
VLLM = (TopKTopPSampler.forward_cpu, Sampler.gather_logprobs)  # before our engine puts its own there

OURS = (cpu_engine.forward_cpu, cpu_engine.gather_logprobs)

VLLM_BLOCK_TOKENS = 128


def start(recipe: Recipe, block_tokens: int) -> VllmGenerator:
    engine_arguments.CPU_BLOCK_TOKENS = block_tokens
    return VllmGenerator(recipe.rollout, recipe.model.path, max_prompt_length=recipe.data.prompt.max_length)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compiled", action="store_true", help="vLLM's model compiled; our default on a CPU is not")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--length", type=int, default=64, help="tokens of every response")
    parser.add_argument("--rounds", type=int, default=25)
    options = parser.parse_args()
    torch.set_num_threads(1)
    changes = [f"rollout.max_response_length={options.length}", "rollout.stop_token_ids=[]"]
    changes += [f"rollout.enforce_eager={str(not options.compiled).lower()}"]
    recipe = load_recipe(ROOT / "recipes" / "tiny" / "grpo.yaml", changes)
    tokenizer = load_tokenizer(str(recipe.model.path))
    prompts = list(load_prompts(recipe.data.train, tokenizer, recipe.data.prompt))[: options.prompts]
    engine, other = start(recipe, engine_arguments.CPU_BLOCK_TOKENS), start(recipe, VLLM_BLOCK_TOKENS)
    core = engine._llm.llm_engine.engine_core.engine_core
    sampler = core.model_executor.driver_worker.worker.model_runner.sampler.topk_topp_sampler

    def generate_with(
        functions: tuple[Callable, Callable], our_bookkeeping: bool, engine: VllmGenerator = engine
    ) -> None:
        forward, Sampler.gather_logprobs = functions[0], staticmethod(functions[1])
        sampler.forward = forward.__get__(sampler)
        books = cpu_engine
        KVCacheManager.allocate_slots = books.allocate_slots if our_bookkeeping else books._allocate_slots
        update = books.update_sample_logprobs if our_bookkeeping else books._update_sample_logprobs
        LogprobsProcessor._update_sample_logprobs = update
        engine.rollout(prompts, options.group, policy_version=0, step=0)

    sides = {
        "ours": lambda: generate_with(OURS, True),
        "vLLM's sampler": lambda: generate_with(VLLM, True),
        "vLLM's book-keeping": lambda: generate_with(OURS, False),
        "vLLM's both": lambda: generate_with(VLLM, False),
        "vLLM's blocks": lambda: generate_with(OURS, True, other),
    }
    times = alternate(options.rounds, sides)
    engine.close()
    other.close()
    kind = "compiled" if options.compiled else "eager"
    print(f"{options.prompts} × {options.group} responses of {options.length} tokens, {kind}, {options.rounds} rounds")
    for name, median in medians(times).items():
        print(f"{name:<20} {median:.3f} s, {spread(times[name], times['ours'])} times ours")


if __name__ == "__main__":
    main()
