"""Estimate memory per rank, step time and layouts of a recipe on a GPU, by arithmetic. Needs no GPU.

megatron-rl plan RECIPE --gpu h100-80 [--nodes 4] [--mean-response 6000]
"""

from __future__ import annotations

import argparse
import json

from megatron_rl.commands.arguments import add_gpu, add_recipe
from megatron_rl.errors import EXIT_DONE, InputError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_recipe(parser)
    add_gpu(parser, "Reckon with this GPU.", required=True)
    parser.add_argument(
        "--nodes", type=int, help="Reckon with this number of nodes (default: as the recipe's name says, …-4n8g-…)."
    )
    parser.add_argument(
        "--gpus-per-node",
        type=int,
        help="Reckon with this number of GPUs in a node (default: as the recipe's name says, else 8).",
    )
    parser.add_argument(
        "--mean-response",
        type=float,
        metavar="TOKENS",
        help="Reckon with responses of this mean length (default: half of the longest allowed).",
    )
    parser.add_argument(
        "--lengths",
        metavar="LENGTHS",
        help="Simulate rollout servers and learner on responses of these lengths: lognormal:MEDIAN,SIGMA[,MAX], a file"
        " with one length a line, or a run directory with recorded batches. Their mean is then that of the plan.",
    )
    parser.add_argument("--json", action="store_true", help="Print the totals as JSON.")
    parser.add_argument(
        "--mean-prompt",
        type=float,
        metavar="TOKENS",
        help="Reckon with prompts of this mean length (default: an eighth of the longest allowed).",
    )
    parser.add_argument(
        "--host-memory",
        type=float,
        metavar="GIB",
        help="Reckon with this memory of a node (default: that of the vendor's DGX).",
    )


def run(options: argparse.Namespace) -> int:
    from megatron_rl.config import load_recipe
    from megatron_rl.instruments.plan import as_json, find_gpu, make_plan, make_workload, render
    from megatron_rl.instruments.plan.lengths import read_lengths
    from megatron_rl.model.known_models import shape_of

    recipe = load_recipe(options.recipe, options.overrides)
    architecture, _ = shape_of(recipe.model.path)
    lengths, mean_response = None, options.mean_response
    if options.lengths is not None:
        if mean_response is not None:
            raise InputError("--lengths and --mean-response: the lengths already have a mean; give only one of the two")
        lengths = read_lengths(options.lengths, recipe.rollout.max_response_length)
        mean_response = float(lengths.sample().mean())
    sizes = (options.nodes, options.gpus_per_node, mean_response, options.mean_prompt, options.host_memory)
    plan = make_plan(make_workload(recipe, architecture, find_gpu(options.gpu), *sizes), lengths)
    print(json.dumps(as_json(plan)) if options.json else render(plan))
    if plan.problems:
        raise InputError("this does not fit:\n" + "\n".join(f"  {problem}" for problem in plan.problems))
    return EXIT_DONE
