"""Tokens per second of a server and a learner on long-tailed lengths: synchronous, and each mode of rollout.in_flight.

    python -m tools.bench.pipeline [--turns 3] [--steps 30] [--staleness 1] [--json FILE] [--set a.b=c …]

One learner and one server, a core each, the tiny model; 16 × 8 responses a step, log-normal with median 16, cut at 256.
Lengths are drawn (`tools.bench.lib.with_lengths`): every request asks the server for so many tokens. The arms take
turns, every second turn backwards; the first steps of a run are left out.

Each run is also simulated (`instruments.plan.servers`) on its own lengths, from unit costs of its own: of a
decoding step by the number of running responses, of a request and of a token of a prompt, measured on its server before
the run
(`lib.server_costs`); of a step that learns, of its tokens and of a weight update, from the run.

The learner's core also has the thread that asks the server. Where servers sample while the learner learns, its work
falls into the learner's time, so both are printed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron_rl.config import load_recipe
from megatron_rl.instruments.plan.fleet import ServerCosts
from megatron_rl.instruments.plan.servers import Asking, Pipeline, simulate
from megatron_rl.instruments.plan.workload import Lengths
from megatron_rl.model.architecture import read_architecture
from megatron_rl.rollout.servers.rendezvous import discover
from tools.bench.lib.server_costs import RUNNING, server_costs

ROOT = Path(__file__).resolve().parents[2]
RECIPE = ROOT / "recipes" / "tiny" / "servers.yaml"
LEARNER_CORE, SERVER_CORE = 0, 1
PROMPTS, SAMPLES, SLOTS = 16, 8, RUNNING[-1]
MEDIAN, SIGMA, LONGEST = 16, 1.0, 256
WARM_STEPS = 5  # compilation, caches, and the steps before servers run ahead
METRICS = (
    "perf/time/step",
    "perf/time/generate",
    "perf/time/forward_backward",
    "perf/refit_engine_s",
    "perf/push_s",
)
TARGETS = {"abort_and_resume": 1.3, "keep": 1.6}
SETTINGS = (
    "validation.every=0",
    "checkpoint.every=0",
    "monitor.plots=false",
    "monitor.tensorboard=false",
    "monitor.terminal=off",
    "rollout.servers.launch=0",
    "rollout.servers.weights_dir=/dev/shm",
    f"rollout.max_response_length={LONGEST}",
    f"rollout.num_samples={SAMPLES}",
    "rollout.stop_token_ids=[]",
    f"rollout.max_num_seqs={SLOTS}",
    f"batch.prompts={PROMPTS}",
)


@dataclass(frozen=True)
class Arm:
    mode: str
    max_staleness: int

    @property
    def name(self) -> str:
        return f"{self.mode}-{self.max_staleness}" if self.max_staleness else "synchronous"

    @property
    def settings(self) -> list[str]:
        mode = [] if self.mode == "finish" else [f"rollout.in_flight.mode={self.mode}"]
        return [f"name={self.name}", f"rollout.max_staleness={self.max_staleness}", *mode]


class Written(Lengths):
    """Lengths in the order in which a run asked for them."""

    def __init__(self, file: Path) -> None:
        super().__init__(str(file), LONGEST, np.array(file.read_text().split(), dtype=np.float64))
        self._next = 0

    def draw(self, prompts: int, samples: int) -> np.ndarray:
        first, self._next = self._next, self._next + prompts * samples
        return self.drawn_from[first : self._next].reshape(prompts, samples)


@dataclass(frozen=True)
class Measured:
    """One run from step `WARM_STEPS` on."""

    rows: list[dict[str, float]]
    lengths: Written
    costs: ServerCosts
    by_files: bool
    asking_s: float  # processor time a step of the learner's other threads: one asks, one converts answers

    @property
    def seconds(self) -> float:
        return sum(row["perf/time/step"] for row in self.rows)

    @property
    def tokens(self) -> float:
        return sum(row["perf/rollout_tokens"] for row in self.rows)

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds

    def median(self, name: str) -> float:
        return statistics.median(row[name] for row in self.rows)

    @property
    def learn(self) -> tuple[float, float]:
        """Seconds of a step, and of each of its tokens: the line through all steps."""
        tokens = np.array([row["perf/rollout_tokens"] for row in self.rows])
        seconds = np.array(
            [r["perf/time/step"] - r["perf/time/generate"] - r["perf/refit_engine_s"] for r in self.rows]
        )
        by_token = float(np.cov(tokens, seconds)[0, 1] / tokens.var(ddof=1))
        by_token = min(max(0.0, by_token), seconds.mean() / tokens.mean())  # noise may say otherwise
        return float(seconds.mean() - by_token * tokens.mean()), by_token


# ---------------------------------------------------------------- runs


@contextmanager
def server(folder: Path, settings: list[str], environment: dict[str, str]) -> Iterator[None]:
    """A server of its own for one run, on `SERVER_CORE`."""
    arguments = [argument for setting in settings for argument in ("--set", setting)]
    command = ["taskset", "-c", str(SERVER_CORE), sys.executable, "-m", "megatron_rl", "serve", str(RECIPE), *arguments]
    with (folder / "server.log").open("w") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
    try:
        yield
    finally:
        process.terminate()
        process.wait()


def run(folder: Path, arm: Arm, steps: int, overrides: list[str], rounds: int) -> Measured:
    """One run, and the unit costs of its server before it."""
    settings = [*SETTINGS, f"run_root={folder}", f"num_steps={steps}", *arm.settings, *overrides]
    token, written, log = secrets.token_hex(16), folder / "lengths.txt", folder / "train.log"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "MRL_SERVER_TOKEN": token}
    recipe = load_recipe(RECIPE, settings)
    program = [sys.executable, "-m", "tools.bench.lib.with_lengths", str(RECIPE), str(written)]
    numbers = [str(MEDIAN), str(SIGMA), str(LONGEST)]
    with server(folder, settings, environment):
        while not (addresses := discover(recipe.rollout.servers, folder / arm.name)):
            time.sleep(0.1)
        vocab_size = read_architecture(recipe.model.path).vocab_size
        costs = asyncio.run(server_costs(addresses[0], token, vocab_size, rounds))
        command = ["taskset", "-c", str(LEARNER_CORE), *program, *numbers, *settings]
        with log.open("w") as output:
            status = subprocess.run(command, env=environment, stdout=output, stderr=subprocess.STDOUT).returncode
    if status:
        raise SystemExit(f"{arm.name}: status {status}\n{log.read_text()[-3000:]}")
    rows = [json.loads(line) for line in (folder / arm.name / "metrics.jsonl").read_text().splitlines()]
    asking_s = json.loads(written.with_suffix(".json").read_text())["other_threads_s"] / steps
    return Measured(rows[WARM_STEPS:], Written(written), costs, bool(recipe.rollout.why_files), asking_s)


def simulated_rate(arm: Arm, measured: Measured, steps: int) -> float:
    load_s, refit_s = measured.median("perf/push_s"), measured.median("perf/refit_engine_s")
    is_alone = arm.max_staleness and measured.by_files  # the learner does not wait for the loading
    publish_s = refit_s if is_alone else max(0.0, refit_s - load_s)
    pipeline = Pipeline(
        measured.costs,
        num_servers=1,
        mode=arm.mode,
        max_staleness=arm.max_staleness,
        learn=measured.learn,
        asking=Asking(PROMPTS, SAMPLES, 0.0),
        publish_s=publish_s,
        load_s=load_s,
        joins=not measured.by_files,
    )
    return simulate(pipeline, measured.lengths, steps - WARM_STEPS, warm=WARM_STEPS).tokens_per_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--steps", type=int, default=30, help="of a run")
    parser.add_argument("--staleness", type=int, nargs="+", default=[1], help="rollout.max_staleness of the modes")
    parser.add_argument("--modes", nargs="+", default=["finish", "abort_and_resume", "keep"])
    parser.add_argument("--rounds", type=int, default=3, help="of unit costs, before a run")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--set", action="append", default=[], metavar="a.b=c", dest="overrides", help="of the recipe")
    options = parser.parse_args()
    os.sched_setaffinity(0, {LEARNER_CORE})
    arms = [Arm("finish", 0), *(Arm(mode, k) for k in options.staleness for mode in options.modes)]
    by_arm: dict[str, list[Measured]] = {arm.name: [] for arm in arms}
    simulated: dict[str, list[float]] = {arm.name: [] for arm in arms}
    loads = [os.getloadavg()[0]]
    for turn in range(options.turns):
        for arm in arms if turn % 2 == 0 else arms[::-1]:
            with tempfile.TemporaryDirectory() as folder:
                measured = run(Path(folder), arm, options.steps, options.overrides, options.rounds)
            by_arm[arm.name].append(measured)
            simulated[arm.name].append(simulated_rate(arm, measured, options.steps))
        loads.append(os.getloadavg()[0])
        print(
            f"turn {turn + 1}: " + ", ".join(f"{arm.name} {by_arm[arm.name][-1].rate:.0f}" for arm in arms), flush=True
        )
        if options.json:
            options.json.write_text(json.dumps(_figures(by_arm, simulated, loads), indent=1))
    _report(by_arm, simulated, loads)


def _figures(
    measured: dict[str, list[Measured]], simulated: dict[str, list[float]], loads: list[float]
) -> dict[str, Any]:
    runs = {
        name: [
            {
                "measured": one.rate,
                "simulated": rate,
                "learn_s": one.learn,
                "asking_s": one.asking_s,
                "decoding_step_s": {number: one.costs.read[number] for number in RUNNING},
                "request_s": one.costs.request,
                "prefilled_token_s": one.costs.prefill[0],
                **{metric: one.median(metric) for metric in METRICS},
            }
            for one, rate in zip(measured[name], simulated[name], strict=True)
        ]
        for name in measured
    }
    return {"runs": runs, "load": loads}


def _report(measured: dict[str, list[Measured]], simulated: dict[str, list[float]], loads: list[float]) -> None:
    print(f"load {', '.join(f'{load:.1f}' for load in loads)} on {os.cpu_count()} cores; response tokens per second")
    print(f"{'':<22}{'measured':>10}{'of synchronous':>16}{'target':>8}{'simulated':>11}{'of measured':>13}")
    baseline = [one.rate for one in measured["synchronous"]]
    for name, runs in measured.items():
        rates = [one.rate for one in runs]
        ratio, accuracy = np.median(np.divide(rates, baseline)), np.median(np.divide(simulated[name], rates))
        target = TARGETS.get(name.rpartition("-")[0], "")
        print(
            f"{name:<22}{np.median(rates):10.0f}{ratio:16.2f}{target!s:>8}"
            f"{np.median(simulated[name]):11.0f}{accuracy:13.2f}"
        )
    print(
        f"\n{'seconds of a step':<22}"
        + "".join(f"{metric.rpartition('/')[2]:>18}" for metric in METRICS)
        + f"{'asking':>10}"
    )
    for name, runs in measured.items():
        medians = [statistics.median(one.median(metric) for one in runs) for metric in METRICS]
        asking = statistics.median(one.asking_s for one in runs)
        print(f"{name:<22}" + "".join(f"{median:18.3f}" for median in medians) + f"{asking:10.3f}")


if __name__ == "__main__":
    main()
