"""The command `lab`."""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_rl.arguments import COUNT, INDEX, POSITIVE, add_gpu, add_nodes, output, output_file
from megatron_rl.errors import EXIT_DONE, InputError
from megatron_rl.instruments.lab import load_study

if TYPE_CHECKING:
    from megatron_rl.instruments.lab.results import Stage
    from megatron_rl.instruments.lab.runner import Registration


EXIT_INCOMPLETE = 1


def add_lab(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(required=True, metavar="check|power|plan|run|pack|report")
    check = commands.add_parser("check", help="Check studies and their arms. No engine starts.")
    check.add_argument(
        "studies", nargs="+", type=Path, metavar="STUDY", help="Read this study file, or the one in this folder."
    )
    check.add_argument("--offline", action="store_true", help="Work without models and data that are absent.")
    check.set_defaults(action=_check)
    start = commands.add_parser("run", help="Run what is missing of a study.")
    start.add_argument(
        "--jobs", type=COUNT, default=os.cpu_count() or 1, help="Run this number at a time (default: one per core)."
    )
    start.add_argument("--seeds", type=INDEX, nargs="+", help="Run only these seeds.")
    start.add_argument("--arms", nargs="+", help="Run only these arms, whatever the gate says.")
    start.add_argument(
        "--reuse",
        type=Path,
        nargs="+",
        default=[],
        metavar="RUNS",
        help="Take over equal runs from these folders of other studies' runs, and files of `lab pack`.",
    )
    start.set_defaults(action=_run)
    start.add_argument(
        "--other-code", action="store_true", help="Continue with another commit than that of the first run."
    )
    start.add_argument("--slurm", action="store_true", help="Submit the runs through slurm/submit.sh, and return.")
    start.add_argument(
        "--sbatch",
        action="append",
        default=[],
        metavar="OPTION",
        help="Give sbatch this option, such as --sbatch=--nodes=4.",
    )
    power = commands.add_parser("power", help="Compute the smallest effect that each primary sees with 80%% power.")
    power.set_defaults(action=_power)
    plan = commands.add_parser("plan", help="Estimate the GPU-hours of every arm. No engine starts.")
    add_gpu(plan, "Reckon with this GPU.", required=True)
    add_nodes(plan, "the base recipe")
    plan.add_argument(
        "--mean-response",
        type=POSITIVE,
        metavar="TOKENS",
        help="Reckon with responses of this mean length (default: half of the longest allowed).",
    )
    plan.set_defaults(action=_plan)
    packed = commands.add_parser(
        "pack", help="Write finished runs to one file, which `lab run --reuse` takes elsewhere."
    )
    packed.add_argument(
        "--to", type=output_file, required=True, metavar="FILE", help="Write this file, whose name ends in .xz."
    )
    packed.set_defaults(action=_pack)
    report = commands.add_parser("report", help="Draw the figure and write the table of what was run.")
    report.set_defaults(action=_report)
    for command in (start, power, plan, packed, report):
        command.add_argument(
            "study", type=Path, metavar="STUDY", help="Read this study file, or the one in this folder."
        )
    for command in (start, power, packed, report):
        reads = command in (power, report)
        where = ", or a file of `lab pack`." if reads else "."
        command.add_argument(
            "--out",
            type=Path if reads else output,
            help=f"Use this folder of the study's runs (default: runs/lab/STUDY){where}",
        )


def run_lab(options: argparse.Namespace) -> int:
    """Run the arms of a study over its seeds, and report them against their matched controls.

        megatron-rl lab check  STUDY…                                every arm is a recipe that `check` accepts
        megatron-rl lab power  STUDY                                 what effect each primary can see; no engine
        megatron-rl lab plan   STUDY --gpu h100-80 [--nodes 4]       GPU-hours of every arm, by arithmetic
        megatron-rl lab run    STUDY [--jobs N] [--seeds 0 1] [--arms A B] [--slurm --sbatch=--nodes=4 …]
        megatron-rl lab pack   STUDY --to FILE.jsonl.xz              finished runs in one file, for `run --reuse`
        megatron-rl lab report STUDY                                 figure and tables of what was run

    STUDY is a study file or its folder, e.g. recipes/lab/hacking. Its runs are in runs/lab/STUDY (--out: another
    folder). `run` skips finished runs and continues interrupted ones, so the same command resumes a study. The two arms
    of a gate run first; the others run if it passes. Before the first run, `run` records the study's fixed parts and
    the commit. Afterwards it refuses a changed study file, and other code (unless --other-code).

    Exit status: 0 all runs finished (also by an alarm) or submitted, 1 some failed, were interrupted or differ, 2 bad
    study or input.
    """
    return options.action(options)


def _check(options: argparse.Namespace) -> int:
    for path in options.studies:
        loaded = load_study(path)
        loaded.check(options.offline)
        print(f"{loaded.path}: {len(loaded.study.arms)} arms × {len(loaded.study.seeds)} seeds, checked")
    return EXIT_DONE


def _run(options: argparse.Namespace) -> int:
    from megatron_rl.instruments.lab.archive import adopt
    from megatron_rl.instruments.lab.jobs import FINISHED
    from megatron_rl.instruments.lab.results import stage
    from megatron_rl.instruments.lab.runner import StudyRunner, code_version, register
    from megatron_rl.process.host import outlasting_readers
    from megatron_rl.run.control import SIGNALS, taking

    if options.sbatch and not options.slurm:
        raise InputError(f"--sbatch={options.sbatch[0]}: an option of Slurm's sbatch; give --slurm with it")
    loaded = load_study(options.study)
    loaded.check()
    root = _root(options, loaded.study.name)
    jobs = loaded.jobs(root, options.seeds, options.arms)
    runner = StudyRunner(loaded, root, options.jobs, say=_say)
    with tempfile.TemporaryDirectory() as unpacked:
        folders, registrations = _sources(options.reuse, Path(unpacked))
        adopt(loaded, root, registrations)
        register(loaded, root, options.other_code)
        code = None if options.other_code else code_version()
        runner.reuse(jobs, folders, code)
        # Yoked runs take their values from runs that are now finished.
        runner.reuse([job for job in loaded.jobs(root, options.seeds, options.arms) if job not in jobs], folders, code)
    now = stage(loaded, root, options.seeds, options.arms)
    if options.slurm:
        from megatron_rl.instruments.lab.runner import submit

        _say_states(submit(runner, now.jobs, options.sbatch))
        _say_rest(now)
        return EXIT_DONE
    with outlasting_readers(f"{root} has the runs' logs"), taking(SIGNALS, lambda *_: runner.stop()):
        states = runner.run(now.jobs)
        while now.waiting:
            before, now = now, stage(loaded, root, options.seeds, options.arms)
            if len(now.waiting) == len(before.waiting):
                break
            states |= runner.run(now.jobs)
    _say_states(states)
    _say_rest(now)
    return EXIT_DONE if all(state in FINISHED for state in states.values()) else EXIT_INCOMPLETE


def _sources(given: list[Path], folder: Path) -> tuple[list[Path], list[Registration | None]]:
    """Return folders of runs (files are unpacked below ``folder``) and the registrations of the files' studies."""
    from megatron_rl.instruments.lab.archive import unpack

    folders, registrations = [], []
    for number, path in enumerate(given):
        if path.is_file():
            folders.append(folder / str(number))
            registrations.append(unpack(path, folders[-1]))
        elif path.is_dir():
            folders.append(path)
        else:
            raise InputError(f"--reuse {path}: expected a folder of runs or a file of `lab pack`")
    return folders, registrations


def _say_rest(now: Stage) -> None:
    if now.waiting:
        _say(f"{len(now.waiting)} runs wait for the runs that they depend on")
    if now.ruled_out:
        _say(f"the gate failed: {len(now.ruled_out)} runs of other arms are skipped, they cannot test a prediction")


def _say(line: str) -> None:
    print(line, flush=True)


def _say_states(states: dict[str, str]) -> None:
    for state in sorted(set(states.values())):
        names = [name for name, state_of_job in states.items() if state_of_job == state]
        _say(f"{state}: {len(names)}" + ("" if state == "done" else f" ({', '.join(names)})"))


def _power(options: argparse.Namespace) -> int:
    from megatron_rl.instruments.lab.foresight import foresee, render_foresight

    loaded = load_study(options.study)
    print("\n".join(render_foresight(loaded.study, foresee(loaded, _root(options, loaded.study.name)))))
    return EXIT_DONE


def _plan(options: argparse.Namespace) -> int:
    from megatron_rl.instruments.lab.foresight import cost, render_costs

    loaded = load_study(options.study)
    costs = cost(loaded, options.gpu, options.nodes, options.gpus_per_node, options.mean_response)
    for line in render_costs(loaded, options.gpu, costs):
        print(line)
    return EXIT_DONE


def _pack(options: argparse.Namespace) -> int:
    from megatron_rl.instruments.lab.archive import pack

    if options.to.suffix != ".xz":
        raise InputError(f"--to {options.to}: the file is xz-compressed; give it a name that ends in .xz")
    loaded = load_study(options.study)
    number = pack(loaded, _root(options, loaded.study.name), options.to)
    _say(f"{options.to}: {number} of {len(loaded.jobs(options.to))} runs")
    return EXIT_DONE


def _report(options: argparse.Namespace) -> int:
    from megatron_rl.instruments.lab.archive import read_packed
    from megatron_rl.instruments.lab.report import render, write_report

    loaded = load_study(options.study)
    root = _root(options, loaded.study.name)
    if root.is_file():
        print(render(read_packed(loaded, root)), end="")
    else:
        for path in write_report(loaded, root):
            _say(f"wrote {path}")
    return EXIT_DONE


def _root(options: argparse.Namespace, name: str) -> Path:
    return (options.out or Path("runs") / "lab" / name).resolve()
