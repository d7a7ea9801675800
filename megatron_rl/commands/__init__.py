"""The commands of `megatron-rl`. A module is imported when one of its commands is used.

For a command NAME a module has ``add_NAME(parser)`` and ``run_NAME(options)``, which returns the exit status. The
docstring of ``run_NAME`` is the text of --help. Commands raise the errors of `megatron_rl.errors`;
`megatron_rl.__main__` turns them into messages and exit statuses. Arguments that several commands share are at the end.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_rl.commands.arguments import COUNT, output_file
from megatron_rl.errors import EXIT_DONE, InputError

GROUPS = {
    "recipe": "List recipe keys, translate another project's script",
    "run": "Look at a run, while it goes on or afterwards",
    "batch": "Analyse one stored batch of a run",
    "paper": "Repeat a measurement of a paper with your model",
}
"""Groups of commands, each with its line in `megatron-rl --help`."""

COMMANDS = {
    "train": "Train a model as a recipe says.",
    "check": "Check a recipe before its job starts.",
    "plan": "Estimate memory, step time and layouts of a recipe on a GPU.",
    "eval": "Score a checkpoint on held-out problems.",
    "serve": "Start a rollout server of a run.",
    "convert": "Convert checkpoints between Hugging Face and Megatron.",
    "prepare-data": "Make a clean training set from a public dataset.",
    "parity": "Find the first operator where vLLM or the learner departs from the checkpoint.",
    "doctor": "Test whether this machine can run training.",
    "patch": "Apply the patches to Megatron-Core, or show which are applied.",
    "lab": "Run the arms of a study over its seeds, and report them.",
    "recipe schema": "Print the JSON Schema of recipes, for editors.",
    "recipe from-verl": "Translate a launch script or configuration of verl into a recipe.",
    "recipe from-slime": "Translate a launch script of slime into a recipe.",
    "recipe from-nemo-rl": "Translate a configuration of NeMo-RL into a recipe.",
    "run watch": "Watch runs in the terminal or on a local page.",
    "run samples": "Print sampled responses of a run.",
    "run plot": "Draw the curves of several runs over each other.",
    "run servers": "List the rollout servers of a run: what they do, and why one is not used.",
    "run explain-schedule": "Explain why the learning rate of a run was what it was.",
    "run why": "Say when a run left its baselines, and which causes are suspected.",
    "run branch": "Find the cause of an unstable run by experiment, from a checkpoint before its onset.",
    "run score-alarms": "Compare alarm rules on finished runs.",
    "batch replay": "Run the update of a stored batch again, as it was or changed.",
    "batch attribute": "Split the mismatch of a stored batch into its causes.",
    "batch experts": "Show load, flips and mismatch of each expert in a stored batch.",
    "batch gradient-bias": "Measure how far the mismatch turns the gradient of a stored batch.",
    "paper mismatch": "Measure the training-inference mismatch of a checkpoint by pairs of dtypes.",
    "paper sanity-set": "Choose the problems of a dataset that a sound run must learn to solve.",
    "paper sanity-verdict": "Say whether a run on such problems passed.",
}
"""Commands, each with its line in --help. `GROUP NAME` may also be typed as `NAME`, as in earlier versions."""

MODULES = {
    "train": ("train", "eval", "serve"),
    "doctor": ("doctor", "parity"),
    "recipe": ("check", "plan", "schema", "from_verl", "from_slime", "from_nemo_rl"),
    "run": ("watch", "samples", "plot", "servers"),
    "why": ("why", "branch", "score_alarms"),
    "batch": ("replay", "attribute", "experts", "gradient_bias"),
    "paper": ("mismatch", "sanity_set", "sanity_verdict"),
}
"""Modules that hold several commands. Any other command has a module of its name."""


def function_name(command: str) -> str:
    """Return what follows ``add_`` and ``run_`` in the functions of a command of `COMMANDS`: its last word."""
    return command.split()[-1].replace("-", "_")


def module_of(command: str) -> str:
    """Return the module of a command of `COMMANDS`."""
    name = function_name(command)
    return f"{__name__}.{next((module for module, names in MODULES.items() if name in names), name)}"


def full_name(typed: str) -> str | None:
    """Return the command of `COMMANDS` for ``typed``, written with or without its group; None if there is none."""
    return next((name for name in COMMANDS if typed in (name, name.split()[-1])), None)


GPU_NAMES = ("a100-40", "a100-80", "h100-80", "h800-80", "h200-141", "h20-96", "b200-180", "gb200-186")
GPU_SHORT = {  # the version with more memory, if there are two
    "a100": "a100-80",
    "h100": "h100-80",
    "h800": "h800-80",
    "h200": "h200-141",
    "h20": "h20-96",
    "b200": "b200-180",
    "gb200": "gb200-186",
}


class _Completed(tuple):
    """Names that a shell completes, where `type` already decides which values are allowed."""

    def __contains__(self, value: object) -> bool:
        return True


def gpu_or_file(text: str) -> str:
    """Return the full name of a GPU, whose memory ``text`` may leave out, or the file of a GPU's figures as it is."""
    name = GPU_SHORT.get(text.lower(), text.lower())
    if name in GPU_NAMES:
        return name
    if Path(text).is_file():
        return text
    raise argparse.ArgumentTypeError(
        f"{text!r} is neither a GPU (choose from {', '.join(GPU_NAMES)}) nor a file of a GPU's figures "
        "(docs/planning.md; megatron-rl doctor --measure FILE writes one)"
    )


