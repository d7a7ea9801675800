"""The CPU time of a step of each remedy: what docs/lab/remedies_cost.json has.

    python -m tools.dev.remedy_cost --out DIR [--rounds 3] [--steps 8]

An arm runs once for 1 step and once for 1 + STEPS. The difference of the two CPU times, divided by STEPS, is the cost
of a step without start, validation and end. The arms take turns, and the median of the rounds counts. CPU time is not
time on the clock: other work on the machine does not count.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_rl.instruments.lab.jobs import load_study
from megatron_rl.instruments.lab.ranking import COSTS, STUDIES
from megatron_rl.instruments.lab.runner import code_version
from megatron_rl.monitor.run_directory import hardware
from tests.support.tiny import REPOSITORY

SEED = 0


def main(options: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="a folder that does not exist")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    chosen = parser.parse_args(options)
    out = chosen.out.resolve()
    out.mkdir(parents=True)
    jobs = {}
    for name in STUDIES:
        loaded = load_study(REPOSITORY / "recipes" / "lab" / name)
        for job in loaded.jobs(out, [SEED]):
            jobs.setdefault(job.arm, (loaded.base, job.overrides))
    costs: dict[str, list[float]] = {arm: [] for arm in jobs}
    for number in range(chosen.rounds):
        for arm, (base, overrides) in jobs.items():
            root = out / f"{arm}-{number}"
            one, more = (_cpu_seconds(base, overrides, root, steps) for steps in (1, 1 + chosen.steps))
            costs[arm].append((more - one) / chosen.steps)
            print(f"round {number + 1}  {arm:18} {costs[arm][-1]:.3f} CPU s a step", flush=True)
    record = {"code": code_version(), "hardware": hardware(), "steps": chosen.steps}
    record["seconds"] = {arm: round(statistics.median(values), 3) for arm, values in costs.items()}
    record["rounds"] = {arm: [round(value, 3) for value in values] for arm, values in costs.items()}
    lines = (f" {json.dumps(key)}: {json.dumps(value)}" for key, value in record.items())
    (REPOSITORY / "docs" / "lab" / COSTS).write_text("{\n" + ",\n".join(lines) + "\n}\n")
    return 0


def _cpu_seconds(base: Path, overrides: Sequence[str], root: Path, steps: int) -> float:
    """Return the CPU seconds of a run of ``steps`` steps and of all processes that it starts."""
    values = [*overrides, f"num_steps={steps}", f"run_root={root}", f"name=steps-{steps}"]
    command = [sys.executable, "-m", "megatron_rl", "train", str(base)]
    command += [word for value in values for word in ("--set", value)]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run(command, cwd=REPOSITORY, env=environment, check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


if __name__ == "__main__":
    sys.exit(main())
