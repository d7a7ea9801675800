"""Commands on a recipe: `check`, `plan`, `recipe schema` and translations."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

from megatron_rl.commands import GPU_NAMES, add_gpu, add_recipe
from megatron_rl.commands.arguments import COUNT, POSITIVE, output_file
from megatron_rl.errors import EXIT_DONE, InputError, printable


def add_check(parser: argparse.ArgumentParser) -> None:
    add_recipe(parser)
    parser.add_argument("--ranks", type=COUNT, help="Check for this number of ranks (default: WORLD_SIZE, if set).")
    parser.add_argument(
        "--offline",
        action="store_true",
        help="Work without the model's files: look it up by its name (model/architecture.py), and skip checks that need"
        " files.",
    )
    parser.add_argument(
        "--no-transformers",
        action="store_true",
        help="Do not compare the learner's model with transformers' (the comparison takes about 10 s for a small "
        "model).",
    )


def run_check(options: argparse.Namespace) -> int:
    """Check a recipe: do and show everything that `train` does before its engines start. Needs no GPU.

    megatron-rl check RECIPE [--ranks N] [--offline] [--no-transformers]

    The command compares the headers of the model's files with the learner's table of tensors, and each key of
    config.json with its meaning to the learner and to vLLM. Last, transformers and the learner compute the log-probs of
    a prompt, in fp32 on the CPU: with the whole model up to 2.1 billion parameters, else with its first and last layer.
    """
    from megatron_rl.config import load_recipe
    from megatron_rl.process.host import available_gib
    from megatron_rl.run.prepare import report

    ranks = options.ranks or (int(os.environ["WORLD_SIZE"]) if "WORLD_SIZE" in os.environ else None)
    free_gib = None if options.no_transformers else available_gib()
    for what, value in report(load_recipe(options.recipe, options.overrides), ranks, options.offline, free_gib):
        print(f"{what:>10}  {printable(value)}")
    print(f"{'memory':>10}  megatron-rl plan {options.recipe} --gpu {{{','.join(GPU_NAMES)},FILE}}")
    return EXIT_DONE


def add_plan(parser: argparse.ArgumentParser) -> None:
    add_recipe(parser)
    add_gpu(parser, "Reckon with this GPU.", required=True)
    parser.add_argument(
        "--nodes", type=COUNT, help="Reckon with this number of nodes (default: as the recipe's name says, …-4n8g-…)."
    )
    parser.add_argument(
        "--gpus-per-node",
        type=COUNT,
        help="Reckon with this number of GPUs in a node (default: as the recipe's name says, else 8).",
    )
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


def add_schema(parser: argparse.ArgumentParser) -> None:
    pass


def run_schema(options: argparse.Namespace) -> int:
    """Print the recipe's JSON Schema, for an editor's completion and hints: all keys with their meaning and defaults.

    megatron-rl recipe schema > recipe.schema.json

    Editors that use yaml-language-server, such as VS Code with the YAML extension, then complete and check a recipe
    that begins with `# yaml-language-server: $schema=recipe.schema.json`.
    """
    from megatron_rl.config.loader import recipe_schema

    print(json.dumps(recipe_schema(), indent=2))
    return EXIT_DONE


def _add_foreign(parser: argparse.ArgumentParser, what: str) -> None:
    parser.add_argument("file", type=Path, help=f"Read this file: {what}.")
    parser.add_argument(
        "--output", type=output_file, metavar="RECIPE", help="Write the recipe here (default: print it)."
    )
    parser.add_argument(
        "--variable",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="Take this as set where the script is started. The option may be given several times.",
    )


def _translate(project: str, options: argparse.Namespace) -> int:
    """Translate ``options.file``, write or print the recipe, and print what became of each key."""
    from megatron_rl.instruments.translate.rules import translate

    variables = {"HOME": str(Path.home()), "PWD": "."}
    for given in options.variable:
        name, separator, value = given.partition("=")
        if not separator or not name.isidentifier():
            raise InputError(f"--variable {given}: write NAME=VALUE")
        variables[name] = value
    if not options.file.is_file():
        raise InputError(f"{options.file}: no such file")
    translation = translate(project, options.file, variables)
    translation.check()
    if options.output is None:
        print(translation.text(), end="")
        return EXIT_DONE
    options.output.write_text(translation.text(), encoding="utf-8")
    print(translation.report())
    print(f"\n{options.output}: written; next: megatron-rl check --offline {options.output}")
    return EXIT_DONE


def add_from_verl(parser: argparse.ArgumentParser) -> None:
    _add_foreign(parser, "verl's launch script, or its resolved configuration (.yaml)")


def run_from_verl(options: argparse.Namespace) -> int:
    """Translate a launch script or a resolved configuration of verl into a recipe.

    megatron-rl recipe from-verl run_qwen3_8b.sh --output recipe.yaml

    The report says what was translated (their key, ours, its value), what has no counterpart and what that changes,
    what is guessed, and what the file does not say. It is also the header of the recipe. Nothing of the script is run.
    """
    return _translate("verl", options)


def add_from_slime(parser: argparse.ArgumentParser) -> None:
    _add_foreign(parser, "slime's launch script")


def run_from_slime(options: argparse.Namespace) -> int:
    """Translate a launch script of slime into a recipe.

    megatron-rl recipe from-slime scripts/run-qwen3-30B-A3B.sh --output recipe.yaml

    The script is followed without running it, together with the files that it sources and that are there. The report is
    that of `recipe from-verl`, and it is also the header of the recipe.
    """
    return _translate("slime", options)


def add_from_nemo_rl(parser: argparse.ArgumentParser) -> None:
    _add_foreign(parser, "NeMo-RL's configuration (.yaml), in the folder in which its `defaults` are found")


def run_from_nemo_rl(options: argparse.Namespace) -> int:
    """Translate a configuration of NeMo-RL into a recipe.

    megatron-rl recipe from-nemo-rl examples/configs/grpo_math_qwen30ba3b_megatron.yaml --output recipe.yaml

    Files that it names under `defaults` are read first, as NeMo-RL does, and references such as `${policy.model_name}`
    are filled in. The report is that of `recipe from-verl`, and it is also the header of the recipe.
    """
    return _translate("nemo-rl", options)
