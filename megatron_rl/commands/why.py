"""Say when a run left its baselines, what went first, and which causes are suspected.

    megatron-rl run why runs/my-run [--json]

Reads metrics.jsonl and the resolved recipe. Signs are alarms (the recipe's, and those on levels that every run has) and
a collapse of the reward. A suspect's number is held against a value that healthy runs have. The page says what speaks
for it and against it, and prints the command of a run without it. A run without a sign has no suspects.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import yaml

from megatron_rl.config import yaml12
from megatron_rl.errors import EXIT_DONE, InputError, printable
from megatron_rl.monitor import RunDirectory, read_metrics


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, metavar="RUN", help="Read this run directory.")
    parser.add_argument("--json", action="store_true", help="Print JSON instead of a page.")


def run(options: argparse.Namespace) -> int:
    from megatron_rl.instruments.why.finding import find, page

    folder = options.run.parent if options.run.is_file() else options.run
    directory = RunDirectory(folder)
    records = read_metrics(directory.metrics)
    if not records:
        raise InputError(f"{directory.metrics}: no step is recorded yet")
    finding = find(str(folder), records, read_recipe(directory.recipe))
    print(json.dumps(finding.as_json(), indent=2) if options.json else printable(page(finding, folder)))
    return EXIT_DONE


def read_recipe(path: Path) -> dict:
    """The recipe of a run as plain values. Raises `InputError` where there is none."""
    try:
        values, _ = yaml12.parse(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise InputError(f"{path}: cannot be read ({error}); `why` needs the recipe that the run wrote") from error
    if not isinstance(values, dict):
        raise InputError(f"{path}: no mapping; expected the recipe that the run wrote")
    return values
