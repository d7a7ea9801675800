"""One of the two programs of `tools.bench.trl`: the whole loop of this repository, held at every step.

python -m tools.bench.lib.grpo_ours RECIPE LONGEST [a.b=c …]

The driver gives every step the kind of its response lengths.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from vllm import LLM

from megatron_rl.config import load_recipe
from megatron_rl.train import train
from tools.bench.lib.gate import Gate
from tools.bench.lib.lengths import response_lengths

TIMES = "perf/time/"


def facts(run: Any) -> dict[str, Any]:
    """Return figures of the step that has ended; empty before the first."""
    if not run.directory.metrics.exists() or not (lines := run.directory.metrics.read_text().splitlines()):
        return {}
    row = json.loads(lines[-1])
    phases = {name.removeprefix(TIMES): value for name, value in row.items() if name.startswith(TIMES)}
    phases.pop("step")
    return {"reward": row["critic/rewards/mean"], "phases": phases}


def main() -> None:
    recipe_path, longest, *overrides = sys.argv[1:]
    gate, kind, number = Gate(), "free", 0
    enqueue = LLM.enqueue

    def before_step(run: Any, step: int) -> None:
        nonlocal kind, number
        kind, number = gate.wait(**facts(run)), step
        if kind is None:
            gate.leave()
        run.monitor.timer.clock = time.process_time  # phases too: wall time of a shared machine says nothing

    def enqueue_with_lengths(llm: LLM, prompts: list, params: list, **options: Any) -> Any:
        if kind != "free":
            for p, length in zip(params, response_lengths(kind, len(params), int(longest), number), strict=True):
                p.max_tokens, p.stop_token_ids = length, []
        return enqueue(llm, prompts, params, **options)

    LLM.enqueue = enqueue_with_lengths
    train(load_recipe(recipe_path, overrides), "never", before_step=before_step)


if __name__ == "__main__":
    main()
