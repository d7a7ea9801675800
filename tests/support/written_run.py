"""A run directory with numbers made up, written by what writes them in a run."""

import json
import math
from pathlib import Path

import numpy as np
import yaml

from megatron_rl.monitor.run_directory import JsonlSink, RunDirectory, append_whole
from megatron_rl.monitor.samples import SampleFile
from megatron_rl.run.recorded_batches import record_batch
from megatron_rl.types import Batch
from tests.support.tiny import stored_rollouts, tiny_recipe

BANDS = ("0-0.01", "0.01-0.1", "0.1-0.5", "0.5-0.9", "0.9-1")
LAYERS = 4
EVIL = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>\x1b[31m\u202ered"


def without_times(rows: list[dict]) -> list[dict]:
    """Lines of metrics.jsonl without what a clock put there."""
    return [{name: x for name, x in row.items() if not name.startswith("perf/") and name != "time"} for row in rows]


class WrittenRun:
    """``folder`` as a run of ``num_steps`` leaves it while it goes on."""

    def __init__(self, folder: Path, num_steps: int = 30) -> None:
        self.directory = RunDirectory(folder).create()
        self._metrics = JsonlSink(self.directory.metrics)
        self._samples = SampleFile(self.directory.samples)
        rule = {"name": "mismatch", "metric": "mismatch/rho_std", "above": 0.5, "then": ["warn"]}
        recipe = tiny_recipe(num_steps=num_steps, monitor={"alarms": [rule]})
        self.directory.recipe.write_text(yaml.safe_dump(json.loads(recipe.model_dump_json())))

    def step(self, step: int, reward: float | None = None, alarm: bool = False, **more: float) -> None:
        """One line of metrics.jsonl."""
        metrics = {
            "critic/rewards/mean": 1 - math.exp(-step / 10) if reward is None else reward,
            "response_length/mean": 10.0 + step % 3,
            "mismatch/rho_std": 0.01 * (1 + step % 5) + alarm,
            "actor/ppo_kl": 0.0,
            "actor/entropy": 1 / (1 + step),
            "actor/grad_norm": 0.5,
            "perf/time/step": 36.0,
            "perf/rollout_tokens": 500000.0,
            "alarm/mismatch": float(alarm),
        }
        for band, label in enumerate(BANDS):
            metrics |= {f"mismatch/rho_count/{label}": 10.0, f"mismatch/rho_mean/{label}": 1 + 0.01 * (band - 2)}
            metrics |= {f"mismatch/rho_q{q}/{label}": 1 + (int(q) - 50) / 500 for q in ("05", "50", "95")}
        metrics |= {f"router/agree_frac/layer_{layer}": 1 - 0.01 * layer for layer in range(LAYERS)}
        self._metrics.write(step, {**metrics, **more})
        if alarm:
            text = f"12:00:00 alarm mismatch at step {step}: mismatch/rho_std = 1.02 > 0.5 for 1 steps; then: warn\n"
            append_whole(self.directory.log, text.encode())

    def resume_at(self, step: int) -> None:
        self._metrics.resume_at(step)

    def sample(self, step: int, response: str) -> None:
        """One line of samples.jsonl."""
        about = {"prompt_id": "train:1", "sample": 0, "reward": 1.0, "finish": "stop", "length": 3, "answer": "4"}
        self._samples.write(
            [{"step": step, "why": "best", **about, "prompt": "1+3=", "response": response, "rho": None}]
        )

    def batch(self, step: int) -> Batch:
        """A recorded batch whose learner's log-probs are off by up to 0.5."""
        batch = stored_rollouts(step)
        random = np.random.default_rng(step)
        for s in batch.sequences:
            off = random.uniform(-0.5, 0.5, s.length).astype(np.float32)
            s.old_logprobs = np.minimum(s.inference_logprobs + off, 0).astype(np.float32)
        record_batch(self.directory.batches, batch, step)
        return batch
