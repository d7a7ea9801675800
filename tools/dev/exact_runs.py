"""Whole runs of exact mode by layout and dtype: their command line, the gate of every step, and sampled tokens.

Each is `megatron_rl train recipes/tiny/exact.yaml` on the tiny model with every key head twice, so that four ranks can
share them. A batch of one sequence takes the advantage `reinforce`. Tests and `python -m tools.gpu r1` make them.
"""

from __future__ import annotations

import json
import shutil
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
    """``ep2`` and ``dp2`` have two replicas of the attention; elsewhere there is one."""
    parallel = LAYOUTS[layout]
    return max(
        parallel.get("tensor", 1) * parallel.get("pipeline", 1), parallel.get("expert", 1), 1 + (layout == "dp2")
    )


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
            [{s.id: s.whole.tolist() for s in batch.sequences} for batch in recorded],
        )

    def differing(self, other: Outcome) -> list[int]:
        """Of each step, sequences with other tokens than in ``other``."""
        pairs = zip(self.tokens, other.tokens, strict=True)
        return [sum(mine[key] != theirs.get(key) for key in mine) for mine, theirs in pairs]
