"""Cost of our layers on top of both engines: generation against raw vLLM, update against a bare Megatron loop.

Same engine object, same requests, same weights, in turn, so that nothing differs but our code. Generation: `rollout`
against `LLM.generate` with the sampling parameters and seeds that `rollout` uses; the responses must be the same.
Update: `Learner.update` (packing, objective, metrics, gradient noise, clipping, Adam) against Megatron's schedule over
the same packed rows with the mean log-prob as loss, and its optimizer. Processor time and wall clock (on a GPU, after
it has ended), one thread; the ratio is the median over pairs, with its middle half.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from megatron_rl.batch import build_batch
from megatron_rl.data import load_tokenizer
from megatron_rl.learner.learner import Learner
from megatron_rl.run.engines import start_generator
from megatron_rl.types import Batch
from tools.bench.lib.timing import by_clock, medians, spread, wall
from tools.bench.parts import first_prompts, tiny

CLOCKS = {"wall clock": wall, "processor time": time.process_time}
Times = dict[str, dict[str, float]]
"""Clock → side, "ours" or "engine" → median seconds of a round."""


def compare(name: str, ours: Callable[[], Any], engine: Callable[[], Any], rounds: int) -> tuple[dict[str, Any], Times]:
    """Print the engine's share of our time by each clock; return the last result of each side, and the times."""
    results: dict[str, Any] = {}
    sides = {"ours": ours, "engine": engine}
    times = by_clock(rounds, {side: partial(_keep, results, side, call) for side, call in sides.items()}, CLOCKS)
    for clock, by_side in times.items():
        seconds = medians(by_side)
        print(
            f"{name:12} {clock:14} ours {seconds['ours']:.3f} s, engine alone {seconds['engine']:.3f} s, "
            f"share {spread(by_side['engine'], by_side['ours'])}"
        )
    return results, {clock: medians(by_side) for clock, by_side in times.items()}


def _keep(results: dict[str, Any], side: str, call: Callable[[], Any]) -> None:
    results[side] = call()


def bench_generation(generator: Any, prompts: list, group: int, rounds: int) -> tuple[list, Times]:
    """The engine's own call gets what `rollout` gives it, captured from a call of it."""
    llm, captured = generator._llm, {}
    enqueue = llm.enqueue

    def capture(requests: list, params: list, **options: Any) -> Any:
        captured.update(requests=requests, params=params)
        return enqueue(requests, params, **options)

    llm.enqueue = capture
    generator.rollout(prompts, group, policy_version=0, step=0)
    del llm.enqueue

    def raw() -> list:
        from megatron_rl.rollout import process_state

        with process_state.compilation(False):
            return llm.generate(captured["requests"], captured["params"], use_tqdm=False)

    def ours() -> list:
        return generator.rollout(prompts, group, policy_version=0, step=0)

    results, times = compare("generation", ours, raw, rounds)
    rollouts = [rollout.tokens for group in results["ours"] for rollout in group.rollouts]
    theirs = [list(output.outputs[0].token_ids) for output in results["engine"]]
    assert [tokens.tolist() for tokens in rollouts] == theirs, "other tokens: nothing to compare"
    return results["ours"], times


def bench_update(learner: Learner, batch: Batch, rounds: int) -> Times:
    indices = list(range(len(batch.sequences)))
    mode = learner._routing_mode(updating=True)
    num_tokens = sum(s.length for s in batch.sequences)
    microbatches = learner.passes.microbatches(batch, indices, mode)

    def loss(logits: torch.Tensor, microbatch: Any) -> tuple:
        logprobs = logits.flatten(0, 1)[microbatch.positions].float().log_softmax(-1)
        chosen = logprobs.gather(1, microbatch.labels[:, None])
        return -chosen.sum() / num_tokens, torch.ones((), dtype=torch.int), None

    def bare() -> None:
        learner.model.zero_grad_buffer()
        learner.optimizer.zero_grad()
        learner.passes.run(microbatches, loss, mode)
        learner.optimizer.step()

    if learner.noise is not None:
        learner.noise.begin([], 0)
    return compare("update", lambda: learner.update(batch), bare, rounds)[1]


def engines(rounds: int = 15, prompts: int = 8, group: int = 8, length: int = 64) -> None:
    """Both comparisons on the tiny model, with ``length`` tokens in every response."""
    recipe = tiny(length=length)
    learner = Learner(recipe)
    generator = start_generator(recipe, load_tokenizer(str(recipe.model.path)), learner)
    groups, _ = bench_generation(generator, first_prompts(recipe, prompts), group, rounds)
    for i, rollout in enumerate(r for group in groups for r in group.rollouts):
        rollout.reward = float(i % 2)
    bench_update(learner, build_batch(0, groups, recipe.batch, recipe.objective), rounds)
    generator.close()
