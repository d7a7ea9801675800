"""What `megatron-rl watch` costs on a long run: 10,000 steps of 300 metrics, a batch of 2048 responses of 8192 tokens.

    python -m tools.bench.watch [--steps 10000] [--metrics 300] [--responses 2048] [--length 8192]

Files of that size are written to a temporary folder (600 MB). Times are wall seconds of this process; "sent" is a
compressed answer as the page gets it.
"""

from __future__ import annotations

import argparse
import gzip
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from safetensors.numpy import save_file

from megatron_rl.instruments.watch import views
from megatron_rl.instruments.watch.run import WatchedRun, dumps
from megatron_rl.monitor.plots import PANELS
from megatron_rl.monitor.run_directory import JsonlSink, encode_line

LAYERS, DRAWN = (
    48,
    ("critic/rewards/mean", "response_length/mean", "mismatch/rho_std", "actor/entropy", "actor/grad_norm"),
)


def write_metrics(file: Path, steps: int, number: int) -> None:
    random = np.random.default_rng(0)
    names = [*DRAWN, *(f"router/agree_frac/layer_{layer}" for layer in range(LAYERS))]
    names += [f"filler/metric_{i}" for i in range(number - len(names))]
    with file.open("w") as opened:
        for step in range(steps):
            opened.write(encode_line(step, dict(zip(names, random.random(len(names)).tolist(), strict=True))))


def write_batch(folder: Path, responses: int, length: int) -> None:
    random, total = np.random.default_rng(0), responses * length
    bounds = np.arange(responses + 1) * length
    logprobs = -random.random(total, dtype=np.float32)
    arrays = {
        "tokens": random.integers(3, 90, total + responses * 16),
        "cu_seqlens": bounds + np.arange(responses + 1) * 16,
        "cu_response": bounds,
        "inference_logprobs": logprobs,
        "old_logprobs": logprobs + random.standard_normal(total, dtype=np.float32) / 100,
        "loss_mask": np.ones(total, dtype=bool),
        "policy_versions": np.zeros(total, dtype=np.int32),
    }
    save_file(arrays, folder / "step_00000001.safetensors")
    about = [{"id": f"train:{i}/0", "prompt_length": 16, "advantage": 0.0, "reward": 1.0} for i in range(responses)]
    manifest = {"format_version": 3, "step": 1, "policy_version": 1, "kept": False, "minibatches": [], "metrics": {}}
    manifest |= {
        "parts": [{"file": "step_00000001.safetensors", "sequences": list(range(responses))}],
        "sequences": about,
    }
    (folder / "step_00000001.json").write_text(json.dumps(manifest))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--metrics", type=int, default=300)
    parser.add_argument("--responses", type=int, default=2048)
    parser.add_argument("--length", type=int, default=8192)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run = WatchedRun("run", Path(folder))
        run.directory.create()
        write_metrics(run.directory.metrics, options.steps, options.metrics)
        write_batch(run.directory.batches, options.responses, options.length)
        measure(run, options)


def measure(run: WatchedRun, options: argparse.Namespace) -> None:
    process = psutil.Process()
    before = process.memory_info().rss

    def history() -> None:
        run.refresh()
        while run.share_read < 1:
            run.refresh()

    def one_more_step() -> None:
        run.refresh()

    print(f"metrics.jsonl: {run.directory.metrics.stat().st_size / 1e6:.0f} MB, {len(PANELS)} panels")
    line("read the history", history)
    print(f"{'memory for it':42} {(process.memory_info().rss - before) / 1e6:8.0f} MB")
    JsonlSink(run.directory.metrics).write(options.steps, {DRAWN[0]: 1.0})
    line("read one more step", one_more_step)
    line("look, where nothing has changed", run.refresh)
    line("state", lambda: views.state([run]))
    line("panels", lambda: views.panels([run], "step", 400))
    line("map of routes", lambda: views.routes(run))
    line("batch: the 20 with the largest |log rho|", lambda: views.responses(run, 1, "mismatch", 0, 20))
    line("batch: the next 20", lambda: views.responses(run, 1, "mismatch", 20, 20))
    line("batch: 1000 tokens of a response", lambda: views.response(run, 1, 7, 1000))


def line(name: str, action: Callable[[], Any]) -> None:
    start = time.perf_counter()
    answer = action()
    took = time.perf_counter() - start
    sent = "" if answer is None else f"  {len(gzip.compress(dumps(answer), 5)) / 1e3:8.1f} kB sent"
    print(f"{name:42} {took:8.4f} s{sent}")


if __name__ == "__main__":
    main()