def add_gpu(parser: argparse.ArgumentParser, what: str, **settings: Any) -> None:
    """Add `--gpu`: ``options.gpu`` is a name of `GPU_NAMES` or a file."""
    text = f"{what} One of {', '.join(GPU_NAMES)} (memory may be left out), or a file of your GPU's figures."
    choices = _Completed(GPU_NAMES)
    parser.add_argument("--gpu", type=gpu_or_file, choices=choices, metavar="GPU|FILE", help=text, **settings)


def add_recipe(parser: argparse.ArgumentParser) -> None:
    """Add the arguments for a recipe and overrides of its keys: ``options.recipe`` and ``options.overrides``."""
    parser.add_argument(
        "recipe", help="Read this YAML file. A recipe of the package is found as recipes/… from anywhere."
    )
    add_overrides(parser)


def add_overrides(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY.PATH=VALUE",
        dest="overrides",
        help="Set one key of the recipe. The option may be given several times.",
    )


def add_foreign(parser: argparse.ArgumentParser, what: str) -> None:
    """Add the arguments of a translation of another project's ``what``."""
    parser.add_argument("file", type=Path, help=f"Read this file: {what}.")
    parser.add_argument(
        "--output",
        type=output_file,
        metavar="RECIPE",
        help="Write the recipe here (default: print it).",
    )
    parser.add_argument(
        "--variable",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="Take this as set where the script is started. The option may be given several times.",
    )
    parser.add_argument(
        "--train-rows", type=COUNT, metavar="N", help="Count epochs of this number of rows of training data."
    )


def write_translation(options: argparse.Namespace, translate: Callable[..., Any]) -> int:
    """Translate ``options.file``, write or print the recipe, and print what became of each key."""
    variables = {"HOME": str(Path.home()), "PWD": "."}
    for given in options.variable:
        name, separator, value = given.partition("=")
        if not separator or not name.isidentifier():
            raise InputError(f"--variable {given}: write NAME=VALUE")
        variables[name] = value
    if not options.file.is_file():
        raise InputError(f"{options.file}: no such file")
    translation = translate(options.file, variables, options.train_rows)
    translation.check()
    if options.output is None:
        print(translation.text(), end="")
        return EXIT_DONE
    options.output.write_text(translation.text(), encoding="utf-8")
    print(translation.report())
    print(f"\n{options.output}: written; next: megatron-rl check --offline {options.output}")
    return EXIT_DONE
