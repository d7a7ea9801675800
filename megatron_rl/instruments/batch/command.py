"""Commands on one stored batch: `batch replay`, `attribute`, `experts` and `gradient-bias`."""

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
    from megatron_rl.run.recorded_batches import RecordedBatch


def add_stored_batch(parser: argparse.ArgumentParser) -> None:
    """Add the arguments ``run``, ``step``, ``weights``, ``layout`` and ``json``."""
    parser.add_argument("run", type=Path, help="Read this run directory.")
    parser.add_argument("--step", type=INDEX, required=True, help="Analyse the stored batch of this step.")
    parser.add_argument(
        "--weights", default="exact", metavar="exact|nearest|DIR", help="Choose the weights as in `batch replay`."
    )
    parser.add_argument(
        "--layout",
        default="tp=1",
        help="Use this layout, for example tp=2,ep=2; sizes that are not named are 1 (default: tp=1).",
    )
    parser.add_argument("--json", type=output_file, help="Write the numbers to this file as well.")


def is_main_rank() -> bool:
    return int(os.environ.get("RANK", 0)) == 0


def needs_ranks(ranks: int) -> bool:
    """Return whether this process must start ``ranks`` processes instead of computing itself."""
    return ranks > 1 and "WORLD_SIZE" not in os.environ


def start_ranks(arguments: list[str], ranks: int) -> int:
    """Run the command line ``arguments`` on ``ranks`` processes and return its exit status."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    return subprocess.run([*torchrun, "-m", "megatron_rl", *arguments], env=environment, check=False).returncode


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
)


def add_replay(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, help="Read this run directory.")
    parser.add_argument("--step", type=INDEX, required=True, help="Replay the stored batch of this step.")
    add_overrides(parser)
    parser.add_argument(
        "--layout", help="Use this layout, for example tp=1,ep=2 (also pp, etp); sizes that are not named are 1."
    )
    parser.add_argument(
        "--weights",
        default="exact",
        metavar="exact|nearest|DIR",
        help="Choose the weights. exact (default): those of the step; an error if there are none. nearest: the newest "
        "checkpoint not after it. DIR: a checkpoint of this project or a Hugging Face folder.",
    )
    parser.add_argument("--json", type=output_file, help="Write everything to this file as well.")


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
    from megatron_rl.run.recorded_batches import batch_path, load_batch

    layout = rerun.layout_overrides(options.layout) if options.layout else []
    directory, original = rerun.open_run(options.run, layout)
    _, changed = rerun.open_run(options.run, [*layout, *options.overrides])
    recorded = load_batch(batch_path(directory.batches, options.step))
    ranks = rerun.num_ranks(changed)
    changed = rerun.watching_routes(changed, recorded.batch)
    rerun.check_replayable(changed, recorded.batch)
    if needs_ranks(ranks):
        return start_ranks(options.arguments, ranks)
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
    from megatron_rl.instruments.batch import rerun
    from megatron_rl.instruments.batch.rerun import attribute
    from megatron_rl.run.recorded_batches import batch_path, load_batch

    directory, recipe = rerun.open_run(options.run, rerun.layout_overrides(options.layout))
    recorded = load_batch(batch_path(directory.batches, options.step))
    if needs_ranks(ranks := rerun.num_ranks(recipe)):
        return start_ranks(options.arguments, ranks)
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


EXPERT_COLUMNS = ("layer", "expert", "engine_load", "learner_load", "gained", "lost", "rho_share")


def add_experts(parser: argparse.ArgumentParser) -> None:
    add_stored_batch(parser)
    parser.add_argument("--top", type=COUNT, default=20, help="Print this number of experts (default: %(default)s).")


def run_experts(options: argparse.Namespace) -> int:
    """Show the experts of a stored batch: their load on both engines, flips, and share of the variance of rho.

        megatron-rl batch experts runs/my-run --step 40 --top 20

    A flip is a token that only one of the two engines sends to the expert. The squared deviation of rho at a token is
    split among the flips at that token. The command needs the batch with the engine's routes (routing.replay: r3, or
    routing.telemetry: true) and the weights of its step (see `megatron-rl batch replay --help`).
    """
    from megatron_rl.instruments.batch import rerun
    from megatron_rl.instruments.batch.gradient_bias import expert_report
    from megatron_rl.process.host import format_table
    from megatron_rl.run.recorded_batches import batch_path, load_batch

    directory, original = rerun.open_run(options.run, rerun.layout_overrides(options.layout))
    recorded = load_batch(batch_path(directory.batches, options.step))
    if needs_ranks(ranks := rerun.num_ranks(original)):
        return start_ranks(options.arguments, ranks)
    recipe = rerun.watching_routes(original, recorded.batch)
    rerun.check_replayable(recipe, recorded.batch)
    with rerun.learner_at(directory, original, recipe, options.step, options.weights) as (learner, source):
        report = expert_report(learner, recorded)
    if not is_main_rank():
        return EXIT_DONE
    rows = report.rows(options.top)
    print(f"step {options.step}, {report.num_tokens} tokens with a route, weights: {source}")
    cells = [[f"{row[name]:.2%}" if name == "rho_share" else str(row[name]) for name in EXPERT_COLUMNS] for row in rows]
    print(format_table([name.replace("_", " ") for name in EXPERT_COLUMNS], cells))
    print(f"share of rho's variance at tokens without a flip: {report.share_without_flip:.2%}")
    print(f"{report.num_flipped / report.num_trained:.1%} of the trained tokens have a flip in some layer")
    if options.json:
        everything = report.rows(report.gained.size)
        record = {"experts": everything, "share_without_flip": report.share_without_flip, "weights": source}
        options.json.write_text(json.dumps(record, indent=1))
    return EXIT_DONE


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
    importance sampling as its correction, or as changed by --set. Both gradients are taken at the weights of the step;
    no weights are updated. It needs the batch and the weights of its step (see `megatron-rl batch replay --help`).
    """
    from megatron_rl.instruments.batch import rerun
    from megatron_rl.instruments.batch.gradient_bias import REFERENCE, gradient_bias
    from megatron_rl.process.host import format_table
    from megatron_rl.run.recorded_batches import batch_path, load_batch

    layout = rerun.layout_overrides(options.layout)
    directory, recipe = rerun.open_run(options.run, layout)
    changes = options.overrides or [f"objective.correction={json.dumps(REFERENCE)}"]
    _, reference = rerun.open_run(options.run, [*layout, *changes])
    recorded = load_batch(batch_path(directory.batches, options.step))
    if needs_ranks(ranks := rerun.num_ranks(recipe)):
        return start_ranks(options.arguments, ranks)
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
