"""Tokens per second of a server and a learner on long-tailed lengths: synchronous, and each mode of rollout.in_flight.

    python -m tools.bench.pipeline [--turns 3] [--steps 30] [--staleness 1] [--json FILE] [--set a.b=c …]

One learner and one server, a core each, the tiny model; 16 × 8 responses a step, log-normal with median 16, cut at 256.
Lengths are drawn (`tools.bench.lib.with_lengths`): every request asks the server for so many tokens. The arms take
turns, every second turn backwards; the first steps of a run are left out.

Each run is also simulated (`megatron_rl.plan.pipeline`) on its own lengths, from unit costs of its own: of a decoding
step by the number of running responses, of a request and of a token of a prompt, measured on its server before the run;
of a token that is learned and of a weight update, from the run.
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

import numpy as np

from megatron_rl.checkpoint.architecture import read_architecture
from megatron_rl.config import load_recipe
from megatron_rl.plan.asking import Asking
from megatron_rl.plan.fleet import ServerCosts
from megatron_rl.plan.lengths import Lengths
from megatron_rl.plan.pipeline import Pipeline, simulate
from megatron_rl.rollout import Sampling
from megatron_rl.rollout.requests import Request
from megatron_rl.rollout.servers.client import ServerClient, ServerLost, Weights, request_body
from megatron_rl.rollout.servers.rendezvous import Address, discover
from megatron_rl.types import Prompt

ROOT = Path(__file__).resolve().parents[2]
RECIPE = ROOT / "recipes" / "tiny" / "servers.yaml"
LEARNER_CORE, SERVER_CORE = 0, 1
PROMPTS, SAMPLES, SLOTS = 16, 8, 64
MEDIAN, SIGMA, LONGEST = 16, 1.0, 256
WARM_STEPS = 5  # compilation, caches, and the steps before servers run ahead
SHORT, LONG = 16, 192  # tokens: decoding steps are the difference of their times
RUNNING = (1, 4, 16, 32, 64)
PREFILLED = (8, 200)  # tokens of a prompt
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
        return self.found[first : self._next].reshape(prompts, samples)


@dataclass(frozen=True)
class Measured:
    """One run from step `WARM_STEPS` on."""

    rows: list[dict[str, float]]
    lengths: Written
    costs: ServerCosts

    @property
    def seconds(self) -> float:
        return sum(row["perf/time/step"] for row in self.rows)

    @property
    def tokens(self) -> float:
        return sum(row["perf/rollout_tokens"] for row in self.rows)

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


# ---------------------------------------------------------------- unit costs


class Probe:
    """Asks an idle server for batches of responses of one length."""

    def __init__(self, client: ServerClient, vocab_size: int) -> None:
        self._client, self._random = client, np.random.default_rng(0)
        self._vocab_size = vocab_size

    async def seconds(self, number: int, tokens: int, prompt_tokens: int = PREFILLED[0]) -> float:
        """Of ``number`` responses of ``tokens`` tokens to prompts that no cache holds."""
        bodies = []
        for row in range(number):
            prompt = self._random.integers(0, self._vocab_size, prompt_tokens).tolist()
            request = Request(row, Prompt(str(row), prompt, ""), 0, int(self._random.integers(1 << 62)))
            bodies.append(request_body(request, Sampling(tokens, 1.0), []))
        start = time.perf_counter()
        await asyncio.gather(*(self._client.generate(body, 0) for body in bodies))
        return time.perf_counter() - start

    async def median(self, rounds: int, *shapes: tuple[int, ...]) -> list[float]:
        """Seconds of each of ``shapes``, in turns."""
        times = [[await self.seconds(*shape) for shape in shapes] for _ in range(rounds)]
        return [statistics.median(column) for column in zip(*times, strict=True)]


async def until_up(client: ServerClient) -> None:
    """A server says where it is just before it answers."""
    while True:
        try:
            return await client.check_health()
        except ServerLost:
            await asyncio.sleep(0.1)


async def server_costs(address: Address, token: str, vocab_size: int, rounds: int) -> ServerCosts:
    """Unit costs of an idle server; medians over ``rounds``."""
    client = ServerClient(address, token, 600.0)
    probe, steps = Probe(client, vocab_size), []
    try:
        await until_up(client)
        await client.push(Weights(0))
        await probe.seconds(SLOTS, LONG)  # compilation and caches
        for number in RUNNING:
            short, long = await probe.median(rounds, (number, SHORT), (number, LONG))
            steps.append((long - short) / (LONG - SHORT))
        low, high = await probe.median(rounds, *((SLOTS, 1, tokens) for tokens in PREFILLED))
    finally:
        await client.close()
    read = np.interp(np.arange(SLOTS + 1), [0, *RUNNING], [steps[0], *steps])
    token_s = max(0.0, (high - low) / SLOTS / (PREFILLED[1] - PREFILLED[0]))
    return ServerCosts(slots=SLOTS, overhead=0.0, read=read.tolist(), request=low / SLOTS, prefill=(token_s, 0.0))


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
        while not (found := discover(recipe.rollout.servers, folder / arm.name)):
            time.sleep(0.1)
        vocab_size = read_architecture(recipe.model.path).vocab_size
        costs = asyncio.run(server_costs(found[0], token, vocab_size, rounds))
        command = ["taskset", "-c", str(LEARNER_CORE), *program, *numbers, *settings]
        with log.open("w") as output:
            status = subprocess.run(command, env=environment, stdout=output, stderr=subprocess.STDOUT).returncode
    if status:
        raise SystemExit(f"{arm.name}: status {status}\n{log.read_text()[-3000:]}")
    rows = [json.loads(line) for line in (folder / arm.name / "metrics.jsonl").read_text().splitlines()]
    return Measured(rows[WARM_STEPS:], Written(written), costs)


def simulated_rate(arm: Arm, measured: Measured, steps: int) -> float:
    rows = measured.rows
    learn_s = sum(r["perf/time/step"] - r["perf/time/generate"] - r["perf/refit_engine_s"] for r in rows)
    load_s = statistics.median(row["perf/push_s"] for row in rows)
    refit_s = statistics.median(row["perf/refit_engine_s"] for row in rows)
    publish_s = refit_s if arm.max_staleness else max(0.0, refit_s - load_s)  # ahead, nobody waits for the loading
    pipeline = Pipeline(
        measured.costs,
        num_servers=1,
        mode=arm.mode,
        max_staleness=arm.max_staleness,
        learn=(0.0, learn_s / measured.tokens),
        asking=Asking(PROMPTS, SAMPLES, 0.0),
        publish_s=publish_s,
        load_s=load_s,
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
    measured: dict[str, list[float]] = {arm.name: [] for arm in arms}
    simulated: dict[str, list[float]] = {arm.name: [] for arm in arms}
    loads, unit_costs = [os.getloadavg()[0]], []
    for turn in range(options.turns):
        for arm in arms if turn % 2 == 0 else arms[::-1]:
            with tempfile.TemporaryDirectory() as folder:
                found = run(Path(folder), arm, options.steps, options.overrides, options.rounds)
                measured[arm.name].append(found.rate)
                simulated[arm.name].append(simulated_rate(arm, found, options.steps))
            costs = found.costs
            unit_costs.append(
                {
                    "arm": arm.name,
                    "step_s": {number: costs.read[number] for number in RUNNING},
                    "request_s": costs.request,
                    "prefilled_token_s": costs.prefill[0],
                }
            )
        loads.append(os.getloadavg()[0])
        print(f"turn {turn + 1}: " + ", ".join(f"{arm.name} {measured[arm.name][-1]:.0f}" for arm in arms), flush=True)
    _report(measured, simulated, loads)
    if options.json:
        figures = {"measured": measured, "simulated": simulated, "load": loads, "unit_costs": unit_costs}
        options.json.write_text(json.dumps(figures, indent=1))


def _report(measured: dict[str, list[float]], simulated: dict[str, list[float]], loads: list[float]) -> None:
    print(f"load {', '.join(f'{load:.1f}' for load in loads)} on {os.cpu_count()} cores; response tokens per second")
    print(f"{'':<22}{'measured':>10}{'of synchronous':>16}{'target':>8}{'simulated':>11}{'of measured':>13}")
    for name, rates in measured.items():
        ratio = statistics.median(np.divide(rates, measured["synchronous"]))
        accuracy = statistics.median(np.divide(simulated[name], rates))
        target = TARGETS.get(name.rpartition("-")[0], "")
        print(
            f"{name:<22}{statistics.median(rates):10.0f}{ratio:16.2f}{target!s:>8}"
            f"{statistics.median(simulated[name]):11.0f}{accuracy:13.2f}"
        )


if __name__ == "__main__":
    main()
