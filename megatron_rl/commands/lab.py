"""The instability lab: run a study's arms over its seeds, and report them against their matched controls.

    megatron-rl lab check  STUDY…                                every arm is a recipe that `check` accepts
    megatron-rl lab power  STUDY                                 what effect each primary can see; no engine
    megatron-rl lab plan   STUDY --gpu h100-80 [--nodes 4]       GPU-hours of every arm, by arithmetic
    megatron-rl lab run    STUDY [--jobs N] [--seeds 0 1] [--arms A B] [--slurm --sbatch=--nodes=4 …]
    megatron-rl lab verify STUDY --arm A --seed S | --random N   run again, compare bit for bit
    megatron-rl lab pack   STUDY --to FILE.jsonl.xz              finished runs in one file, for `run --reuse` elsewhere
    megatron-rl lab report STUDY                                 figure and tables of what was run
    megatron-rl lab docs                                         those of docs/lab, from the runs in docs/lab/runs

STUDY is a study file or its folder, e.g. recipes/lab/hacking. Runs lie below runs/lab/STUDY (--out: another folder);
`run` leaves finished ones alone and continues interrupted ones, so the same command resumes. A gate's two arms are run
first, and the others where it passes. `run` notes what the study fixes and the commit before the first run, and refuses
another study file (unless --amend REASON) or other code (unless --other-code). Exit status: 0 all runs finished (ended
by an alarm is finished) or submitted, 1 some failed, were interrupted or differ, 2 bad study or input.
"""

from __future__ import annotations

import argparse
import os
import signal
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_rl.commands.arguments import GPU_NAMES, gpu_name
from megatron_rl.errors import EXIT_DONE, InputError
from megatron_rl.lab import load_study
from megatron_rl.shipped import checkout

if TYPE_CHECKING:
    from megatron_rl.lab.gate import Stage
    from megatron_rl.lab.registration import Registration

EXIT_INCOMPLETE = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(required=True, metavar="check|power|plan|run|verify|pack|report|docs")
    check = commands.add_parser("check", help="check studies and their arms; no engine")
    check.add_argument("studies", nargs="+", type=Path, metavar="STUDY", help="study file or its folder")
    check.add_argument("--offline", action="store_true", help="go without models and data that are not at hand")
    check.set_defaults(action=_check)
    start = commands.add_parser("run", help="run what is missing of a study")
    start.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="runs at a time (default: one per core)")
    start.add_argument("--seeds", type=int, nargs="+", help="only these")
    start.add_argument("--arms", nargs="+", help="only these, whatever the gate says")
    start.add_argument(
        "--reuse",
        type=Path,
        nargs="+",
        default=[],
        metavar="RUNS",
        help="folders of other studies' runs, and files of `lab pack`: take over what is the same",
    )
    start.set_defaults(action=_run)
    start.add_argument("--amend", metavar="REASON", help="go on with a study file that was changed since the first run")
    start.add_argument("--other-code", action="store_true", help="go on with another commit than that of the first run")
    start.add_argument("--slurm", action="store_true", help="submit the runs through slurm/submit.sh, and return")
    start.add_argument(
        "--sbatch",
        action="append",
        default=[],
        metavar="OPTION",
        help="an option of sbatch, such as --sbatch=--nodes=4",
    )
    again = commands.add_parser("verify", help="run arms and seeds again and compare their metrics bit for bit")
    which = again.add_mutually_exclusive_group(required=True)
    which.add_argument("--arm", help="of the run; with --seed")
    which.add_argument("--random", type=int, metavar="N", help="N finished runs, drawn from the study's hash")
    again.add_argument("--seed", type=int, help="of the run")
    again.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="runs at a time (default: one per core)")
    again.set_defaults(action=_verify)
    power = commands.add_parser("power", help="the smallest effect that each primary sees with 80%% power")
    power.set_defaults(action=_power)
    plan = commands.add_parser("plan", help="GPU-hours of every arm; no engine")
    plan.add_argument("--gpu", required=True, type=gpu_name, choices=GPU_NAMES, help="what it is to run on")
    plan.add_argument("--nodes", type=int, help="nodes of a run (default: as the base recipe's name says)")
    plan.add_argument(
        "--gpus-per-node", type=int, help="GPUs of a node (default: as the base recipe's name says, else 8)"
    )
    plan.add_argument("--mean-response", type=float, metavar="TOKENS", help="default: half of the longest allowed")
    plan.set_defaults(action=_plan)
    packed = commands.add_parser("pack", help="write finished runs to one file, which `run --reuse` takes elsewhere")
    packed.add_argument("--to", type=Path, required=True, metavar="FILE", help="written anew; ends in .xz")
    packed.set_defaults(action=_pack)
    report = commands.add_parser("report", help="figure and table from what was run")
    report.set_defaults(action=_report)
    docs = commands.add_parser("docs", help="pages and verdicts of docs/lab, from the runs in docs/lab/runs")
    docs.set_defaults(action=_write_docs)
    for command in (start, again, power, plan, packed, report):
        command.add_argument("study", type=Path, metavar="STUDY", help="study file or its folder")
    for command in (start, again, packed, report):
        command.add_argument("--out", type=Path, help="folder of the study's runs (default: runs/lab/STUDY)")
    power.add_argument("--out", type=Path, help="runs with whose spread it reckons: a folder, or a file of `lab pack`")


