"""Run a recipe's learner as one rank of its job, without the job, and print bytes, transients and collectives.

megatron-rl recipe trace RECIPE [--gpu h100-80] [--nodes 4] [--rank 0 --rank 31] [--checkpoint-format fully_reshardable]

Tensors have no values and other ranks do not exist, so a model of any size fits on any machine. Exit status 2 if the
static memory of a GPU differs from that of `plan` by more than 5%, or if a save does not fit.
"""

from __future__ import annotations

import argparse
import json

from megatron_rl.commands.arguments import add_gpu, add_recipe
from megatron_rl.errors import EXIT_DONE, InputError

FORMATS = ("own", "fully_reshardable", "dp_reshardable")  # equals `trace.FORMATS`, whose module is slow to import


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_recipe(parser)
    add_gpu(parser, "Take the memory of this GPU as the budget (default: h100-80).", default="h100-80")
    parser.add_argument(
        "--nodes", type=int, help="Trace a job of this number of nodes (default: as the recipe's name says, …-4n8g-…)."
    )
    parser.add_argument(
        "--gpus-per-node",
        type=int,
        help="Trace a job with this number of GPUs in a node (default: as the recipe's name says, else 8).",
    )
    parser.add_argument(
        "--rank",
        type=int,
        action="append",
        metavar="N",
        help="Trace this rank. The option may be given several times (default: the ranks that differ).",
    )
    parser.add_argument(
        "--checkpoint-format",
        default="own",
        choices=FORMATS,
        help="Trace a save in this format. own: as a run saves. Else: Megatron's builder of that name.",
    )
    parser.add_argument("--no-passes", action="store_true", help="Leave out the forward and backward pass.")
    parser.add_argument("--json", action="store_true", help="Print JSON instead of tables.")


def run(options: argparse.Namespace) -> int:
    from megatron_rl.config import load_recipe
    from megatron_rl.instruments.plan import find_gpu, make_workload
    from megatron_rl.instruments.trace import (
        as_json,
        differences,
        ranks_that_differ,
        render,
        trace_rank,
        trace_update,
        why_untraced,
    )
    from megatron_rl.model.known_models import shape_of

    recipe = load_recipe(options.recipe, options.overrides)
    architecture, _ = shape_of(recipe.model.path)
    work = make_workload(recipe, architecture, find_gpu(options.gpu), options.nodes, options.gpus_per_node)
    ranks = options.rank or ranks_that_differ(recipe.learner.parallel, work.ranks)
    if beyond := [rank for rank in ranks if not 0 <= rank < work.ranks]:
        raise InputError(f"trace: --rank {beyond[0]}; the job has ranks 0 to {work.ranks - 1}")
    traces = [trace_rank(recipe, architecture, rank, work.ranks, options.checkpoint_format) for rank in ranks]
    if not (options.no_passes or why_untraced(work)):
        for trace in traces:
            trace.phases += trace_update(work, trace.rank)
    print(json.dumps(as_json(work, traces), indent=1) if options.json else render(work, traces))
    if disagreements := differences(work, traces):
        raise InputError("the trace does not agree with the plan:\n" + "\n".join(f"  {line}" for line in disagreements))
    return EXIT_DONE
