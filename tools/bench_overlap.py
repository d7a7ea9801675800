#!/usr/bin/env python3
"""How well generation overlaps with learning: step times with rollout.max_staleness 1 and 0, side by side.

One learner and one server on this machine, on a core each. Runs of both kinds alternate; a run's first steps are left
out, and medians are over the steps of all runs of a kind. With nothing in common, a step that overlaps takes
max(generation, learning), both measured in the synchronous runs; the limit is 1.1 times that.

    tools/bench_overlap.py [--rounds 2] [--steps 14] [--set key.path=value …]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
RECIPE = REPOSITORY / "recipes" / "tiny" / "servers.yaml"
WARM_UP_STEPS = 4  # compilation, caches, and with staleness 1 the first step has nothing to overlap with
LIMIT = 1.1
GENERATION = "perf/time/generate"


def run(folder: Path, staleness: int, steps: int, overrides: list[str]) -> list[dict[str, float]]:
    """The metrics of the steps of one run that count."""
    settings = [f"name=staleness-{staleness}", f"run_root={folder}", f"num_steps={steps}", "validation.every=0"]
    settings += [f"rollout.max_staleness={staleness}", "rollout.servers.launch=1", "monitor.plots=false"]
    settings += ["batch.prompts=32", "checkpoint.every=0", "monitor.tensorboard=false", *overrides]
    command = [sys.executable, "-m", "megatron_rl", "train", str(RECIPE)]
    command += [argument for setting in settings for argument in ("--set", setting)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stdout[-2000:] + done.stderr[-2000:])
    rows = (folder / f"staleness-{staleness}" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(row) for row in rows][WARM_UP_STEPS:steps]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=2, help="runs of each kind")
    parser.add_argument("--steps", type=int, default=14, help="of a run")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides")
    options = parser.parse_args()
    rows: dict[int, list[dict[str, float]]] = {0: [], 1: []}
    for _ in range(options.rounds):
        for staleness in rows:
            with tempfile.TemporaryDirectory() as folder:
                rows[staleness] += run(Path(folder), staleness, options.steps, options.overrides)

    def median(staleness: int, value) -> float:
        return statistics.median(value(row) for row in rows[staleness])

    step = {k: median(k, lambda row: row["perf/time/step"]) for k in rows}
    generation = median(0, lambda row: row[GENERATION])
    learning = median(0, lambda row: row["perf/time/step"] - row[GENERATION])
    limit = LIMIT * max(generation, learning)
    print(f"{len(rows[0])} + {len(rows[1])} steps, load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    print(f"{'generation (staleness 0)':<40} {generation:7.3f} s")
    print(f"{'everything else (staleness 0)':<40} {learning:7.3f} s")
    print(f"{'step, staleness 0':<40} {step[0]:7.3f} s")
    print(f"{'step, staleness 1':<40} {step[1]:7.3f} s   {step[1] / step[0]:.2f} of it")
    print(f"{'  of that waiting for generation':<40} {median(1, lambda row: row[GENERATION]):7.3f} s")
    print(f"{'  staleness, optimizer steps':<40} {median(1, lambda row: row['rollout/staleness_mean']):7.1f}")
    print(f"{f'limit: {LIMIT} × max(generation, the rest)':<40} {limit:7.3f} s")
    within = "within the limit" if step[1] <= limit else "above the limit"
    print(f"{'staleness 1 against the limit':<40} {step[1] / limit:7.2f}     {within}")


if __name__ == "__main__":
    main()
