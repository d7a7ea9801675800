"""Replay alarm rules over finished runs: lead time before a collapse, missed collapses, false alarms.

    megatron-rl score-alarms RUN [RUN ...] [--rules FILE] [--metric NAME] [--drop 0.5] [--horizon 200] [--json]

RUN is a run directory (or its metrics.jsonl). The rules are those of --rules (a recipe, or a YAML list of rules), else
those of each run's own recipe.resolved.yaml. A collapse is the first step from which the metric (median of 5) stays 5
steps at or below (1 - drop) of its highest value so far. A rule that goes off within --horizon steps before it was
right; earlier, or in a run that never collapses, it was false.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

import yaml
from pydantic import ValidationError

from megatron_rl.config import yaml12
from megatron_rl.config.monitor import AlarmRule, MonitorConfig
from megatron_rl.errors import EXIT_DONE, InputError
from megatron_rl.monitor import read_metrics
from megatron_rl.monitor.scoring import CollapseRule, RuleScore, score_run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run directory, or its metrics.jsonl")
    parser.add_argument("--rules", type=Path, metavar="FILE", help="a recipe, or a YAML list; default: each run's own")
    parser.add_argument("--metric", default=CollapseRule.metric, help="what collapses (default: %(default)s)")
    parser.add_argument(
        "--drop", type=float, default=CollapseRule.drop, help="of its highest value (default: %(default)s)"
    )
    parser.add_argument("--horizon", type=int, default=200, help="steps before a collapse in which a warning is right")
    parser.add_argument("--json", action="store_true", help="print the scores as JSON instead of a table")


def run(options: argparse.Namespace) -> int:
    rule = CollapseRule(metric=options.metric, drop=options.drop)
    scores = {}
    for path in options.runs:
        folder = path.parent if path.is_file() else path
        rules = read_rules(options.rules or folder / "recipe.resolved.yaml")
        scores[str(path)] = score_run(read_metrics(path), rules, rule, options.horizon)
    if options.json:
        print(json.dumps({name: [asdict(row) for row in rows] for name, rows in scores.items()}, indent=2))
    else:
        print_table(scores)
    return EXIT_DONE


def read_rules(path: Path) -> list[AlarmRule]:
    """The rules in ``path``: a recipe's monitor.alarms, or a bare list."""
    if not path.is_file():
        raise InputError(f"{path}: no such file; give the rules with --rules")
    try:
        document, _ = yaml12.parse(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: not valid YAML: {error}") from error
    document = document or {}
    found = document if isinstance(document, list) else (document.get("monitor") or {}).get("alarms")
    if not found:
        raise InputError(f"{path}: no rules; expected a list of rules, or a recipe with monitor.alarms")
    try:
        return MonitorConfig(alarms=found).alarms
    except ValidationError as error:
        raise InputError(f"{path}: {error}") from error


def print_table(scores: dict[str, list[RuleScore]]) -> None:
    """One row per run and rule, then one per rule over all runs."""
    print(f"{'run':<32}{'rule':<24}{'collapse':>9}{'first':>7}{'lead':>6}{'false':>7}")
    for run, rows in scores.items():
        for row in rows:
            first = row.fired[0] if row.fired else None
            cells = [f"{'-' if v is None else v:>{w}}" for v, w in ((row.collapse, 9), (first, 7), (row.lead, 6))]
            print(f"{run:<32}{row.rule:<24}{''.join(cells)}{row.false_alarms:>7}")
    print()
    print(f"{'rule':<24}{'collapses':>10}{'warned':>8}{'mean lead':>11}{'false alarms':>14}{'runs':>6}")
    for rule in dict.fromkeys(row.rule for rows in scores.values() for row in rows):
        rows = [row for all_rows in scores.values() for row in all_rows if row.rule == rule]
        collapses = sum(row.collapse is not None for row in rows)
        leads = [row.lead for row in rows if row.lead is not None]
        mean = f"{sum(leads) / len(leads):.0f}" if leads else "-"
        false = sum(row.false_alarms for row in rows)
        print(f"{rule:<24}{collapses:>10}{len(leads):>8}{mean:>11}{false:>14}{len(rows):>6}")