def run(options: argparse.Namespace) -> int:
    return options.action(options)


def _check(options: argparse.Namespace) -> int:
    from megatron_rl.lab.foresight import num_distinct_runs

    studies = [load_study(path) for path in options.studies]
    for loaded in studies:
        loaded.check(options.offline)
        print(f"{loaded.path}: {len(loaded.study.arms)} arms × {len(loaded.study.seeds)} seeds, checked")
    if len(studies) > 1:
        runs = sum(len(loaded.study.arms) * len(loaded.study.seeds) for loaded in studies)
        print(f"{runs} runs, {num_distinct_runs(studies)} where those of the same recipe and seed are made once")
    return EXIT_DONE


def _run(options: argparse.Namespace) -> int:
    from megatron_rl.lab.archive import adopt
    from megatron_rl.lab.gate import stage
    from megatron_rl.lab.on_disk import FINISHED
    from megatron_rl.lab.registration import code_version, register
    from megatron_rl.lab.runner import StudyRunner
    from megatron_rl.run.stop import taking

    if options.sbatch and not options.slurm:
        raise InputError(f"--sbatch={options.sbatch[0]}: an option of Slurm's sbatch; give --slurm with it")
    loaded = load_study(options.study)
    loaded.check()
    root = _root(options, loaded.study.name)
    jobs = loaded.jobs(root, options.seeds, options.arms)
    runner = StudyRunner(loaded, root, max(1, options.jobs), say=_say)
    num_finished = sum(runner.state(job) in FINISHED for job in loaded.jobs(root))
    with tempfile.TemporaryDirectory() as unpacked:
        folders, registrations = _sources(options.reuse, Path(unpacked))
        adopt(loaded, root, registrations)
        register(loaded, root, num_finished, options.amend, options.other_code)
        code = None if options.other_code else code_version()
        runner.reuse(jobs, folders, code)
        # Now that the runs are there to which others are yoked, those have their values.
        runner.reuse([job for job in loaded.jobs(root, options.seeds, options.arms) if job not in jobs], folders, code)
    now = stage(loaded, root, options.seeds, options.arms)
    if options.slurm:
        from megatron_rl.lab.cluster import submit

        _say_states(submit(runner, now.jobs, options.sbatch, _say))
        _say_rest(now)
        return EXIT_DONE
    with taking((signal.SIGINT, signal.SIGTERM), lambda *_: runner.stop()):
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
    """Folders of runs, those of files unpacked below ``folder``; and what the files' studies had registered."""
    from megatron_rl.lab.archive import unpack

    folders, registrations = [], []
    for number, path in enumerate(given):
        if path.is_file():
            folders.append(folder / str(number))
            registrations.append(unpack(path, folders[-1]))
        elif path.is_dir():
            folders.append(path)
        else:
            raise InputError(f"--reuse {path}: no such folder of runs, nor a file of `lab pack`")
    return folders, registrations


