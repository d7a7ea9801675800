"""Run forward and backward of a stored batch again, as it was or changed, and compare with what the run recorded.

    python tools/replay_batch.py runs/my-run --step 40
    python tools/replay_batch.py runs/my-run --step 40 --layout tp=1,ep=2
    python tools/replay_batch.py runs/my-run --step 40 --precision fp16
    python tools/replay_batch.py runs/my-run --step 40 --set routing.replay=off --set objective.aggregation=token-mean

Needed: the batch (recorder.record_batches) and the weights of its step. They come from a checkpoint of that step, or
from an earlier one and the stored batches in between, whose updates are repeated; what is missing is said. On several
ranks the tool starts itself through torchrun. Nothing in the run directory changes. Exit status: 0 done, 2 bad input.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from megatron_rl.config import Recipe
from megatron_rl.errors import EXIT_BAD_INPUT, InputError

SHOWN = (
    "actor/pg_loss",
    "actor/grad_norm",
    "actor/entropy",
    "actor/pg_clipfrac",
    "mismatch/rho_std",
    "mismatch/rho_max",
    "mismatch/pcc",
    "rollout_corr/kl",
    "rollout_corr/k3_kl",
    "rollout_corr/log_ppl_abs_diff",
    "router/any_flip_frac",
    "router/replay_coverage",
    "router/fallback_frac",
    "router/agree_frac*",
)


def main(arguments: Sequence[str] | None = None) -> int:
    arguments = parse_args(arguments)
    try:
        return replay(arguments)
    except InputError as error:
        if int(os.environ.get("RANK", 0)) == 0:
            print(f"error: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT


def replay(arguments: argparse.Namespace) -> int:
    from megatron_rl.stored import rerun as flight
    from megatron_rl.stored.batches import batch_path, load_batch

    layout = flight.layout_overrides(arguments.layout) if arguments.layout else []
    directory, original = flight.open_run(arguments.run, layout)
    precision = [f"learner.dtype={arguments.precision}"] if arguments.precision else []
    _, changed = flight.open_run(arguments.run, [*layout, *precision, *arguments.overrides])
    recorded = load_batch(batch_path(directory.batches, arguments.step))
    ranks = flight.num_ranks(changed)
    changed = flight.watching_routes(changed, recorded.batch)
    flight.check_replayable(changed, recorded.batch)
    if "WORLD_SIZE" not in os.environ and ranks > 1:
        return start_ranks(ranks)
    stored = [s.current_logprobs for s in recorded.batch.sequences]
    with flight.learner_at(directory, original, changed, arguments.step, arguments.weights) as (learner, source):
        learner.keep_current_logprobs = True
        learner.num_updates = recorded.policy_version  # names the draws of variance injection
        metrics = flight.repeat_update(learner, recorded)
    if int(os.environ.get("RANK", 0)) == 0:
        report(arguments, changed, recorded, stored, metrics, source)
    return 0


def start_ranks(ranks: int) -> int:
    """This very command on ``ranks`` processes."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    return subprocess.run(
        [*torchrun, "-m", "megatron_rl.commands.replay", *sys.argv[1:]], env=environment, check=False
    ).returncode


def report(arguments: argparse.Namespace, recipe: Recipe, recorded, stored: list, metrics: dict, source: str) -> None:
    from megatron_rl.stored.rerun import compare, format_table

    batch, parallel = recorded.batch, recipe.learner.parallel
    sizes = ", ".join(f"{name} {size}" for name, size in parallel.model_dump().items())
    print(f"step {batch.step}, policy version {recorded.policy_version}, {len(batch.sequences)} sequences")
    print(f"weights: {source}")
    print(f"now: {recipe.learner.dtype}, {sizes}, routing.replay {recipe.routing.replay}")
    print(format_table(["metric", "stored", "replayed", "difference"], compare(recorded.metrics, metrics, SHOWN)))
    differences = {}
    if all(s is not None for s in stored):
        change = np.concatenate([s.current_logprobs - old for s, old in zip(batch.sequences, stored, strict=True)])
        differences = {"max": float(np.abs(change).max()), "mean": float(np.abs(change).mean())}
        print(f"current_logprobs: |difference| mean {differences['mean']:.3e}, max {differences['max']:.3e}")
    if arguments.json:
        told = {"weights": source, "stored": recorded.metrics, "replayed": metrics, "logprob_difference": differences}
        arguments.json.write_text(json.dumps(told, indent=1))


def parse_args(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="run directory")
    parser.add_argument("--step", type=int, required=True, help="step of the stored batch")
    parser.add_argument("--set", action="append", default=[], metavar="KEY.PATH=VALUE", dest="overrides")
    parser.add_argument("--layout", help="for example tp=1,ep=2 (also pp, etp); sizes not named are 1")
    parser.add_argument("--precision", choices=("bf16", "fp16", "fp32"), help="dtype of the learner")
    parser.add_argument(
        "--weights",
        default="exact",
        metavar="exact|nearest|DIR",
        help="exact (default): those of the step or an error; nearest: the newest checkpoint not after it; "
        "DIR: a checkpoint of this project or a Hugging Face folder",
    )
    parser.add_argument("--json", type=Path, help="also write everything to this file")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
