"""A long run under fire: train the tiny recipe while faults hit it, restart it each time, and account for every step.

    nice -n 15 python -m tools.dev.soak --steps 500 --interval 20 --out /some/folder

Faults, one every ``--interval`` seconds on average, drawn from a seed: SIGKILL, SIGTERM, the STOP file, a disk that is
full for a few seconds (no file of the run grows beyond 200 kB), a process frozen for a few seconds, a bit flipped in
the newest checkpoint after a SIGKILL. At the end: every step recorded once and in order, every checkpoint whole, and no
life of the process in which memory grew. Exit status 1 where that is not so. ``OUT/soak.json`` has the figures so far.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from megatron_rl.checkpoint import manifest

REPOSITORY = Path(__file__).resolve().parents[2]

NAME = "soak"
MOMENT_S = 3.0  # how long a disk stays full and a process frozen
SETTLED_STEPS = 20  # of a life, before its memory counts: caches and allocators fill first
GROWTH_LIMIT = 0.05


@dataclass
class Life:
    """One process of the run."""

    first_step: int
    memory: list[tuple[int, float]] = field(default_factory=list)  # (steps recorded, resident MiB)

    @property
    def growth(self) -> float | None:
        """Median of the last quarter of the settled part over that of its first, minus 1; None where it was short."""
        settled = [mib for step, mib in self.memory if step >= self.first_step + SETTLED_STEPS]
        if len(settled) < 8:
            return None
        quarter = len(settled) // 4
        return statistics.median(settled[-quarter:]) / statistics.median(settled[:quarter]) - 1.0


class Soak:
    """Starts, hurts and restarts the run."""

    def __init__(self, out: Path, steps: int, interval: float, seed: int) -> None:
        self.run, self.steps, self.interval = out / NAME, steps, interval
        self.random, self.lives, self.faults = random.Random(seed), [], {}
        self.start_time, self.repeated, self.log = time.monotonic(), 0, out / "soak.log"
        self.kinds: dict[str, Callable[[subprocess.Popen], None]] = {
            "SIGKILL": self.kill,
            "SIGTERM": lambda process: process.terminate(),
            "STOP file": lambda process: (self.run / "STOP").touch(),
            "disk full": self.fill_disk,
            "frozen": self.freeze,
            "bit flip": self.flip_bit,
        }
        settings = [f"name={NAME}", f"run_root={out}", f"num_steps={steps}", "batch.prompts=2", "rollout.num_samples=4"]
        settings += ["validation.every=0", "checkpoint={every: 5, keep_last: 3}", "rollout.verify_refit=false"]
        settings += ["monitor.plots=false", "runtime.device=cpu", "rollout.kv_cache_gib=0.0625"]
        command = [sys.executable, "-m", "megatron_rl", "train", str(REPOSITORY / "recipes" / "tiny" / "grpo.yaml")]
        self.command = command + [part for setting in settings for part in ("--set", setting)]

    @property
    def done(self) -> int:
        """Steps recorded so far."""
        file = self.run / "metrics.jsonl"
        return file.read_bytes().count(b"\n") if file.exists() else 0

    def live(self) -> int:
        """One start to its end; the exit status."""
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
        before = self.done
        with self.log.open("ab") as log:
            process = subprocess.Popen(self.command, cwd=REPOSITORY, env=environment, stdout=log, stderr=log)
        life, next_fault, started = None, None, self.done
        while process.poll() is None:
            time.sleep(0.25)
            done = self.done
            if life is None:
                started = min(started, done)
                if done <= started:  # engines are starting
                    continue
                life, next_fault = Life(started), time.monotonic() + self.pause()
                self.repeated += before - started
                self.lives.append(life)
            life.memory.append((done, resident_mib(process.pid)))
            if time.monotonic() > next_fault and done < self.steps:
                kind = self.random.choice(list(self.kinds))
                self.faults[kind] = self.faults.get(kind, 0) + 1
                self.kinds[kind](process)
                next_fault = time.monotonic() + self.pause()
                self.report()
        return process.wait()

    def pause(self) -> float:
        return self.random.uniform(0.3, 1.7) * self.interval

    def kill(self, process: subprocess.Popen) -> None:
        process.kill()
        process.wait()

    def fill_disk(self, process: subprocess.Popen) -> None:
        for limit in (200_000, resource.RLIM_INFINITY):
            resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
            time.sleep(MOMENT_S if limit == 200_000 else 0.0)

    def freeze(self, process: subprocess.Popen) -> None:
        process.send_signal(signal.SIGSTOP)
        time.sleep(MOMENT_S)
        process.send_signal(signal.SIGCONT)

    def flip_bit(self, process: subprocess.Popen) -> None:
        self.kill(process)
        if len(checkpoints := manifest.list_checkpoints(self.run / "checkpoints")) > 1:
            file = max(checkpoints[-1].glob("*.distcp"), key=lambda path: path.stat().st_size)
            data = bytearray(file.read_bytes())
            data[self.random.randrange(len(data))] ^= 1
            file.write_bytes(data)

    def report(self) -> dict:
        growths = [life.growth for life in self.lives if life.growth is not None]
        report = {
            "steps": self.done,
            "of": self.steps,
            "starts": len(self.lives),
            "faults": self.faults,
            "steps repeated after a restart": self.repeated,
            "minutes": round((time.monotonic() - self.start_time) / 60, 1),
            "lives long enough to judge memory": len(growths),
            "largest growth of memory": round(max(growths), 4) if growths else None,
            "longest life in steps": max((life.memory[-1][0] - life.first_step for life in self.lives), default=0),
        }
        (self.run.parent / "soak.json").write_text(json.dumps(report, indent=1) + "\n")
        return report


def resident_mib(pid: int) -> float:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize() / 2**20
    except (OSError, IndexError):
        return 0.0


def problems(soak: Soak) -> list[str]:
    """Return messages on losses of the run and on memory growth; empty if there is no fault."""
    rows = [json.loads(line)["step"] for line in (soak.run / "metrics.jsonl").read_text().splitlines()]
    faults = [] if rows == list(range(soak.steps)) else [f"steps recorded: {len(rows)}, not each of {soak.steps} once"]
    for path in manifest.list_checkpoints(soak.run / "checkpoints"):
        faults += [f"{path.name}: {problem}" for problem in manifest.altered_files(path)]
    growths = [life.growth for life in soak.lives if life.growth is not None]
    if growths and max(growths) > GROWTH_LIMIT:
        faults.append(f"memory grew by {max(growths):.1%} in one life")
    return faults


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--interval", type=float, default=20.0, help="seconds between faults, on average")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    soak = Soak(options.out, options.steps, options.interval, options.seed)
    without_progress = 0
    while not (soak.run / "DONE").exists():
        before = soak.done
        status = soak.live()
        without_progress = without_progress + 1 if soak.done <= before else 0
        if status in (2, 3) or without_progress > 5:
            print(f"gave up: exit status {status}; see {soak.log}")
            return 1
    print(json.dumps(soak.report(), indent=1))
    for problem in (faults := problems(soak)):
        print(f"problem: {problem}")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
