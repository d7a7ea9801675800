"""Memory per rank, step time and layouts of a recipe on a GPU, by arithmetic alone. Needs no GPU.

megatron-rl plan RECIPE --gpu h100-80 [--nodes 4] [--mean-response 6000]
"""

from __future__ import annotations

import argparse
import json

from megatron_rl.commands.arguments import GPU_NAMES, add_recipe, gpu_name
from megatron_rl.errors import EXIT_DONE, InputError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_recipe(parser)
    parser.add_argument("--gpu", required=True, type=gpu_name, choices=GPU_NAMES, help="what it is to run on")
    parser.add_argument("--nodes", type=int, help="nodes (default: as the recipe's name says, …-4n8g-…)")
    parser.add_argument("--gpus-per-node", type=int, help="GPUs of a node (default: as the recipe's name says, else 8)")
    parser.add_argument("--mean-response", type=float, metavar="TOKENS", help="default: half of the longest allowed")
    parser.add_argument(
        "--lengths",
        metavar="LENGTHS",
        help="simulate rollout servers and learner on responses of these lengths, response by response: "
        "lognormal:MEDIAN,SIGMA[,MAX], a file with one length a line, or a run directory with recorded batches; "
        "their mean is then that of the plan",
    )
    parser.add_argument("--json", action="store_true", help="print the totals for a program")
    parser.add_argument("--mean-prompt", type=float, metavar="TOKENS", help="default: an eighth of the longest allowed")
    parser.add_argument("--host-memory", type=float, metavar="GIB", help="of a node (default: of the vendor's DGX)")


def run(options: argparse.Namespace) -> int:
    from megatron_rl.checkpoint.known_models import shape_of
    from megatron_rl.config import load_recipe
    from megatron_rl.plan import GPUS, as_json, make_plan, make_workload, render
    from megatron_rl.plan.lengths import read_lengths

    recipe = load_recipe(options.recipe, options.overrides)
    architecture, _ = shape_of(recipe.model.path)
    lengths, mean_response = None, options.mean_response
    if options.lengths is not None:
        if mean_response is not None:
            raise InputError("--lengths and --mean-response: the lengths have a mean of their own; give one of the two")
        lengths = read_lengths(options.lengths, recipe.rollout.max_response_length)
        mean_response = float(lengths.sample().mean())
    sizes = (options.nodes, options.gpus_per_node, mean_response, options.mean_prompt, options.host_memory)
    plan = make_plan(make_workload(recipe, architecture, GPUS[options.gpu], *sizes), lengths)
    print(json.dumps(as_json(plan)) if options.json else render(plan))
    if plan.problems:
        raise InputError("this does not fit:\n" + "\n".join(f"  {problem}" for problem in plan.problems))
    return EXIT_DONE
