"""Commands that translate another project's script: `recipe from-verl` and its kin."""

from __future__ import annotations

import argparse
from pathlib import Path

from megatron_rl.arguments import output_file
from megatron_rl.errors import EXIT_DONE, InputError


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
