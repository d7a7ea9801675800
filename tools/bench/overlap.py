"""How well generation overlaps with learning: step times with rollout.max_staleness 1 and 0, side by side.

One learner and one server on this machine. Runs of both kinds alternate; a run's first steps are left out, and medians
are over the steps of all runs of a kind. With nothing in common, a step that overlaps takes max(generation, learning),
both measured in the synchronous runs; the limit is 1.1 times that. They do have the cores in common: a server is two
processes (HTTP and engine) beside the learner, so the processor time of a step, of all processes, over the number of
cores is a bound that no overlap can pass. It is printed, too. With --own-cores the learner has the first core and the
server (all of its processes) the second, in runs of both kinds: as servers on nodes of their own, they have nothing in
common then.

    python -m tools.bench.overlap [--rounds 2] [--steps 14] [--length 24] [--prompts 32] [--own-cores] [--set a.b=c …]

--length: longest response; with --forced all responses have it.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

REPOSITORY = Path(__file__).resolve().parents[2]
RECIPE = REPOSITORY / "recipes" / "tiny" / "servers.yaml"
WARM_UP_STEPS = 4  # compilation, caches, and with staleness 1 the first step has nothing to overlap with
LIMIT = 1.1
GENERATION = "perf/time/generate"


def processor_seconds(process: psutil.Process) -> float:
    """User and system time of a process and all below it."""
    times = [one.cpu_times() for one in (process, *process.children(recursive=True))]
    return sum(time.user + time.system for time in times)


def run(
    folder: Path, staleness: int, steps: int, overrides: list[str], own_cores: bool
) -> tuple[list[dict[str, float]], float]:
    """The metrics of the steps of one run that count, and processor seconds of a step (learner and server)."""
    settings = [f"name=staleness-{staleness}", f"run_root={folder}", f"num_steps={steps}", "validation.every=0"]
    settings += [f"rollout.max_staleness={staleness}", "checkpoint.every=0", "monitor.plots=false"]
    settings += [f"rollout.servers.launch={int(not own_cores)}", "monitor.tensorboard=false", *overrides]
    environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY), "MRL_SERVER_TOKEN": secrets.token_hex(16)}
    arguments = [argument for setting in settings for argument in ("--set", setting)]
    metrics, log = folder / f"staleness-{staleness}" / "metrics.jsonl", folder / "output.txt"

    def start(program: str, core: int) -> psutil.Popen:
        pinned = ["taskset", "-c", str(core)] if own_cores else []
        command = [*pinned, sys.executable, "-m", "megatron_rl", program, str(RECIPE), *arguments]
        with log.open("a") as output:
            return psutil.Popen(command, env={**os.environ, **environment}, stdout=output, stderr=subprocess.STDOUT)

    def lines() -> list[str]:
        return metrics.read_text().splitlines() if metrics.exists() else []

    process = start("train", 0)
    programs = [process, start("serve", 1)] if own_cores else [process]
    marks: list[tuple[int, float]] = []  # steps done, processor seconds
    for num_lines in (WARM_UP_STEPS, steps - 1):
        while len(lines()) < num_lines and all(program.poll() is None for program in programs):
            time.sleep(0.02)
        if all(program.poll() is None for program in programs):
            marks.append((len(lines()), sum(map(processor_seconds, programs))))
    if any(server.poll() is not None for server in programs[1:]):
        process.terminate()  # it would wait for a server that is gone
    failed = process.wait() != 0 or len(lines()) < steps
    for server in programs[1:]:
        server.terminate()
        server.wait()
    if failed:
        raise SystemExit(log.read_text()[-4000:])
    (first, before), (last, after) = marks if len(marks) == 2 else [(0, 0.0), (0, 0.0)]
    seconds = (after - before) / (last - first) if last > first else math.nan  # steps too short to be told apart
    return [json.loads(row) for row in lines()][WARM_UP_STEPS:steps], seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=2, help="runs of each kind")
    parser.add_argument("--steps", type=int, default=14, help="of a run")
    parser.add_argument("--length", type=int, default=24, help="longest response, tokens")
    parser.add_argument("--forced", action="store_true", help="every response is that long")
    parser.add_argument("--prompts", type=int, default=32, help="of a step; eight responses each")
    parser.add_argument("--own-cores", action="store_true", help="learner and server on one core each")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides")
    options = parser.parse_args()
    overrides = [f"rollout.max_response_length={options.length}", f"batch.prompts={options.prompts}"]
    overrides += ["rollout.stop_token_ids=[]"] * options.forced + options.overrides
    rows: dict[int, list[dict[str, float]]] = {0: [], 1: []}
    work: dict[int, list[float]] = {0: [], 1: []}
    for _ in range(options.rounds):
        for staleness in rows:
            with tempfile.TemporaryDirectory() as folder:
                counted, seconds = run(Path(folder), staleness, options.steps, overrides, options.own_cores)
            rows[staleness] += counted
            work[staleness].append(seconds)

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
    print(f"{'  push of weights':<40} {median(1, lambda row: row['perf/push_s']):7.3f} s")
    print(f"{'  staleness, optimizer steps':<40} {median(1, lambda row: row['rollout/staleness_mean']):7.1f}")
    print(f"{f'limit: {LIMIT} × max(generation, the rest)':<40} {limit:7.3f} s")
    cores = os.cpu_count() or 1
    bound = statistics.median(work[1]) / cores
    print(
        f"{'processor time of a step / cores, 0 and 1':<40} {statistics.median(work[0]) / cores:7.3f} s, {bound:.3f} s"
    )
    print(f"{'staleness 1 against that':<40} {step[1] / bound:7.2f}")
    within = "within the limit" if step[1] <= limit else "above the limit"
    print(f"{'staleness 1 against the limit':<40} {step[1] / limit:7.2f}     {within}")


if __name__ == "__main__":
    main()
