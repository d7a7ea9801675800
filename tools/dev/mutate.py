"""Would a test notice? A fixed list of single-line mutations of the package, each against the nearest unit tests.

    python -m tools.dev.mutate --make                     draw the list (tools/dev/mutations.json) anew from the sources
    python -m tools.dev.mutate --out results.jsonl        run what results.jsonl does not have yet (stop it at any time)
    python -m tools.dev.mutate --out before.jsonl --commit 7b6ba2a        the same of another commit
    python -m tools.dev.mutate --table before.jsonl after.jsonl           who was caught, room by room, and who was not

A mutation is a piece of one line and what stands in its place: another comparison, sign or factor, `and` for `or`, a
condition without its `not`, a number that is one larger, a call left out. The list is drawn by a seed, from every room
by its number of possible mutations, at least two of each. It names text, not line numbers. Files are moved and merged:
where the named file lacks the line, the one other file that has it is mutated, one of the same name first. Where no
file or more than one has it, the mutation is reported as absent.

The tests of a mutation are the unit test files that are nearest to it, by name and then by imports, up to --files of
them; dear ones (`make test-costs`) and those marked slow are left out. So a survivor is what unit tests nearby do not
see; tests that start engines or ranks may. They run in a copy of the commit, in a process forked from one that has
imported the libraries.
"""

from __future__ import annotations

import argparse
import ast
import copy
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict, deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.support.costs import order_by

ROOT = Path(__file__).resolve().parents[2]
LIST = Path(__file__).with_name("mutations.json")
SEED, NUMBER, LEAST = 44, 180, 2
COMPARISONS = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq}
COMPARISONS |= {ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In}
ARITHMETIC = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult}
OTHER_NAMES = {"min": "max", "max": "min", "any": "all", "all": "any"}
LIBRARIES = (
    "numpy",
    "torch",
    "pydantic",
    "yaml",
    "hypothesis",
    "pytest",
    "transformers",
    "megatron.core.parallel_state",
)
DEAR_S = 12.0  # processor seconds of a file of tests, above which it is left out
LIMIT_S = 180  # for the tests of one mutation


@dataclass(frozen=True)
class Mutation:
    file: str
    line: str  # whole, as it stands in the file
    number: int  # which of the lines with this text, from 0
    mutated: str

    def __str__(self) -> str:
        return f"{self.file}: {self.line.strip()}  →  {self.mutated.strip()}"

    def applied(self, text: str) -> str | None:
        """The file with the mutation; None where its line is not there."""
        lines = text.splitlines(keepends=True)
        places = [i for i, line in enumerate(lines) if line.rstrip("\n") == self.line]
        if len(places) <= self.number:
            return None
        lines[places[self.number]] = self.mutated + "\n"
        return "".join(lines)


def place(tree: Path, mutation: Mutation) -> Path | None:
    """The file of ``tree`` that has the mutation's line; None where none has it, or several and none by its name."""
    named = tree / mutation.file
    having = [file for file in (tree / "megatron_rl").rglob("*.py") if mutation.applied(file.read_text()) is not None]
    if named in having:
        return named
    for files in ([file for file in having if file.name == named.name], having):
        if len(files) == 1:
            return files[0]
    return None


def changed(node: ast.AST) -> ast.AST | None:
    """``node`` with one thing changed; None where there is nothing to change."""
    new = copy.deepcopy(node)
    match new:
        case ast.Compare(ops=[op, *_]) if type(op) in COMPARISONS:
            new.ops[0] = COMPARISONS[type(op)]()
        case ast.BinOp(op=op, left=left) if type(op) in ARITHMETIC and not isinstance(
            left, ast.Constant | ast.JoinedStr
        ):
            new.op = ARITHMETIC[type(op)]()
        case ast.BoolOp(op=op):
            new.op = ast.Or() if isinstance(op, ast.And) else ast.And()
        case ast.UnaryOp(op=ast.Not()):
            return new.operand
        case ast.Constant(value=bool(value)):
            new.value = not value
        case ast.Constant(value=int(value)):
            new.value = value + 1
        case ast.Call(func=ast.Name(id=name)) if name in OTHER_NAMES:
            new.func.id = OTHER_NAMES[name]
        case ast.Expr(value=ast.Call()):
            return ast.Pass()
        case _:
            return None
    return new


def executed(node: ast.AST) -> Iterator[ast.AST]:
    """What runs when functions are called: without annotations, decorators, defaults and messages."""
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "args") and not isinstance(node, ast.Call):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not isinstance(child, ast.JoinedStr | ast.Raise | ast.Assert):
                yield child
                yield from executed(child)


