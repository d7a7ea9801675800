"""Command line: ``python -m megatron_rl COMMAND RECIPE …``. Exit status: see `megatron_rl.errors`."""

from __future__ import annotations

import argparse
import json
import os
import sys
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path

from megatron_rl.errors import (
    EXIT_BAD_INPUT,
    EXIT_DONE,
    EXIT_ENDED_BY_LIMIT,
    EXIT_FAULT,
    EXIT_INTERRUPTED,
    Fault,
    InputError,
    RunEnded,
)

GPU_NAMES = ("a100-40", "a100-80", "h100-80", "h200-141")


def main(arguments: Sequence[str] | None = None) -> int:
    # PyTorch's C++ side prints a NUMA notice per rank when an engine starts; it must be told before the first import.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    # Megatron says at every import that TransformerEngine and Apex are absent; where that matters, `check` says it.
    warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.")
    for module in (r"torch\.distributed", r"megatron\."):  # Megatron's calls, not ours
        warnings.filterwarnings("ignore", category=FutureWarning, module=module)
    options = _parser().parse_args(arguments)
    try:
        return options.run(options)
    except InputError as error:
        # Every rank found the same problem: one message is enough.
        if int(os.environ.get("RANK", 0)) == 0:
            print(f"error: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT
    except RunEnded as reason:
        print(f"run ended: {reason}", file=sys.stderr)
        return EXIT_ENDED_BY_LIMIT
    except KeyboardInterrupt:
        hint = "; the same command continues from the last checkpoint" if options.run is _train else ""
        print(f"interrupted{hint}", file=sys.stderr)
        return EXIT_INTERRUPTED
    except Fault as error:
        traceback.print_exc()
        print(f"run failed: {error}", file=sys.stderr)  # the last line says it all
        return EXIT_FAULT


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m megatron_rl", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    train = _command(commands, "train", _train, "run a recipe; under torchrun or srun for several ranks")
    train.add_argument(
        "--resume",
        default="auto",
        metavar="auto|never|DIR",
        help="auto (default): continue from the newest complete checkpoint of the run directory, if any; "
        "never: start anew, refused where the run directory holds a run; DIR: continue from that checkpoint",
    )
    check = _command(commands, "check", _check, "check a recipe without starting an engine")
    check.add_argument("--ranks", type=int, help="number of ranks the job will have (default: WORLD_SIZE, if set)")
    check.add_argument(
        "--offline",
        action="store_true",
        help="where the model is not at hand, go by its name (checkpoint/known_models.py); leave out data files",
    )
    plan = _command(commands, "plan", _plan, "memory, step time and layouts on a GPU, by arithmetic")
    plan.add_argument("--gpu", required=True, choices=GPU_NAMES, help="what it is to run on")
    plan.add_argument("--nodes", type=int, help="nodes (default: as the recipe's name says, …-4n8g-…)")
    plan.add_argument("--gpus-per-node", type=int, help="GPUs of a node (default: as the recipe's name says, else 8)")
    plan.add_argument("--mean-response", type=float, metavar="TOKENS", help="default: half of the longest allowed")
    plan.add_argument("--mean-prompt", type=float, metavar="TOKENS", help="default: an eighth of the longest allowed")
    evaluate = _command(commands, "eval", _eval, "score a checkpoint on the recipe's data.validation")
    evaluate.add_argument(
        "--checkpoint", required=True, type=Path, metavar="DIR", help="Hugging Face folder, or a run's step_… folder"
    )
    evaluate.add_argument("--output", type=Path, metavar="FILE", help="also write the figures there, as JSON")
    serve = _command(commands, "serve", _serve, "start a rollout server of a run (rollout.engine: vllm_server)")
    serve.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    serve.add_argument("--port", type=int, default=0, help="default: any free one")
    serve.add_argument("--name", help="of its file in the run directory (default: host name and process id)")
    serve.add_argument("--ends-with-parent", action="store_true", help="end when the process that started it does")
    schema = commands.add_parser("schema", help="print the recipe's JSON Schema, for editors")
    schema.set_defaults(run=_schema)
    return parser


def _command(commands, name: str, run, text: str) -> argparse.ArgumentParser:
    command = commands.add_parser(name, help=text, description=text)
    command.add_argument("recipe", help="YAML file")
    command.add_argument(
        "--set", action="append", default=[], metavar="KEY.PATH=VALUE", dest="overrides", help="override one key"
    )
    command.set_defaults(run=run)
    return command


def _train(options: argparse.Namespace) -> int:
    from megatron_rl.check import check_recipe
    from megatron_rl.config import load_recipe

    recipe = load_recipe(options.recipe, options.overrides)
    check_recipe(recipe, int(os.environ.get("WORLD_SIZE", 1)))
    from megatron_rl.train import train

    train(recipe, resume=options.resume)
    return EXIT_DONE


def _check(options: argparse.Namespace) -> int:
    from megatron_rl.check import check_recipe
    from megatron_rl.config import load_recipe

    ranks = options.ranks or (int(os.environ["WORLD_SIZE"]) if "WORLD_SIZE" in os.environ else None)
    checked = check_recipe(load_recipe(options.recipe, options.overrides), ranks, offline=options.offline)
    for what, value in checked.report:
        print(f"{what:>10}  {value}")
    print(f"{'memory':>10}  python -m megatron_rl plan {options.recipe} --gpu {{{','.join(GPU_NAMES)}}}")
    return EXIT_DONE


def _plan(options: argparse.Namespace) -> int:
    from megatron_rl.checkpoint.known_models import shape_of
    from megatron_rl.config import load_recipe
    from megatron_rl.plan import GPUS, make_plan, make_workload, render

    recipe = load_recipe(options.recipe, options.overrides)
    architecture, _ = shape_of(recipe.model.path)
    sizes = (options.nodes, options.gpus_per_node, options.mean_response, options.mean_prompt)
    plan = make_plan(make_workload(recipe, architecture, GPUS[options.gpu], *sizes))
    print(render(plan))
    if plan.problems:
        raise InputError("this does not fit:\n" + "\n".join(f"  {problem}" for problem in plan.problems))
    return EXIT_DONE


def _eval(options: argparse.Namespace) -> int:
    from megatron_rl.config import load_recipe

    recipe = load_recipe(options.recipe, options.overrides)
    from megatron_rl.evaluate import evaluate

    evaluate(recipe, options.checkpoint.resolve(), options.output)
    return EXIT_DONE


def _serve(options: argparse.Namespace) -> int:
    from megatron_rl.config import load_recipe

    recipe = load_recipe(options.recipe, options.overrides)
    from megatron_rl.rollout.servers.serve import serve

    serve(recipe, options.host, options.port, options.name, options.ends_with_parent)
    return EXIT_DONE


def _schema(options: argparse.Namespace) -> int:
    from megatron_rl.config import Recipe

    print(json.dumps(Recipe.model_json_schema(), indent=2))
    return EXIT_DONE


if __name__ == "__main__":
    sys.exit(main())
