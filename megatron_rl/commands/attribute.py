"""Split the training-inference mismatch of a stored batch into its causes: one table, one bar chart.

    megatron-rl batch attribute runs/my-run --step 40

It needs the batch and the weights of its step (see `megatron-rl batch replay --help`). The part of routing needs the
engine's routes in the batch (routing.replay: r3, or routing.telemetry: true); else it is in the remainder. A cause's
part is its Shapley value: the mean effect of removing it, over all orders in which causes can be removed. The remainder
is named by the types of the rollout engine (int4, fp8, bf16 …). The parts are of the mismatch at this step, not of a
collapse: `megatron-rl run branch` finds what made a run collapse. The chart is written to RUN/plots/. With a --layout
of several ranks, the command starts itself through torchrun.
"""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

from megatron_rl.commands.stored_batch import add_stored_batch, is_main_rank, needs_ranks, start_ranks
from megatron_rl.errors import EXIT_DONE

if TYPE_CHECKING:
    from megatron_rl.instruments.stored.attribution import Attribution
    from megatron_rl.monitor import RunDirectory
    from megatron_rl.run.recorded_batches import RecordedBatch


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_stored_batch(parser)


def run(options: argparse.Namespace) -> int:
    from megatron_rl.instruments.stored import rerun
    from megatron_rl.instruments.stored.attribution import attribute
    from megatron_rl.run.recorded_batches import batch_path, load_batch

    directory, recipe = rerun.open_run(options.run, rerun.layout_overrides(options.layout))
    recorded = load_batch(batch_path(directory.batches, options.step))
    if needs_ranks(ranks := rerun.num_ranks(recipe)):
        return start_ranks(options.arguments, ranks)
    attribution = attribute(directory, recipe, recorded, options.weights)
    if is_main_rank():
        report(options, directory, recorded, attribution)
    return EXIT_DONE


def report(options: argparse.Namespace, directory: RunDirectory, recorded: RecordedBatch, found: Attribution) -> None:
    from megatron_rl.instruments.stored.attribution import draw
    from megatron_rl.process.output import format_table

    total = found.total
    print(f"step {options.step}, {found.num_tokens} response tokens, weights: {found.weights}")
    if old := sum(int((s.policy_versions < recorded.policy_version).sum()) for s in recorded.batch.sequences):
        print(f"note: {old} tokens were sampled with older weights than the step's; that part is in the remainder")
    if total <= 0 or any(abs(part.variance) > 2 * total for part in found.parts):
        print(
            "note: a part exceeds twice the total: the weights are not those of the step, or causes cancel each other. "
            "Ignore the shares"
        )
    rows = [("everything", "", f"{total:.3e}", "100.0%")]
    for part in found.parts:
        share = f"{part.variance / total:.1%}" if total > 0 else ""
        rows.append((part.cause, part.what, f"{part.variance:.3e}", share))
    print(format_table(["cause", "taken away by", "variance", "share"], rows))
    print(
        "The shares are of the mismatch, not of the collapse: they say what makes pi and mu differ at this step.\n"
        f"What made the run unstable: megatron-rl run why {options.run}, then run branch"
    )
    chart = directory.plots / f"mismatch_step_{options.step:08d}.png"
    draw(found, f"{options.run.name}, step {options.step}", chart)
    print(f"chart: {chart}")
    if options.json:
        record = {
            "total": total,
            "parts": {part.cause: part.variance for part in found.parts},
            "what": {part.cause: part.what for part in found.parts},
            "measured": {", ".join(sorted(taken)) or "none": value for taken, value in found.measured.items()},
        }
        options.json.write_text(json.dumps(record, indent=1))