def possible(path: Path) -> list[Mutation]:
    text = path.read_text()
    lines = text.splitlines()
    mutations = {}
    for function in ast.walk(ast.parse(text)):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        for node in executed(function):
            if getattr(node, "lineno", 0) != getattr(node, "end_lineno", -1) or (new := changed(node)) is None:
                continue
            line = lines[node.lineno - 1]
            if not line.isascii():
                continue  # columns are counted in bytes
            piece = f"({ast.unparse(new)})" if isinstance(node, ast.expr) else ast.unparse(new)
            mutated = line[: node.col_offset] + piece + line[node.end_col_offset :]
            number = sum(other == line for other in lines[: node.lineno - 1])
            mutations[node.lineno, node.col_offset, mutated] = Mutation(
                str(path.relative_to(ROOT)), line, number, mutated
            )
    return list(mutations.values())


def room(file: str) -> str:
    parts = Path(file).parts
    return parts[1] if len(parts) > 2 else "(top)"


def make() -> list[Mutation]:
    """The list, drawn by the seed: of every room a share by its possible mutations, and at least `LEAST`."""
    rooms: dict[str, list[Mutation]] = defaultdict(list)
    for path in sorted((ROOT / "megatron_rl").rglob("*.py")):
        rooms[room(str(path.relative_to(ROOT)))] += possible(path)
    rooms = {name: places for name, places in rooms.items() if len(places) >= LEAST}
    total, left = sum(map(len, rooms.values())), NUMBER - LEAST * len(rooms)
    shares = {name: LEAST + left * len(places) // total for name, places in rooms.items()}
    for name in sorted(rooms, key=lambda name: -len(rooms[name]))[: NUMBER - sum(shares.values())]:
        shares[name] += 1
    draw = random.Random(SEED)
    return [mutation for name in sorted(rooms) for mutation in draw.sample(rooms[name], shares[name])]


class Tests:
    """Unit test files of a tree by how near they are to a module of the package."""

    def __init__(self, tree: Path) -> None:
        self.tree, self._imports = tree, {}
        self._costs = order_by(ROOT / ".cache" / "test-costs.json")
        self._files = sorted((tree / "tests" / "unit").rglob("test_*.py"))
        self._near: dict[str, list[tuple[int, str]]] = defaultdict(list)  # module → distance and file of tests
        for file in self._files:
            for module, distance in self._distances(file).items():
                self._near[module].append((distance, str(file.relative_to(tree))))

    def _imported(self, path: Path) -> set[Path]:
        if path not in self._imports:
            imported = set()
            for node in ast.walk(ast.parse(path.read_text())):
                names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                if isinstance(node, ast.ImportFrom) and node.module:
                    names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
                for name in names:
                    if name.split(".")[0] in ("megatron_rl", "tests", "tools"):
                        base = self.tree.joinpath(*name.split("."))
                        imported |= {file for file in (base.with_suffix(".py"), base / "__init__.py") if file.is_file()}
            self._imports[path] = imported
        return self._imports[path]

    def _distances(self, file: Path) -> dict[str, int]:
        distances, queue = {file: 0}, deque([file])
        while queue:
            path = queue.popleft()
            for other in self._imported(path) - distances.keys():
                distances[other] = distances[path] + 1
                queue.append(other)
        return {str(path.relative_to(self.tree)): distance for path, distance in distances.items()}

    def nearest(self, module: str, most: int) -> list[str]:
        """Nearest first: named after the module, in its room, by distance of imports."""
        stem, its_room = Path(module).stem, f"tests/unit/{room(module)}/"
        ranked = sorted(
            (stem not in file, distance, not file.startswith(its_room), file) for distance, file in self._near[module]
        )
        cheap = [file for *_, file in ranked if self._costs.get(file, 0.0) < DEAR_S]
        return cheap[:most]


def copy_of(commit: str | None, folder: Path) -> Path:
    """The files of ``commit``, or of the working tree, below ``folder``; environment and cache are linked."""
    listed = ["git", "archive", commit] if commit else ["tar", "-c", "--null", "-T", "-"]
    names = b""
    if commit is None:
        names = subprocess.run(
            ["git", "ls-files", "-z", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, check=True
        ).stdout
        names = b"\0".join(name for name in names.split(b"\0") if name and (ROOT / os.fsdecode(name)).is_file())
    archive = subprocess.run(listed, cwd=ROOT, input=names, capture_output=True, check=True).stdout
    subprocess.run(["tar", "-x", "-C", str(folder)], input=archive, check=True)
    for name in (".venv", ".cache"):
        if (ROOT / name).exists():
            (folder / name).symlink_to((ROOT / name).resolve())
    return folder


def fails(tree: Path, tests: list[str], log: Path) -> bool | None:
    """Whether a test of ``tests`` fails in ``tree``; None where they take longer than the limit."""
    pid = os.fork()
    if pid == 0:
        status = 2
        try:
            os.setpgid(0, 0)
            output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(output, 1)
            os.dup2(output, 2)
            os.chdir(tree)
            os.environ |= {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
            sys.path[:] = [str(tree), *(path for path in sys.path if path not in ("", str(ROOT)))]
            sys.dont_write_bytecode = True
            for name in [name for name in sys.modules if name.split(".")[0] in ("megatron_rl", "tests", "tools")]:
                del sys.modules[name]
            import pytest

            status = int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-m", "not slow", *tests]))
        finally:
            os._exit(status)
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status) not in (0, 5)  # 5: all tests of the files are slow ones
        time.sleep(0.05)
    os.killpg(pid, 9)
    os.waitpid(pid, 0)
    return None


def run(out: Path, commit: str | None, most: int, seconds: float) -> int:
    mutations = [Mutation(**entry) for entry in json.loads(LIST.read_text())]
    random.Random(SEED).shuffle(mutations)  # a part of the list is a sample of all rooms
    done = (
        {Mutation(**json.loads(line)["mutation"]) for line in out.read_text().splitlines()} if out.exists() else set()
    )
    for name in LIBRARIES:
        __import__(name)
    end = time.monotonic() + seconds
    with tempfile.TemporaryDirectory(prefix="mutate-") as name:
        tree = copy_of(commit, Path(name))
        tests, clean = Tests(tree), {}
        for mutation in mutations:
            if mutation in done or time.monotonic() > end:
                continue
            start, file = time.monotonic(), place(tree, mutation)
            files = tests.nearest(str(file.relative_to(tree)), most) if file else []
            outcome = "absent" if file is None else "no tests" if not files else ""
            if not outcome:
                text = file.read_text()
                file.write_text(mutation.applied(text))
                failed = fails(tree, files, out.with_suffix(".log"))
                file.write_text(text)
                outcome = {True: "caught", False: "survived", None: "caught by the time limit"}[failed]
            if outcome == "caught":  # and do these tests pass without it?
                key = tuple(files)
                if key not in clean:
                    clean[key] = fails(tree, files, out.with_suffix(".log")) is False
                outcome = outcome if clean[key] else "tests fail anyway"
            entry = {
                "mutation": asdict(mutation),
                "outcome": outcome,
                "tests": files,
                "seconds": round(time.monotonic() - start, 1),
            }
            with out.open("a") as lines:
                lines.write(json.dumps(entry) + "\n")
            print(f"{outcome:24} {entry['seconds']:6.1f} s  {mutation}", flush=True)
    return 0


def table(files: list[Path]) -> int:
    """By room: how many were caught of those that ran; then the survivors of the last file."""
    records = [
        {Mutation(**one["mutation"]): one["outcome"] for one in map(json.loads, file.read_text().splitlines())}
        for file in files
    ]
    mutations = [Mutation(**entry) for entry in json.loads(LIST.read_text())]
    counted = ("caught", "caught by the time limit", "survived", "no tests")
    for name in [*sorted({room(mutation.file) for mutation in mutations}), "all"]:
        cells = []
        for outcomes in records:
            its = [o for m, o in outcomes.items() if (name in (room(m.file), "all")) and o in counted]
            cells.append(f"{sum(o.startswith('caught') for o in its):4} of {len(its):4}")
        print(f"{name:14}" + "".join(f"{cell:>16}" for cell in cells))
    for outcomes in records:
        print("  ".join(f"{outcome}: {count}" for outcome, count in Counter(outcomes.values()).most_common()))
    for mutation, outcome in records[-1].items():
        if outcome in ("survived", "no tests"):
            print(f"{outcome}: {mutation}")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--make", action="store_true", help="draw the list anew")
    parser.add_argument("--out", type=Path, metavar="FILE", help="results, one a line; what is there is not run again")
    parser.add_argument("--commit", help="mutate this commit (default: the working tree)")
    parser.add_argument("--files", type=int, default=4, help="most files of tests for a mutation (default 4)")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no mutation after so long")
    parser.add_argument("--table", type=Path, nargs="+", metavar="FILE", help="compare results")
    options = parser.parse_args()
    if options.make:
        lines = ",\n".join(json.dumps(asdict(mutation), ensure_ascii=False) for mutation in make())
        LIST.write_text(f"[\n{lines}\n]\n")
        return 0
    if options.table:
        return table(options.table)
    if not options.out:
        parser.error("give one of --make, --out and --table")
    return run(options.out, options.commit, options.files, options.seconds)


if __name__ == "__main__":
    sys.exit(main())
