"""Commands on one stored batch: `batch replay`, `attribute` and `gradient-bias`."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from megatron_rl.arguments import COUNT, INDEX, add_overrides, output_file
from megatron_rl.config import Recipe
from megatron_rl.errors import EXIT_DONE

if TYPE_CHECKING:
    from megatron_rl.instruments.batch.rerun import Attribution
    from megatron_rl.monitor import RunDirectory
    from megatron_rl.run.recorded_batches import RecordedBatch


def add_stored_batch(parser: argparse.ArgumentParser, layout: str | None = "tp=1") -> None:
    """Add the arguments ``run``, ``step``, ``weights``, ``layout`` (without one, that of the run) and ``json``."""
    parser.add_argument("run", type=Path, help="Read this run directory.")
    parser.add_argument("--step", type=INDEX, required=True, help="Take the stored batch of this step.")
    parser.add_argument(
        "--weights",
        default="exact",
        metavar="exact|nearest|DIR",
        help="Choose the weights. exact (default): those of the step; an error if there are none. nearest: the newest "
        "checkpoint not after it. DIR: a checkpoint of this project or a Hugging Face folder.",
    )
    parser.add_argument(
        "--layout",
        default=layout,
        help="Use this layout, for example tp=2,ep=2 (also pp, etp); sizes that are not named are 1 (default: "
        f"{layout or 'that of the run'}).",
    )
    parser.add_argument("--json", type=output_file, help="Write the numbers to this file as well.")


def open_batch(options: argparse.Namespace, changes: list[str]) -> tuple[RunDirectory, Recipe, Recipe, RecordedBatch]:
    """Return the run, its recipe on `--layout` without and with ``changes``, and the batch of the step."""
    from megatron_rl.instruments.batch import rerun
    from megatron_rl.run.recorded_batches import batch_path, load_batch

    layout = rerun.layout_overrides(options.layout) if options.layout else []
    directory, recipe = rerun.open_run(options.run, layout)
    _, changed = rerun.open_run(options.run, [*layout, *changes])
    return directory, recipe, changed, load_batch(batch_path(directory.batches, options.step))


def is_main_rank() -> bool:
    return int(os.environ.get("RANK", 0)) == 0


def on_ranks(options: argparse.Namespace, recipe: Recipe) -> int | None:
    """Run this command on the ranks of ``recipe`` and return its exit status; None in a process that is all of them, or
    one."""
    from megatron_rl.instruments.batch.rerun import num_ranks

    if (ranks := num_ranks(recipe)) == 1 or "WORLD_SIZE" in os.environ:
        return None
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    command = [*torchrun, "-m", "megatron_rl", *options.arguments]
    return subprocess.run(command, env=environment, check=False).returncode


COMPARED = (
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
    "scoring/*",
)


def add_replay(parser: argparse.ArgumentParser) -> None:
    add_stored_batch(parser, layout=None)
    add_overrides(parser)


def run_replay(options: argparse.Namespace) -> int:
    """Run forward and backward of a stored batch again, unchanged or changed, and compare with the run's record.

        megatron-rl batch replay runs/my-run --step 40
        megatron-rl batch replay runs/my-run --step 40 --layout tp=1,ep=2
        megatron-rl batch replay runs/my-run --step 40 --set learner.dtype=fp16
        megatron-rl batch replay runs/my-run --step 40 --set routing.replay=off --set objective.aggregation=token-mean

    It needs the batch (recorder.record_batches) and the weights of its step: from a checkpoint of that step, or from an
    earlier one and the stored batches in between, whose updates are repeated. The message names what is missing. For
    several ranks, the command starts itself through torchrun. The run directory is not changed.
    """
    from megatron_rl.instruments.batch import rerun

    directory, original, changed, recorded = open_batch(options, options.overrides)
    changed = rerun.watching_routes(changed, recorded.batch)
    rerun.check_replayable(changed, recorded.batch)
    if (status := on_ranks(options, changed)) is not None:
        return status
    stored = [s.current_logprobs for s in recorded.batch.sequences]
    with rerun.learner_at(directory, original, changed, options.step, options.weights) as (learner, source):
        learner.keep_current_logprobs = True
        learner.num_updates = recorded.policy_version  # seeds the draws of variance injection
        metrics = rerun.repeat_update(learner, recorded)
        now = rerun.current_logprobs(learner, recorded.batch)
    if is_main_rank():
        print_comparison(options, changed, recorded, stored, now, metrics, source)
    return EXIT_DONE


def print_comparison(
    options: argparse.Namespace, recipe: Recipe, recorded, stored: list, now: list, metrics: dict, source: str
) -> None:
    from megatron_rl.instruments.batch.rerun import compare
    from megatron_rl.process.host import format_table

    batch, parallel = recorded.batch, recipe.learner.parallel
    sizes = ", ".join(f"{name} {size}" for name, size in parallel.model_dump().items())
    print(f"step {batch.step}, policy version {recorded.policy_version}, {len(batch.sequences)} sequences")
    print(f"weights: {source}")
    print(f"now: {recipe.learner.dtype}, {sizes}, routing.replay {recipe.routing.replay}")
    print(format_table(["metric", "stored", "replayed", "difference"], compare(recorded.metrics, metrics, COMPARED)))
    differences = {}
    if all(s is not None for s in stored):
        change = np.concatenate([new - old for new, old in zip(now, stored, strict=True)])
        differences = {"max": float(np.abs(change).max()), "mean": float(np.abs(change).mean())}
        print(f"current_logprobs: |difference| mean {differences['mean']:.3e}, max {differences['max']:.3e}")
    if options.json:
        record = {"weights": source, "stored": recorded.metrics, "replayed": metrics, "logprob_difference": differences}
        options.json.write_text(json.dumps(record, indent=1))


def add_attribute(parser: argparse.ArgumentParser) -> None:
    add_stored_batch(parser)


def run_attribute(options: argparse.Namespace) -> int:
    """Split the training-inference mismatch of a stored batch into its causes.

        megatron-rl batch attribute runs/my-run --step 40

    It needs the batch and the weights of its step (see `megatron-rl batch replay --help`). The part of routing needs
    the engine's routes in the batch (routing.replay: r3, or routing.telemetry: true); else it is in the remainder. A
    cause's part is its Shapley value: the mean effect of removing it, over all orders in which causes can be removed.
    The remainder is named by the types of the rollout engine (int4, fp8, bf16 …). The parts are of the mismatch at this
    step, not of a collapse: `megatron-rl run branch` finds what made a run collapse. With a --layout of several ranks,
    the command starts itself through torchrun.
    """
    from megatron_rl.instruments.batch.rerun import attribute

    directory, recipe, _, recorded = open_batch(options, [])
    if (status := on_ranks(options, recipe)) is not None:
        return status
    attribution = attribute(directory, recipe, recorded, options.weights)
    if is_main_rank():
        print_attribution(options, recorded, attribution)
    return EXIT_DONE


def print_attribution(options: argparse.Namespace, recorded: RecordedBatch, attribution: Attribution) -> None:
    from megatron_rl.process.host import format_table

    total = attribution.total
    print(f"step {options.step}, {attribution.num_tokens} response tokens, weights: {attribution.weights}")
    if old := sum(int((s.policy_versions < recorded.policy_version).sum()) for s in recorded.batch.sequences):
        print(f"note: {old} tokens were sampled with older weights than the step's; that part is in the remainder")
    if total <= 0 or any(abs(part.variance) > 2 * total for part in attribution.parts):
        print(
            "note: a part exceeds twice the total: the weights are not those of the step, or causes cancel each other. "
            "Ignore the shares"
        )
    rows = [("everything", "", f"{total:.3e}", "100.0%")]
    for part in attribution.parts:
        share = f"{part.variance / total:.1%}" if total > 0 else ""
        rows.append((part.cause, part.what, f"{part.variance:.3e}", share))
    print(format_table(["cause", "taken away by", "variance", "share"], rows))
    print(
        "The shares are of the mismatch, not of the collapse: they say what makes pi and mu differ at this step.\n"
        f"What made the run unstable: megatron-rl run why {options.run}, then run branch"
    )
    if options.json:
        record = {
            "total": total,
            "parts": {part.cause: part.variance for part in attribution.parts},
            "what": {part.cause: part.what for part in attribution.parts},
            "measured": {", ".join(sorted(taken)) or "none": value for taken, value in attribution.measured.items()},
        }
        options.json.write_text(json.dumps(record, indent=1))


def add_gradient_bias(parser: argparse.ArgumentParser) -> None:
    add_stored_batch(parser)
    add_overrides(parser)
    parser.add_argument(
        "--parts",
        type=COUNT,
        default=4,
        help="Estimate variances from this number of parts of the batch (default: %(default)s).",
    )


def run_gradient_bias(options: argparse.Namespace) -> int:
    """Measure how the mismatch changes the gradient of a stored batch: cosine, norm ratio, Bias and Var of [LD Eq 13].

        megatron-rl batch gradient-bias runs/my-run --step 40
        megatron-rl batch gradient-bias runs/my-run --step 40 --set 'objective.correction=[{mode: is, level: token}]'

    The command compares the run's objective with a reference: the same objective with untruncated sequence-level
    importance sampling as its correction and no score centering, or as changed by --set. Both gradients are taken at
    the weights of the step; no weights are updated. It needs the batch and the weights of its step (see `megatron-rl
    batch replay --help`).
    """
    from megatron_rl.instruments.batch import rerun
    from megatron_rl.instruments.batch.gradient_bias import gradient_bias, reference_changes
    from megatron_rl.process.host import format_table

    changes = options.overrides or reference_changes(rerun.open_run(options.run, [])[1])
    directory, recipe, reference, recorded = open_batch(options, changes)
    if (status := on_ranks(options, recipe)) is not None:
        return status
    with rerun.learner_at(directory, recipe, recipe, options.step, options.weights) as (learner, source):
        bias = gradient_bias(learner, recorded.batch, reference, options.parts)
    if is_main_rank():
        print(f"step {options.step}, {len(recorded.batch.sequences)} sequences in {bias.num_parts} parts")
        print(f"weights: {source}")
        print(f"reference: {', '.join(changes)}")
        figures = bias.figures()
        cells = [(name, f"{x:.6g}") for name, x in figures.items()]
        print(format_table(["of the gradient", "value"], cells))
        if options.json:
            options.json.write_text(json.dumps({"weights": source, "reference": changes, **figures}, indent=1))
    return EXIT_DONE
