"""Measure how the mismatch changes the gradient of a stored batch: cosine, norm ratio, Bias and Var of [LD Eq 13].

    megatron-rl batch gradient-bias runs/my-run --step 40
    megatron-rl batch gradient-bias runs/my-run --step 40 --set 'objective.correction=[{mode: is, level: token}]'

The command compares the run's objective with a reference: the same objective with untruncated sequence-level importance
sampling as its correction, or as changed by --set. Both gradients are taken at the weights of the step; no weights are
updated. It needs the batch and the weights of its step (see `megatron-rl batch replay --help`).
"""

from __future__ import annotations

import argparse
import json

from megatron_rl.commands.arguments import add_overrides
from megatron_rl.commands.stored_batch import add_stored_batch, is_main_rank, needs_ranks, start_ranks
from megatron_rl.errors import EXIT_DONE


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_stored_batch(parser)
    add_overrides(parser)
    parser.add_argument(
        "--parts",
        type=int,
        default=4,
        help="Estimate variances from this number of parts of the batch (default: %(default)s).",
    )


def run(options: argparse.Namespace) -> int:
    from megatron_rl.instruments.stored import rerun
    from megatron_rl.instruments.stored.gradient_bias import REFERENCE, gradient_bias
    from megatron_rl.process.output import format_table
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
        print(format_table(["of the gradient", "value"], [(name, f"{x:.6g}") for name, x in figures.items()]))
        scale = bias.scale()
        cells = [(name, "unknown" if x is None else f"{x:.3g}") for name, x in scale.items()]
        print(format_table(["scale", "value"], cells))
        print("\n".join(bias.reading()))
        if options.json:
            options.json.write_text(
                json.dumps(
                    {"weights": source, "reference": changes, **figures, "scale": scale, "reading": bias.reading()},
                    indent=1,
                )
            )
    return EXIT_DONE
