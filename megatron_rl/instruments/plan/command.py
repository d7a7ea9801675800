"""The command `plan`."""

from __future__ import annotations

import argparse
import json

from megatron_rl.arguments import COUNT, POSITIVE, add_gpu, add_nodes, add_recipe
from megatron_rl.errors import EXIT_DONE, InputError


def add_plan(parser: argparse.ArgumentParser) -> None:
    add_recipe(parser)
    add_gpu(parser, "Reckon with this GPU.", required=True)
    add_nodes(parser, "the recipe")
    parser.add_argument("--gpus", type=COUNT, help="Reckon with this number of GPUs in all.")
    parser.add_argument(
        "--fewest",
        action="store_true",
        help="Find the fewest GPUs on which a layout fits, and the cheapest layout of each number up to 64 times that.",
    )
    parser.add_argument("--detail", action="store_true", help="Print every part of the arithmetic.")
    parser.add_argument(
        "--mean-response",
        type=POSITIVE,
        metavar="TOKENS",
        help="Reckon with responses of this mean length (default: half of the longest allowed).",
    )
    parser.add_argument(
        "--lengths",
        metavar="LENGTHS",
        help="Reckon with responses of these lengths: lognormal:MEDIAN,SIGMA[,MAX], a file with one length a line, or a"
        " run directory with recorded batches. Their mean is then that of the plan.",
    )
    parser.add_argument("--json", action="store_true", help="Print the totals as JSON.")
    parser.add_argument(
        "--mean-prompt",
        type=POSITIVE,
        metavar="TOKENS",
        help="Reckon with prompts of this mean length (default: an eighth of the longest allowed).",
    )
    parser.add_argument(
        "--host-memory",
        type=POSITIVE,
        metavar="GIB",
        help="Reckon with this memory of a node (default: that of the vendor's DGX).",
    )


def run_plan(options: argparse.Namespace) -> int:
    """Estimate memory per rank, step time and layouts of a recipe on a GPU, by arithmetic. Needs no GPU.

    megatron-rl plan RECIPE --gpu h100-80 [--gpus 32] [--mean-response 6000]
    """
    from megatron_rl.config import load_recipe
    from megatron_rl.instruments.plan import as_json, fewest_gpus, find_gpu, make_plan, make_workload, render
    from megatron_rl.instruments.plan.workload import nodes_of, read_lengths
    from megatron_rl.model.architecture import shape_of

    recipe = load_recipe(options.recipe, options.overrides)
    architecture, _ = shape_of(recipe.model.path)
    lengths = None
    if options.lengths is not None:
        if options.mean_response is not None:
            raise InputError("--lengths and --mean-response: the lengths already have a mean; give only one of the two")
        lengths = read_lengths(options.lengths, recipe.rollout.max_response_length)
    nodes, gpus_per_node = options.nodes, options.gpus_per_node
    if options.gpus is not None:
        nodes, gpus_per_node = nodes_of(recipe, options.gpus, nodes, gpus_per_node)
    sizes = (nodes, gpus_per_node, options.mean_response, options.mean_prompt, options.host_memory, lengths)
    if options.fewest:
        print(fewest_gpus(recipe, architecture, find_gpu(options.gpu), *sizes))
        return EXIT_DONE
    plan = make_plan(make_workload(recipe, architecture, find_gpu(options.gpu), *sizes))
    print(json.dumps(as_json(plan)) if options.json else render(plan, options.detail))
    if plan.problems:
        raise InputError("this does not fit:\n" + "\n".join(f"  {problem}" for problem in plan.problems))
    return EXIT_DONE
