"""How far the mismatch turns the gradient of a stored batch: cosine, norm ratio, Bias and Var of [LD Eq 13].

    megatron-rl gradient-bias runs/my-run --step 40
    megatron-rl gradient-bias runs/my-run --step 40 --set 'objective.correction=[{mode: is, level: token}]'

The run's objective is compared with a reference: the same with untruncated importance sampling over whole sequences as
its correction, or what --set makes of it. Both are differentiated at the weights of the step; nothing is updated.
Needed: the batch and the weights of its step (see `megatron-rl replay --help`).
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
        help="parts of the batch that variances are estimated from (default: %(default)s)",
    )


def run(options: argparse.Namespace) -> int:
    from megatron_rl.stored import rerun
    from megatron_rl.stored.batches import batch_path, load_batch
    from megatron_rl.stored.gradient_bias import REFERENCE, gradient_bias

    layout = rerun.layout_overrides(options.layout)
    directory, recipe = rerun.open_run(options.run, layout)
    changes = options.overrides or [f"objective.correction={json.dumps(REFERENCE)}"]
    _, reference = rerun.open_run(options.run, [*layout, *changes])
    recorded = load_batch(batch_path(directory.batches, options.step))
    if needs_ranks(ranks := rerun.num_ranks(recipe)):
        return start_ranks(options.arguments, ranks)
    with rerun.learner_at(directory, recipe, recipe, options.step, options.weights) as (learner, source):
        found = gradient_bias(learner, recorded.batch, reference, options.parts)
    if is_main_rank():
        print(f"step {options.step}, {len(recorded.batch.sequences)} sequences in {found.num_parts} parts")
        print(f"weights: {source}")
        print(f"reference: {', '.join(changes)}")
        figures = found.figures()
        print(rerun.format_table(["of the gradient", "value"], [(name, f"{x:.6g}") for name, x in figures.items()]))
        if options.json:
            options.json.write_text(json.dumps({"weights": source, "reference": changes, **figures}, indent=1))
    return EXIT_DONE
