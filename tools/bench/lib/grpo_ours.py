"""One of the two programs of `tools.bench.trl`: the whole loop of this repository, held at every step.

python -m tools.bench.lib.grpo_ours RECIPE LONGEST [a.b=c …]

The driver gives every step the kind of its response lengths.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import megatron_rl.train as loop
from megatron_rl.config import load_recipe
from megatron_rl.monitor import Monitor
from megatron_rl.rollout.vllm_engine import VllmGenerator
from tools.bench.lib.gate import Gate
from tools.bench.lib.lengths import response_lengths


def main() -> None:
    recipe_path, longest, *overrides = sys.argv[1:]
    recipe = load_recipe(recipe_path, overrides)
    gate, facts, kind = Gate(), {}, "free"
    sample, record, run_engine = loop.sample, Monitor.record, VllmGenerator._run_engine

    def held_sample(run: Any, step: int) -> Any:
        nonlocal kind
        kind = gate.wait(**facts)
        if kind is None:
            gate.leave()
        run.monitor.timer._clock = time.process_time  # phases too: wall time of a shared machine says nothing
        return sample(run, step)

    def watched_record(self: Monitor, step: int, metrics: dict[str, float], groups: Any = None) -> Any:
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        facts.update(
            reward=sum(r.raw_reward for r in rollouts) / len(rollouts),
            tokens=sum(len(r.tokens) for r in rollouts),
            phases=dict(self.timer._seconds),
        )
        return record(self, step, metrics, groups)

    def with_lengths(self: VllmGenerator, requests: list, sampling: Any) -> Any:
        if kind == "free":
            return run_engine(self, requests, sampling)
        llm, enqueue, step = self._llm, self._llm.enqueue, self._policy_version

        def enqueue_with_lengths(prompts: list, params: list, **options: Any) -> Any:
            for p, length in zip(params, response_lengths(kind, len(params), int(longest), step), strict=True):
                p.max_tokens, p.stop_token_ids = length, []
            return enqueue(prompts, params, **options)

        llm.enqueue = enqueue_with_lengths
        try:
            return run_engine(self, requests, sampling)
        finally:
            del llm.enqueue

    loop.sample, Monitor.record = held_sample, watched_record
    VllmGenerator._run_engine = with_lengths
    loop.train(recipe, "never")


if __name__ == "__main__":
    main()
