"""The commands `run why`, which looks for the cause of an unstable run, and `run score-alarms`."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import yaml
from pydantic import ValidationError

from megatron_rl.arguments import add_overrides
from megatron_rl.config import yaml12
from megatron_rl.config.loader import values_of
from megatron_rl.config.monitor import AlarmRule, MonitorConfig, level_rules
from megatron_rl.errors import EXIT_DONE, InputError, printable
from megatron_rl.monitor import RunDirectory
from megatron_rl.monitor.alarms import (
    Alarms,
    CollapseRule,
    RuleScore,
    SetScore,
    completed,
    distinct,
    own_rules,
    read_packed,
    score_run,
    score_set,
)
from megatron_rl.process.host import format_table

if TYPE_CHECKING:
    from megatron_rl.instruments.foreign.read import Run


def add_why(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, metavar="RUN", help="Read this run directory, or another project's log.")
    parser.add_argument(
        "--against", type=Path, metavar="GOOD", help="Explain RUN by what differs from this run: keys, files, curves."
    )
    parser.add_argument("--json", action="store_true", help="Print JSON instead of a page.")
    add_overrides(parser)


def run_why(options: argparse.Namespace) -> int:
    """Say what changed in a run, when its metrics left their healthy stretch, and which causes fit.

        megatron-rl run why runs/my-run [--json]
        megatron-rl run why runs/my-run --against runs/good
        megatron-rl run why tensorboard_log/my-project/my-run [--set batch.minibatches=4]

    Reads metrics.jsonl, the recipes and environments that the run kept, or a log of verl, slime, miles, NeMo-RL,
    prime-rl or TRL (TensorBoard, W&B, MLflow, JSON, CSV, console). For such a log it names the rules that lack their
    metric; --set gives keys of the recipe that a log does not have (docs/coming-from.md).

    Signs are the alarms in force and a collapse of the reward. What somebody changed before the first sign comes first,
    then causes whose own measure departed in time. Where none fits the page says so. A run without a sign has no
    suspects. --against holds a run against a good one: keys, files and versions that differ, then curves, in order.
    """
    from megatron_rl.instruments.foreign.read import blind_rules, read_run
    from megatron_rl.instruments.why.changed import differing, history_of
    from megatron_rl.instruments.why.onset import begins_at_start, find, page
    from megatron_rl.run.identity import read_recipe

    run, good = read_run(options.run), options.against and read_run(options.against)
    if not run.records:
        raise InputError(f"{options.run}: no step is recorded yet")
    if run.is_own and options.overrides:
        raise InputError("--set: a run of megatron-rl has its recipe; --set is for logs of other projects")
    folder, history, recipe = options.run, (), {} if run.is_own else values_of(options.overrides)
    if run.is_own:
        folder = _folder(options.run)
        recipe, history = read_recipe(RunDirectory(folder).recipe), history_of(RunDirectory(folder), run.records)
    if run.is_own and good and good.is_own:
        own, there = {event.key for event in history}, RunDirectory(_folder(options.against))
        others = differing(RunDirectory(folder), there, int(run.records[0]["step"]))
        history = (*(event for event in others if event.key not in own), *history)
    finding = find(str(folder), run.records, recipe, history, good and good.records)
    rules = Alarms(own_rules(recipe), level_rules(recipe)).rules
    lacks = {} if run.is_own else blind_rules(completed(run.records), rules)
    if options.json:
        read = {our: list(theirs) for our, theirs in run.sources.items()}
        log = {} if run.is_own else {"log": run.source_lines(), "read": read, "lacks": lacks}
        print(json.dumps(finding.as_json() | log, indent=2))
        return EXIT_DONE
    from_start = run.is_own and begins_at_start(finding, folder)
    print(printable("\n".join([*run.source_lines(), page(finding, folder if run.is_own else None, from_start)])))
    if not run.is_own:
        blind = [f"  {name:<20}needs {metric}" for name, metric in lacks.items()] or ["  none"]
        print("\n".join(["\nrules that see nothing in this log:", *blind]))
        print("A log has no recipe: --set batch.minibatches=…, rollout.max_staleness=… and other keys tell of more.")
    return EXIT_DONE


def _folder(run: Path) -> Path:
    return run.parent if run.is_file() else run


def add_score_alarms(parser: argparse.ArgumentParser) -> None:
    text = "Read this run directory, metrics.jsonl or log."
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help=text)
    text = "Take the rules of this recipe or YAML list (default: each run's own)."
    parser.add_argument("--rules", type=Path, metavar="FILE", help=text)
    parser.add_argument("--json", action="store_true", help="Print JSON instead of a table.")


def run_score_alarms(options: argparse.Namespace) -> int:
    """Compare alarm rules on finished runs: lead time before a collapse, missed collapses, false alarms.

        megatron-rl run score-alarms RUN [RUN ...] [--rules FILE] [--json]

    RUN is a run directory (or its metrics.jsonl), or a log of verl, slime, miles, NeMo-RL, prime-rl or TRL
    (docs/coming-from.md). The rules are those of --rules (a recipe, or a YAML list of rules), else those that were in
    force in each run: its recipe's, the built-in ones and those on levels; a log of another project has the last. RUN
    may also be a file of packed runs (docs/lab/runs/*.xz); the table then has the two halves on which the rules on
    levels were set and judged. A collapse is the first step from which the reward (median of 5) has lost, for 5 steps,
    half of its range, or two validations have. A rule that goes off within 200 steps before it was right; earlier, or
    in a run that never collapses, it was false.
    """
    from megatron_rl.instruments.foreign.read import blind_rules, read_run

    scores, logs = {}, []
    packed = [path for path in options.runs if path.suffix == ".xz"]
    for path in (path for path in options.runs if path not in packed):
        run = read_run(path)
        scores[str(path)] = score_run(completed(run.records), rules_of(run, options.rules), CollapseRule(), horizon=200)
        logs += [] if run.is_own else [run]
    lacks = {str(log.path): blind_rules(log.records, rules_of(log, options.rules)) for log in logs}
    halves = score_packed(packed, options.rules) if packed else {}
    if options.json:
        table: dict[str, Any] = {name: [asdict(row) for row in rows] for name, rows in scores.items()}
        table |= {"lacks": lacks} if logs else {}
        print(json.dumps(table | {half: asdict(score) for half, score in halves.items()}, indent=2))
        return EXIT_DONE
    for log in logs:
        print("\n".join(log.source_lines()))
    if scores:
        print_table(scores)
    for path, rules in lacks.items():
        if listed := ", ".join(f"{name} ({metric})" for name, metric in rules.items()):
            print(f"{path}: these rules see nothing: {listed}")
    if halves:
        print_halves(halves)
    return EXIT_DONE


def rules_of(run: Run, given: Path | None) -> list[AlarmRule]:
    """The rules of ``given``, else those in force in the run; for a log of another project those on levels."""
    from megatron_rl.run.identity import read_recipe

    if given is not None:
        return read_rules(given)
    if not run.is_own:
        return level_rules({})
    return Alarms.of(read_recipe(_folder(run.path) / "recipe.resolved.yaml")).rules


def score_packed(files: list[Path], given: Path | None) -> dict[str, SetScore]:
    """The two halves of the runs in ``files``, each distinct run once, and the score of the rules on each."""
    own = read_rules(given) if given else None
    halves: dict[str, list[Any]] = {"set": [], "judge": []}
    for run in distinct([run for file in files for run in read_packed(file)]):
        halves[run.half].append((run, Alarms.of(run.recipe).rules if own is None else own))
    return {half: score_set(pairs, CollapseRule()) for half, pairs in halves.items()}


def print_halves(halves: dict[str, SetScore]) -> None:
    """A row for each half, then what was missed and which rules were wrong."""
    rows = []
    for half, s in halves.items():
        noticed, rate = f"{s.share_noticed:.1%}", f"{s.false_per_thousand:.2f}"
        rows.append((half, s.runs, s.collapses, noticed, s.in_time, s.median_lead, s.healthy_steps, rate))
    print_rows("half runs collapses noticed in-time median-lead healthy-steps false-per-1000", rows)
    for half, score in halves.items():
        false = ", ".join(f"{name} {count}" for name, count in Counter(score.false_alarms).most_common())
        print(f"{half}: false alarms: {false or 'none'}; not noticed: {', '.join(score.missed) or 'none'}")


def print_rows(header: str, rows: Sequence[Sequence[object]]) -> None:
    """Print rows below each other: None as a dash, three digits of a mean."""
    cells = [["-" if c is None else f"{c:.3g}" if isinstance(c, float) else str(c) for c in row] for row in rows]
    print(format_table(header.split(), cells))


def read_rules(path: Path) -> list[AlarmRule]:
    """Return the rules in ``path``: a recipe's monitor.alarms, or a list of rules."""
    if not path.is_file():
        raise InputError(f"{path}: no such file; give the rules with --rules")
    try:
        document, _ = yaml12.parse(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: not valid YAML: {error}") from error
    document = document or {}
    alarms = document if isinstance(document, list) else (document.get("monitor") or {}).get("alarms")
    if alarms is None:
        raise InputError(f"{path}: no rules; expected a list of rules, or a recipe with monitor.alarms")
    try:
        return MonitorConfig(alarms=alarms).alarms
    except ValidationError as error:
        raise InputError(f"{path}: {error}") from error


def print_table(scores: dict[str, list[RuleScore]]) -> None:
    """Print one row per run and rule, then one per rule over all runs."""
    every = [(run, row) for run, rows in scores.items() for row in rows]
    told = [(run, r.rule, r.collapse, next(iter(r.fired), None), r.lead, r.false_alarms) for run, r in every]
    print_rows("run rule collapse first lead false", told)
    print()
    rows = []
    for rule in dict.fromkeys(row.rule for _, row in every):
        of_rule = [row for _, row in every if row.rule == rule]
        leads = [row.lead for row in of_rule if row.lead is not None]
        collapses, false = sum(r.collapse is not None for r in of_rule), sum(r.false_alarms for r in of_rule)
        rows.append((rule, collapses, len(leads), fmean(leads) if leads else None, false, len(of_rule)))
    print_rows("rule collapses warned mean-lead false-alarms runs", rows)
