"""A made-up run that has ended: its recipe and its metrics, healthy or collapsing."""

import json
import lzma
from pathlib import Path

import numpy as np

from megatron_rl.monitor.run_directory import JsonlSink
from megatron_rl.schedule import length_decay_lr
from tools.dev import length_curves

RECIPE = "learner: {optimizer: {lr: 1.0e-6}}\nschedule: {style: length-decay, mode: auto}\n"


def write_run(folder: Path, seed: int, collapses: bool, decays: bool = True, num_steps: int = 300) -> Path:
    """A made-up run whose length surges near step 110 and whose mismatch, then reward, go wrong if ``collapses``."""
    rng = np.random.default_rng(seed)
    folder.mkdir(parents=True)
    (folder / "recipe.resolved.yaml").write_text(RECIPE)
    lengths, sink = (
        length_curves.paper_curve(110, 3500.0, num_steps=num_steps)(rng, 0.1),
        JsonlSink(folder / "metrics.jsonl"),
    )
    for step in range(num_steps):
        late = max(0, step - 120) if collapses else 0
        sink.write(
            step,
            {
                "critic/rewards/mean": 0.8 - max(0.0, late - 80) / 100 + 0.01 * rng.standard_normal(),
                "mismatch/rho_std": 1e-3 * float(np.exp(0.03 * late + 0.1 * rng.standard_normal())),
                "response_length/mean": float(lengths[step]),
                "lr_sched/lr": length_decay_lr(step, 1e-6, 1e-7, 202 if decays else None),
                **({"val/reward/mean": 0.5, "val/x/num_problems": 250.0} if step % 50 == 0 else {}),
            },
        )
    return folder


def packed(path: Path, runs: list[dict]) -> Path:
    """Write a file of packed runs; return its path."""
    lines = [{"format": 1, "study": "s"}, *runs]
    path.write_bytes(lzma.compress("".join(json.dumps(line) + "\n" for line in lines).encode()))
    return path


def curve(values: list[float]) -> list[dict]:
    """Return records of a run whose reward has these values."""
    return [{"step": step, "critic/rewards/mean": value} for step, value in enumerate(values)]
