"""Start a rollout server of a run (rollout.engine: vllm_server). It prints its address; `train` finds it.

megatron-rl serve RECIPE [--host 10.0.0.5] [--port N]
"""

from __future__ import annotations

import argparse

from megatron_rl.commands.arguments import add_recipe
from megatron_rl.errors import EXIT_DONE


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_recipe(parser)
    parser.add_argument("--host", default="127.0.0.1", help="Listen on this address (default: %(default)s).")
    parser.add_argument("--port", type=int, default=0, help="Listen on this port (default: any free one).")
    parser.add_argument(
        "--name", help="Name the server's file in the run directory so (default: host name and process id)."
    )
    parser.add_argument(
        "--ends-with-parent", action="store_true", help="End when the process that started the server ends."
    )


def run(options: argparse.Namespace) -> int:
    from megatron_rl.config import load_recipe

    recipe = load_recipe(options.recipe, options.overrides)
    from megatron_rl.rollout.servers.server import serve  # imports the engine, so only after the recipe is accepted

    serve(recipe, options.host, options.port, options.name, options.ends_with_parent)
    return EXIT_DONE
