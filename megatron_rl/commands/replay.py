"""Run forward and backward of a stored batch again, unchanged or changed, and compare with the run's record.

    megatron-rl batch replay runs/my-run --step 40
    megatron-rl batch replay runs/my-run --step 40 --layout tp=1,ep=2
    megatron-rl batch replay runs/my-run --step 40 --precision fp16
    megatron-rl batch replay runs/my-run --step 40 --set routing.replay=off --set objective.aggregation=token-mean

It needs the batch (recorder.record_batches) and the weights of its step: from a checkpoint of that step, or from an
earlier one and the stored batches in between, whose updates are repeated. The message names what is missing. For
several ranks, the command starts itself through torchrun. The run directory is not changed.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np

from megatron_rl.commands.arguments import add_overrides
from megatron_rl.commands.stored_batch import is_main_rank, needs_ranks, start_ranks
from megatron_rl.config import Recipe
from megatron_rl.errors import EXIT_DONE

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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, help="Read this run directory.")
    parser.add_argument("--step", type=int, required=True, help="Replay the stored batch of this step.")
    add_overrides(parser)
    parser.add_argument(
        "--layout", help="Use this layout, for example tp=1,ep=2 (also pp, etp); sizes that are not named are 1."
    )
    parser.add_argument("--precision", choices=("bf16", "fp16", "tf32", "fp32"), help="Use this dtype for the learner.")
    parser.add_argument(
        "--weights",
        default="exact",
        metavar="exact|nearest|DIR",
        help="Choose the weights. exact (default): those of the step; an error if there are none. nearest: the newest "
        "checkpoint not after it. DIR: a checkpoint of this project or a Hugging Face folder.",
    )
    parser.add_argument("--json", type=Path, help="Write everything to this file as well.")


def run(options: argparse.Namespace) -> int:
    from megatron_rl.instruments.stored import rerun as flight
    from megatron_rl.run.recorded_batches import batch_path, load_batch

    layout = flight.layout_overrides(options.layout) if options.layout else []
    directory, original = flight.open_run(options.run, layout)
    precision = [f"learner.dtype={options.precision}"] if options.precision else []
    _, changed = flight.open_run(options.run, [*layout, *precision, *options.overrides])
    recorded = load_batch(batch_path(directory.batches, options.step))
    ranks = flight.num_ranks(changed)
    changed = flight.watching_routes(changed, recorded.batch)
    flight.check_replayable(changed, recorded.batch)
    if needs_ranks(ranks):
        return start_ranks(options.arguments, ranks)
    stored = [s.current_logprobs for s in recorded.batch.sequences]
    with flight.learner_at(directory, original, changed, options.step, options.weights) as (learner, source):
        learner.keep_current_logprobs = True
        learner.num_updates = recorded.policy_version  # seeds the draws of variance injection
        metrics = flight.repeat_update(learner, recorded)
        now = flight.current_logprobs(learner, recorded.batch)
    if is_main_rank():
        report(options, changed, recorded, stored, now, metrics, source)
    return EXIT_DONE


def report(
    options: argparse.Namespace, recipe: Recipe, recorded, stored: list, now: list, metrics: dict, source: str
) -> None:
    from megatron_rl.instruments.stored.rerun import compare
    from megatron_rl.process.output import format_table

    batch, parallel = recorded.batch, recipe.learner.parallel
    sizes = ", ".join(f"{name} {size}" for name, size in parallel.model_dump().items())
    print(f"step {batch.step}, policy version {recorded.policy_version}, {len(batch.sequences)} sequences")
    print(f"weights: {source}")
    print(f"now: {recipe.learner.dtype}, {sizes}, routing.replay {recipe.routing.replay}")
    print(format_table(["metric", "stored", "replayed", "difference"], compare(recorded.metrics, metrics, SHOWN)))
    differences = {}
    if all(s is not None for s in stored):
        change = np.concatenate([new - old for new, old in zip(now, stored, strict=True)])
        differences = {"max": float(np.abs(change).max()), "mean": float(np.abs(change).mean())}
        print(f"current_logprobs: |difference| mean {differences['mean']:.3e}, max {differences['max']:.3e}")
    if options.json:
        record = {"weights": source, "stored": recorded.metrics, "replayed": metrics, "logprob_difference": differences}
        options.json.write_text(json.dumps(record, indent=1))
