"""Whole runs of exact mode by layout and dtype: the gate of every step, and whether one rank samples the same.

    python -m tools.dev.exact_runs --out DIR [--steps 20] [--layouts tp1 pp2 …] [--dtypes fp32 …] [--sequences 16]

Each is `torchrun … -m megatron_rl train recipes/tiny/exact.yaml` on the tiny model with every key head twice, so that
four ranks can share them. A batch of one sequence takes the advantage `reinforce`. The exit status is 1 where a run
ended early or a gate was not 0.0.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import load_file, save_file

from megatron_rl.run.recorded_batches import batch_path, load_batch, recorded_steps

REPOSITORY = Path(__file__).resolve().parents[2]
RECIPE = "recipes/tiny/exact.yaml"
LAYOUTS = {
    "tp1": {},
    "tp2ep2": {"tensor": 2, "expert": 2},
    "pp2": {"pipeline": 2},
    "tp4ep4": {"tensor": 4, "expert": 4},
    "ep2": {"expert": 2},
    "dp2": {},
}
DTYPES = ("fp32", "bf16", "fp16")
GATE = "exact/max_abs_prob_diff"


def num_ranks(layout: str) -> int:
    """``ep2`` has two replicas of the attention, which share experts; elsewhere there is one."""
    parallel = LAYOUTS[layout]
    return max(parallel.get("tensor", 1) * parallel.get("pipeline", 1), parallel.get("expert", 1))


def with_four_key_heads(source: Path, folder: Path) -> Path:
    """The tiny model at ``folder``, the same function, with each key head as often as makes four."""
    shutil.copytree(source, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_key_value_heads": 4}))
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith(("k_proj.weight", "v_proj.weight"))]:
        heads = tensors[name].unflatten(0, (config["num_key_value_heads"], -1))
        tensors[name] = heads.repeat_interleave(4 // len(heads), 0).flatten(0, 1).contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def arguments(root: Path, model: Path, layout: str, dtype: str, *, steps: int, sequences: int) -> list[str]:
    """Of `megatron_rl train`; the run is ``root``/`run_name`. It validates before its first step and after its last."""
    values = [f"run_root={root}", f"name={run_name(layout, dtype)}", f"model.path={model}", f"num_steps={steps}"]
    values += [f"learner.dtype={dtype}", f"rollout.dtype={dtype}", "monitor.plots=false"]
    values += [f"validation.every={steps}", "validation.limit=4", "checkpoint={every: 0, keep_last: 0}"]
    values += [f"learner.parallel={json.dumps(LAYOUTS[layout])}", "recorder.record_batches=all"]
    # Adam divides by a gradient's size, unless eps is larger: two layouts' rounding of a small one would then show.
    values += ["learner.optimizer.lr=1e-3", "learner.optimizer.eps=1e-3"]
    samples = min(4, sequences)
    values += [f"batch.prompts={sequences // samples}", f"rollout.num_samples={samples}"]
    values += ["objective.advantage=reinforce"] if samples == 1 else []
    return ["train", RECIPE, *(argument for value in values for argument in ("--set", value))]


def run_name(layout: str, dtype: str) -> str:
    return f"{layout}-{dtype}"


@dataclass
class Outcome:
    """The results of a run."""

    gates: list[float | None]  # of each step that updated
    rewards: list[float]  # of validation
    tokens: list[dict[str, list[int]]]  # of each step, by id of the sequence

    @classmethod
    def of(cls, run: Path) -> Outcome:
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        recorded = [load_batch(batch_path(run / "batches", step)).batch for step in recorded_steps(run / "batches")]
        return cls(
            [row.get(GATE) for row in rows if "actor/pg_loss" in row],
            [row["val/reward/mean"] for row in rows if "val/reward/mean" in row],
            [{s.id: s.tokens.tolist() for s in batch.sequences} for batch in recorded],
        )

    def differing(self, other: Outcome) -> list[int]:
        """Of each step, sequences with other tokens than in ``other``."""
        pairs = zip(self.tokens, other.tokens, strict=True)
        return [sum(mine[key] != theirs.get(key) for key in mine) for mine, theirs in pairs]


def main(options: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="a folder that does not exist")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--sequences", type=int, default=16, help="of a batch: 1, 2, 3, or a multiple of four")
    chosen = parser.parse_args(options)
    out = chosen.out.resolve()
    out.mkdir(parents=True)
    model = with_four_key_heads(REPOSITORY / "recipes" / "tiny" / "model", out / "model")
    failed = False
    print("layout  dtype  steps  largest gate  validations  first step with other tokens than tp1")
    for dtype in chosen.dtypes:
        alone: Outcome | None = None
        for layout in chosen.layouts:
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
            command += ["--nproc-per-node", str(num_ranks(layout)), "-m", "megatron_rl"]
            command += arguments(out, model, layout, dtype, steps=chosen.steps, sequences=chosen.sequences)
            with (out / f"{run_name(layout, dtype)}.log").open("w") as log:
                environment = {"OMP_NUM_THREADS": "1", **os.environ}
                status = subprocess.run(command, cwd=REPOSITORY, env=environment, stdout=log, stderr=log).returncode
            if status:
                failed = True
                print(f"{layout:7} {dtype:6} ended with status {status}: {log.name}", flush=True)
                continue
            outcome = Outcome.of(out / run_name(layout, dtype))
            alone = outcome if layout == "tp1" else alone
            failed |= outcome.gates != [0.0] * chosen.steps
            print(f"{layout:7} {dtype:6} {_row(outcome, alone)}", flush=True)
    return int(failed)


def _row(outcome: Outcome, alone: Outcome | None) -> str:
    largest = "missing" if None in outcome.gates else max(outcome.gates, default="missing")
    first_difference = "" if alone is None else next((i for i, n in enumerate(outcome.differing(alone)) if n), "none")
    return f"{len(outcome.gates):5} {largest:>13} {len(outcome.rewards):12}  {first_difference}"


if __name__ == "__main__":
    sys.exit(main())
