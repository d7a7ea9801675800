"""The instability lab: run a study's arms over its seeds, and report them against their matched controls.

    megatron-rl lab check  STUDY…                                every arm is a recipe that `check` accepts
    megatron-rl lab run    STUDY [--jobs N] [--seeds 0 1] [--arms A B]
    megatron-rl lab report STUDY [--docs]                        figure and table; --docs: those of docs/lab

STUDY is a study file or its folder, e.g. recipes/lab/hacking. Runs lie below runs/lab/STUDY (--out: another folder);
`run` leaves finished ones alone and continues interrupted ones, so the same command resumes. Exit status: 0 all runs
finished (ended by an alarm is finished), 1 some failed or were interrupted, 2 bad study or input.
"""

from __future__ import annotations

import argparse
import os
import signal
from pathlib import Path

from megatron_rl.errors import EXIT_DONE, InputError
from megatron_rl.lab import load_study
from megatron_rl.shipped import checkout

EXIT_INCOMPLETE = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(required=True, metavar="check|run|report")
    check = commands.add_parser("check", help="check studies and their arms; no engine")
    check.add_argument("studies", nargs="+", type=Path, metavar="STUDY", help="study file or its folder")
    check.set_defaults(action=_check)
    start = commands.add_parser("run", help="run what is missing of a study")
    start.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="runs at a time (default: one per core)")
    start.add_argument("--seeds", type=int, nargs="+", help="only these")
    start.add_argument("--arms", nargs="+", help="only these")
    start.add_argument(
        "--reuse",
        type=Path,
        nargs="+",
        default=[],
        metavar="RUNS",
        help="folders of other studies' runs: take over what is the same",
    )
    start.set_defaults(action=_run)
    report = commands.add_parser("report", help="figure and table from what was run")
    report.add_argument(
        "--docs", action="store_true", help="write docs/images/lab-STUDY.png and the tables of docs/lab/STUDY.md"
    )
    report.set_defaults(action=_report)
    for command in (start, report):
        command.add_argument("study", type=Path, metavar="STUDY", help="study file or its folder")
        command.add_argument("--out", type=Path, help="folder of the study's runs (default: runs/lab/STUDY)")


def run(options: argparse.Namespace) -> int:
    return options.action(options)


def _check(options: argparse.Namespace) -> int:
    for path in options.studies:
        loaded = load_study(path)
        loaded.check()
        print(f"{loaded.path}: {len(loaded.study.arms)} arms × {len(loaded.study.seeds)} seeds, checked")
    return EXIT_DONE


def _run(options: argparse.Namespace) -> int:
    from megatron_rl.lab.runner import FINISHED, StudyRunner

    loaded = load_study(options.study)
    loaded.check()
    root = _root(options, loaded.study.name)
    jobs = loaded.jobs(root, options.seeds, options.arms)
    runner = StudyRunner(loaded, root, max(1, options.jobs), say=lambda line: print(line, flush=True))
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: runner.stop())
    runner.reuse(jobs, options.reuse)
    states = runner.run(jobs)
    for state in sorted(set(states.values())):
        names = [name for name, found in states.items() if found == state]
        print(f"{state}: {len(names)}" + ("" if state == "done" else f" ({', '.join(names)})"))
    return EXIT_DONE if all(state in FINISHED for state in states.values()) else EXIT_INCOMPLETE


def _report(options: argparse.Namespace) -> int:
    from megatron_rl.lab.report import write_docs, write_report

    loaded = load_study(options.study)
    root = _root(options, loaded.study.name)
    written = write_report(loaded, root)
    if options.docs:
        written += write_docs(loaded, root, _docs())
    for path in written:
        print(f"wrote {path}")
    return EXIT_DONE


def _root(options: argparse.Namespace, name: str) -> Path:
    return (options.out or Path("runs") / "lab" / name).resolve()


def _docs() -> Path:
    repository = checkout()
    if repository is None:
        raise InputError("--docs: writes docs/lab of a checkout; this is the installed package")
    return repository / "docs"