def _say_rest(now: Stage) -> None:
    if now.waiting:
        _say(f"{len(now.waiting)} runs wait until those that they depend on are finished")
    if now.ruled_out:
        _say(f"the gate failed: {len(now.ruled_out)} runs of other arms can test nothing and are not made")


def _say(line: str) -> None:
    print(line, flush=True)


def _say_states(states: dict[str, str]) -> None:
    for state in sorted(set(states.values())):
        names = [name for name, found in states.items() if found == state]
        _say(f"{state}: {len(names)}" + ("" if state == "done" else f" ({', '.join(names)})"))


def _verify(options: argparse.Namespace) -> int:
    from megatron_rl.lab.on_disk import FINISHED
    from megatron_rl.lab.registration import code_version, read_registration, sha256_of
    from megatron_rl.lab.runner import StudyRunner
    from megatron_rl.lab.verify import drawn, verify

    if (options.arm is None) != (options.seed is None):
        raise InputError("verify: --arm and --seed name one run together; or give --random N")
    loaded = load_study(options.study)
    root = _root(options, loaded.study.name)
    if options.arm is not None:
        jobs = loaded.jobs(root, [options.seed], [options.arm])
    else:
        runner = StudyRunner(loaded, root, 1)
        finished = [job for job in loaded.jobs(root) if runner.state(job) in FINISHED]
        jobs = drawn(finished, options.random, sha256_of(loaded.study.commitment()))
    if not jobs:
        raise InputError(f"{root}: no finished run to verify; `megatron-rl lab run` makes them")
    registered = read_registration(root)
    if registered is not None and registered.code != code_version():
        _say(f"the runs were made by {registered.code}, this is {code_version()}")
    found = verify(loaded, root, jobs, max(1, options.jobs), _say)
    for name, difference in found.items():
        _say(f"{name}: " + (difference or "every metric of every step is the same, bit for bit"))
    return EXIT_INCOMPLETE if any(found.values()) else EXIT_DONE


def _power(options: argparse.Namespace) -> int:
    from megatron_rl.lab.archive import unpack
    from megatron_rl.lab.foresight import foresee, render

    loaded = load_study(options.study)
    root = _root(options, loaded.study.name)
    with tempfile.TemporaryDirectory() as unpacked:
        if root.is_file():
            unpack(root, Path(unpacked))
            root = Path(unpacked)
        for line in render(loaded.study, foresee(loaded, root)):
            print(line)
    return EXIT_DONE


def _plan(options: argparse.Namespace) -> int:
    from megatron_rl.lab.compute import cost, render

    loaded = load_study(options.study)
    costs = cost(loaded, options.gpu, options.nodes, options.gpus_per_node, options.mean_response)
    for line in render(loaded, options.gpu, costs):
        print(line)
    return EXIT_DONE


def _pack(options: argparse.Namespace) -> int:
    from megatron_rl.lab.archive import pack

    if options.to.suffix != ".xz":
        raise InputError(f"--to {options.to}: the file is xz-compressed; give it a name that ends in .xz")
    loaded = load_study(options.study)
    number = pack(loaded, _root(options, loaded.study.name), options.to)
    _say(f"{options.to}: {number} of {len(loaded.jobs(options.to))} runs")
    return EXIT_DONE


def _report(options: argparse.Namespace) -> int:
    from megatron_rl.lab.report import write_report

    loaded = load_study(options.study)
    _say_written(write_report(loaded, _root(options, loaded.study.name)))
    return EXIT_DONE


def _write_docs(options: argparse.Namespace) -> int:
    from megatron_rl.lab.docs import write_docs

    repository = checkout()
    if repository is None:
        raise InputError("lab docs: writes docs/lab of a checkout; this is the installed package")
    studies = [load_study(file) for file in sorted((repository / "recipes" / "lab").glob("*/study.yaml"))]
    _say_written(write_docs(studies, repository / "docs"))
    return EXIT_DONE


def _say_written(paths: list[Path]) -> None:
    for path in paths:
        _say(f"wrote {path}")


def _root(options: argparse.Namespace, name: str) -> Path:
    return (options.out or Path("runs") / "lab" / name).resolve()
