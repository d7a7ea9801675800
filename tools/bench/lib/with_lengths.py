"""`megatron-rl train` with response lengths that are drawn, for `tools.bench.pipeline`; nothing else differs.

python -m tools.bench.lib.with_lengths RECIPE LENGTHS MEDIAN SIGMA LONGEST [a.b=c …]

The body of every request asks for as many tokens as its own random number says, so that the servers do the work of
these lengths, token by token. The recipe has no stop tokens. LENGTHS gets one length a line, in the order of requests;
a file beside it (`.json`) gets the processor seconds of all threads but the main one: one asks the server, one makes
rollouts of its answers.
"""

from __future__ import annotations

import json
import math
import random
import sys
import time
from pathlib import Path
from typing import Any

from megatron_rl.config import load_recipe
from megatron_rl.train import train


def main() -> None:
    recipe_path, written, median, sigma, longest, *overrides = sys.argv[1:]
    log = Path(written)

    def set_length(request: Any, body: dict[str, Any]) -> None:
        drawn = random.Random(request.seed).lognormvariate(math.log(float(median)), float(sigma))
        length = min(int(longest), math.ceil(drawn))
        body["sampling_params"]["max_tokens"] = length
        with log.open("a") as file:
            file.write(f"{length}\n")

    before = time.process_time() - time.thread_time()
    train(
        load_recipe(recipe_path, overrides),
        "never",
        before_step=lambda run, step: run.generator.change_bodies(set_length),
    )
    seconds = time.process_time() - time.thread_time() - before
    log.with_suffix(".json").write_text(json.dumps({"other_threads_s": seconds}))


if __name__ == "__main__":
    main()
