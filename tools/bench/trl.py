"""Step time against TRL's GRPOTrainer, step by step in turn: same model, task, batch, threads, precision, engine.

    python -m tools.bench.trl --trl-python VENV/bin/python [--lengths fixed tail free] [--longest 256] [--steps 24]
                              [--ours eager compiled] [--trl default eager plain] [--set a.b=c …]

``fixed``: every response has exactly 64 tokens. ``tail``: log-normal lengths, median --longest/16, the same
draws for all. ``free``: responses end where the policy ends them, and the run goes on until all reach reward 0.9 (or
--steps). All use vLLM in their process with the same weights; they take turns of some steps, so that all see the
machine in the same state. The first step of a turn is not counted: it finds the caches full of another program, which
a run on its own never does. TRL compiles vLLM's model, our default on a CPU does not: ``compiled`` and ``eager``
exchange that.
``plain`` is TRL without its correction of the mismatch, which needs a pass for old log-probs there. The ratio is the
median over pairs of steps: of processor time where others use the machine, of wall time where it is idle.

TRL is no requirement of ours: `make bench-trl` makes it an environment of its own (.cache/trl) beside vLLM's packages
and runs this. ``--alone`` runs ours without it.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import sys
import tempfile
from pathlib import Path

from tools.bench.lib.gate import Worker
from tools.bench.lib.timing import spread

ROOT = Path(__file__).resolve().parents[2]

TINY = ROOT / "recipes" / "tiny"
WARM_UP = 2  # turns
# TRL leaves to the environment what our engine tells vLLM by itself.
FOR_TRL = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}
GOAL, SMOOTHING = 0.9, 5  # reward, and steps that it is averaged over


def workers(options: argparse.Namespace, folder: Path) -> list[Worker]:
    """Ours first."""
    environment = {"OMP_NUM_THREADS": str(options.threads), "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
    longest, batch, started = options.longest, (options.prompts, options.group), []
    overrides = [
        f"batch.prompts={batch[0]}",
        f"rollout.num_samples={batch[1]}",
        f"rollout.max_response_length={longest}",
        f"learner.optimizer.lr={options.lr}",
        "num_steps=100000",
        "validation.every=0",
        "objective.correction=[{mode: tis, level: token, cap: 3.0}]",
        *options.set,
    ]
    for mode in options.ours:
        command = ["-m", "tools.bench.lib.grpo_ours", TINY / "grpo.yaml", longest, *overrides]
        command += [f"run_root={folder / mode}", f"rollout.enforce_eager={str(mode == 'eager').lower()}"]
        name = f"ours, {mode}"
        started.append(Worker(name, [sys.executable, *map(str, command)], folder / f"{name}.log", environment))
    environment = FOR_TRL | environment
    for mode in options.trl:
        command = ["-m", "tools.bench.lib.grpo_trl", TINY / "model", TINY / "data" / "train.jsonl"]
        command += [longest, *batch, options.lr, mode]
        name = f"TRL, {mode}"
        started.append(Worker(name, [options.trl_python, *map(str, command)], folder / f"{name}.log", environment))
    return started


def counted(worker: Worker, options: argparse.Namespace) -> list[dict]:
    """Steps after the warm-up, without the first one of each turn."""
    first = WARM_UP * options.turn
    return [step for i, step in enumerate(worker.steps) if i >= first and (i % options.turn or options.turn == 1)]


def smoothed(worker: Worker) -> list[float]:
    rewards = [step["reward"] for step in worker.steps]
    return [statistics.mean(rewards[max(0, i + 1 - SMOOTHING) : i + 1]) for i in range(len(rewards))]


def report(kind: str, programs: list[Worker], options: argparse.Namespace) -> None:
    print(
        f"\n{options.prompts} × {options.group} responses, {kind} lengths, fp32, {options.threads} thread(s), "
        f"{len(counted(programs[0], options))} steps each, {options.turn} in turn"
    )
    print(f"{'':16}{'wall s':>9}{'processor s':>13}{'peak MiB':>10}  phases, s of processor time")
    for worker in programs:
        steps = counted(worker, options)
        names = dict.fromkeys(name for step in steps for name in step["phases"])
        phases = {name: statistics.median(step["phases"].get(name, 0.0) for step in steps) for name in names}
        wall, processor = (statistics.median(step[clock] for step in steps) for clock in ("wall", "processor"))
        shown = "  ".join(f"{name} {seconds:.3f}" for name, seconds in phases.items() if seconds >= 0.001)
        print(f"{worker.name:16}{wall:9.3f}{processor:13.3f}{steps[-1]['memory_mib']:10.0f}  {shown}", flush=True)
    for ours, theirs in itertools.product(programs[: len(options.ours)], programs[len(options.ours) :]):
        for clock in ("processor", "wall"):
            our, their = ([step[clock] for step in counted(side, options)] for side in (ours, theirs))
            print(f"{theirs.name} / {ours.name}, {clock} time: {spread(their, our)}")


def report_goal(programs: list[Worker]) -> None:
    for worker in programs:
        reached = next((i for i, reward in enumerate(smoothed(worker)) if reward >= GOAL), None)
        if reached is None:
            print(f"{worker.name}: reward {GOAL} not reached; last {smoothed(worker)[-1]:.2f}")
            continue
        wall, processor = (sum(s[clock] for s in worker.steps[: reached + 1]) for clock in ("wall", "processor"))
        print(
            f"{worker.name}: reward {GOAL} at step {reached}, {processor:.1f} s of processor, {wall:.1f} s of wall time"
        )


def run(kind: str, programs: list[Worker], options: argparse.Namespace) -> None:
    for worker in programs:
        worker.steps.clear()
    for turn in range(-(-options.steps // options.turn) + WARM_UP):
        for worker in programs if turn % 2 == 0 else programs[::-1]:
            for _ in range(options.turn):
                worker.step(kind)
        if kind == "free" and all(smoothed(worker)[-1] >= GOAL for worker in programs):
            break
    report(kind, programs, options)
    if kind == "free":
        report_goal(programs)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl-python", help="interpreter of a virtual environment that has trl and vLLM")
    parser.add_argument("--alone", action="store_true", help="ours without TRL")
    parser.add_argument("--trl", nargs="+", choices=("default", "plain", "eager"), default=["default"])
    parser.add_argument("--ours", nargs="+", choices=("eager", "compiled"), default=["eager"])
    parser.add_argument("--lengths", nargs="+", choices=("fixed", "tail", "free"), default=["fixed", "tail"])
    parser.add_argument("--longest", type=int, default=256)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--lr", type=float, default=7e-5)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--turn", type=int, default=4, help="steps that a program makes in a row")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--set", action="append", default=[], metavar="a.b=c", help="override of our recipe")
    options = parser.parse_args()
    if options.alone:
        options.trl = []
    elif not options.trl_python:
        parser.error("--trl-python: name an interpreter that has trl (`make bench-trl` makes one), or give --alone")
    os.environ.setdefault("OMP_NUM_THREADS", str(options.threads))
    programs: list[Worker] = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            programs = workers(options, Path(folder))
            for worker in programs:
                worker.connect()
            for kind in sorted(options.lengths, key=lambda kind: kind != "free"):  # learn before lengths are imposed
                run(kind, programs, options)
        finally:
            for worker in programs:
                worker.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
