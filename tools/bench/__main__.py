"""All benchmarks: run them, run their smoke forms, and record their figures with the commit that they are of.

    python -m tools.bench [NAME …]                    print each one's table
    python -m tools.bench --smoke [NAME …]            the smallest sizes: does each still run? Seconds each
    python -m tools.bench --record FILE [NAME …]      also put command, output, commit and date in FILE (make figures)
    python -m tools.bench --age FILE                  which records in FILE are older than the code that they measure

Records are kept under "records" in FILE (docs/performance.json); what else is there stays. A record is old where a
later commit changed a room of the package, or a program of tools/bench, that the benchmark imports. Exit status 1 where
a benchmark fails; the others run all the same.
"""

from __future__ import annotations

import argparse
import ast
import datetime
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parents[1]
MADE_UP_PROBLEMS = '{"prompt": "2+3", "answer": "5"}\n{"prompt": "10/4", "answer": "\\\\frac{5}{2}"}\n'
PROBLEMS = "PROBLEMS"  # stands for a file of made-up problems
# Program → arguments of its smoke form. Every program has one. No smoke form judges times: one round says nothing.
SMOKE: dict[str, str] = {
    "answers": "--responses 2 --length 16 --servers 1 --rounds 1",
    "compare": "--noise --only objective --rounds 1 --allow 1000",
    "engines": "--prompts 1 --group 2 --length 4 --rounds 1",
    "exact": "--sequences 2 --tokens 4 --rounds 1",
    "generation": "--prompts 1 --group 2 --length 4 --rounds 1",
    "learner": "--sequences 2 --length 16 --rounds 1",
    "objective": "--tokens 4096 --length 64 --threads 1 --repeats 1 --most 1000",
    "packing": "--sequences 16 --ranks 2 --batches 1",
    "refit": "--rounds 1",
    "replay": "--repeats 1",
    "reward": f"{PROBLEMS} --wrong 1",
    "scale": "--quick --processes 4",
    "servers": "--prompts 1 --group 2 --length 4 --rounds 1",
    "trl": "--alone --lengths fixed tail --longest 8 --prompts 1 --group 2 --steps 2 --turn 2",
}
# Not among `make bench`: they want something that set-up does not make, or judge a change.
ASKED_FOR = ("compare", "reward", "trl")


def programs() -> list[str]:
    """Modules of this folder that can be started."""
    return sorted(path.stem for path in FOLDER.glob("[a-z]*.py") if '__name__ == "__main__"' in path.read_text())


def imported(module: Path, seen: set[Path]) -> Iterator[str]:
    """Paths below the repository that a program measures: rooms of the package, and files of tools/bench."""
    seen.add(module)
    yield str(module.relative_to(ROOT))
    for node in ast.walk(ast.parse(module.read_text())):
        names = [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
        names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        for name in names:
            parts = name.split(".")
            if parts[0] == "megatron_rl":
                room = ROOT.joinpath(*parts[:2])
                yield str((room if room.is_dir() else room.with_suffix(".py")).relative_to(ROOT))
            elif parts[:2] == ["tools", "bench"]:
                files = [ROOT.joinpath(*parts).with_suffix(".py")]
                files += [ROOT.joinpath(*parts, alias.name).with_suffix(".py") for alias in getattr(node, "names", ())]
                yield from (
                    path for file in files if file.is_file() and file not in seen for path in imported(file, seen)
                )


def git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()


def run(name: str, arguments: list[str]) -> tuple[int, str]:
    """Status and output of one benchmark, which is shown while it comes."""
    command = [sys.executable, "-m", f"tools.bench.{name}", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    print("==", name, *arguments, flush=True)
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
    lines = []
    for line in process.stdout:
        print(line, end="", flush=True)
        lines.append(line.rstrip())
    return process.wait(), "\n".join(lines)


def record(file: Path, name: str, arguments: list[str], output: str) -> None:
    changed = " and changes that no commit has" if git("status", "--porcelain", "--untracked-files=no") else ""
    document = json.loads(file.read_text()) if file.exists() else {}
    document.setdefault("records", {})[name] = {
        "command": " ".join(["python -m", f"tools.bench.{name}", *arguments]),
        "commit": git("rev-parse", "--short=7", "HEAD") + changed,
        "date": datetime.date.today().isoformat(),
        "cores": len(os.sched_getaffinity(0)),
        "output": output.splitlines(),
    }
    file.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n")


def age(file: Path) -> int:
    """Print of every record how many later commits changed what it measures; of figures without a record, that."""
    records = json.loads(file.read_text()).get("records", {})
    for name in programs():
        if name not in records:
            print(f"{name}: no record")
            continue
        commit = records[name]["commit"].split()[0]
        paths = sorted(set(imported(FOLDER / f"{name}.py", set())))
        later = git("log", "--format=%h", f"{commit}..HEAD", "--", *paths).split()
        verdict = (
            f"older than what it measures: {len(later)} later commits, the last {later[0]}" if later else "current"
        )
        print(f"{name}: {records[name]['date']}, {records[name]['commit']}: {verdict}")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="of tools/bench; default: all that need nothing else")
    parser.add_argument("--smoke", action="store_true", help="the smallest sizes, of all")
    parser.add_argument("--record", type=Path, metavar="FILE", help="write what each printed to FILE")
    parser.add_argument("--age", type=Path, metavar="FILE", help="judge the records in FILE and run nothing")
    options = parser.parse_args()
    all_names = programs()
    if unknown := [name for name in options.names if name not in all_names]:
        parser.error(f"{unknown[0]}: no benchmark; one of {', '.join(all_names)}")
    if options.age:
        return age(options.age)
    if options.smoke and options.record:
        parser.error("--smoke measures nothing that is worth a record; leave out one of --smoke and --record")
    failed = []
    with tempfile.TemporaryDirectory() as folder:
        problems = Path(folder, "problems.jsonl")
        problems.write_text(MADE_UP_PROBLEMS)
        for name in options.names or (all_names if options.smoke else [n for n in all_names if n not in ASKED_FOR]):
            arguments = SMOKE[name].replace(PROBLEMS, str(problems)).split() if options.smoke else []
            status, output = run(name, arguments)
            if status:
                failed.append(name)
            elif options.record:
                record(options.record, name, arguments, output)
    if failed:
        print(f"FAILED: {', '.join(failed)}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
