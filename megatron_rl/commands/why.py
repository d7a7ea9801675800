"""Say when a run left its baselines, what went first, and which causes are suspected.

    megatron-rl run why runs/my-run [--json]
    megatron-rl run why tensorboard_log/my-project/my-run [--set batch.minibatches=4]

Reads metrics.jsonl and the resolved recipe, or a log of verl, slime, miles, NeMo-RL, prime-rl or TRL (TensorBoard, W&B
offline, MLflow, JSON lines, CSV). Of a log of theirs it says which rules and suspects lack their metric; --set tells
keys of the recipe that a log does not have (docs/coming-from.md).

Signs are alarms (the recipe's, and those on levels that every run has) and a collapse of the reward. A suspect's number
is held against a value that healthy runs have. The page says what speaks for it and against it, and prints the command
of a run without it. A run without a sign has no suspects.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from megatron_rl.commands.arguments import add_overrides
from megatron_rl.config import yaml12
from megatron_rl.config.levels import level_rules
from megatron_rl.errors import EXIT_DONE, InputError, printable
from megatron_rl.monitor import RunDirectory

if TYPE_CHECKING:
    from megatron_rl.instruments.foreign.read import Run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, metavar="RUN", help="Read this run directory, or another project's log.")
    parser.add_argument("--json", action="store_true", help="Print JSON instead of a page.")
    add_overrides(parser)


def run(options: argparse.Namespace) -> int:
    from megatron_rl.instruments.foreign.read import read_run
    from megatron_rl.instruments.why.finding import find, page

    found = read_run(options.run)
    folder = options.run.parent if options.run.is_file() and found.is_own else options.run
    if not found.records:
        raise InputError(f"{options.run}: no step is recorded yet")
    if found.is_own and options.overrides:
        raise InputError("--set: a run of megatron-rl has its recipe; --set is for logs of other projects")
    recipe = read_recipe(RunDirectory(folder).recipe) if found.is_own else told_recipe(options.overrides)
    finding = find(str(folder), found.records, recipe)
    if options.json:
        print(json.dumps(finding.as_json() | ({} if found.is_own else lacking(found, recipe)), indent=2))
        return EXIT_DONE
    print(printable("\n".join([*found.told(), page(finding, folder if found.is_own else None)])))
    if not found.is_own:
        for title, blind in lacking(found, recipe)["lacks"].items():
            print(f"\n{title} that see nothing in this log:" if blind else f"\nall {title} see what they need")
            for name, what in blind.items():
                print(f"  {name:<20}needs {what}")
    return EXIT_DONE


def lacking(found: Run, recipe: dict[str, Any]) -> dict[str, Any]:
    """What the log of another project was read from, and what it lacks."""
    from megatron_rl.instruments.foreign.read import blind_rules, blind_suspects

    lacks = {
        "rules": blind_rules(found.records, level_rules(recipe)),
        "suspects": blind_suspects(found.records, recipe),
    }
    return {"log": found.told(), "read": {our: list(theirs) for our, theirs in found.sources.items()}, "lacks": lacks}


def told_recipe(overrides: list[str]) -> dict[str, Any]:
    """The keys of a recipe that ``overrides`` (KEY.PATH=VALUE) tell, as plain values."""
    recipe: dict[str, Any] = {}
    for override in overrides:
        path, sign, text = override.partition("=")
        *parents, leaf = path.split(".")
        target = recipe
        for parent in parents:
            target = target.setdefault(parent, {})
            if not isinstance(target, dict):
                raise InputError(f"--set {override}: {parent} has a value already")
        try:
            target[leaf] = yaml12.parse(text)[0] if sign else None
        except yaml.YAMLError as error:
            raise InputError(f"--set {override}: the value is not valid YAML: {error}") from error
        if not sign:
            raise InputError(f"--set {override}: expected KEY.PATH=VALUE")
    return recipe


def read_recipe(path: Path) -> dict:
    """The recipe of a run as plain values. Raises `InputError` where there is none."""
    try:
        values, _ = yaml12.parse(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise InputError(f"{path}: cannot be read ({error}); `why` needs the recipe that the run wrote") from error
    if not isinstance(values, dict):
        raise InputError(f"{path}: no mapping; expected the recipe that the run wrote")
    return values
