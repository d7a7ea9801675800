"""Show the experts of a stored batch: their load on both engines, flips, and share of the variance of rho.

    megatron-rl batch experts runs/my-run --step 40 --top 20

A flip is a token that only one of the two engines sends to the expert. The squared deviation of rho at a token is split
among the flips at that token. The command needs the batch with the engine's routes (routing.replay: r3, or
routing.telemetry: true) and the weights of its step (see `megatron-rl batch replay --help`).
"""

from __future__ import annotations

import argparse
import json

from megatron_rl.commands.stored_batch import add_stored_batch, is_main_rank, needs_ranks, start_ranks
from megatron_rl.errors import EXIT_DONE

COLUMNS = ("layer", "expert", "engine_load", "learner_load", "gained", "lost", "rho_share")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_stored_batch(parser)
    parser.add_argument("--top", type=int, default=20, help="Print this number of experts (default: %(default)s).")


def run(options: argparse.Namespace) -> int:
    from megatron_rl.instruments.stored import rerun
    from megatron_rl.instruments.stored.experts import expert_report
    from megatron_rl.process.output import format_table
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
    cells = [[f"{row[name]:.2%}" if name == "rho_share" else str(row[name]) for name in COLUMNS] for row in rows]
    print(format_table([name.replace("_", " ") for name in COLUMNS], cells))
    print(f"share of rho's variance at tokens without a flip: {report.share_without_flip:.2%}")
    print("\n".join(report.reading()))
    if options.json:
        everything = report.rows(report.gained.size)
        record = {"experts": everything, "share_without_flip": report.share_without_flip, "weights": source}
        record |= {"flip_factor": report.flip_factor, "reading": report.reading()}
        options.json.write_text(json.dumps(record, indent=1))
    return EXIT_DONE
