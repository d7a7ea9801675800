"""What each file of tests costs: tests, seconds, seconds of all processors, engines and other processes started.

    python -m pytest --costs=.cache/test-costs.json …      measure (`make test` and `make test-all` do)
    python -m tests.support.costs                          print the table, dearest file first (`make test-costs`)
    python -m tests.support.costs --ship                   keep the long files' seconds for clones that measured nothing

Processor time is that of the worker and of every process below it, so it does not depend on who else uses the machine.
Engines are those of vLLM that start in the worker or in a process that its helper (support.zygote) forked; a command in
an interpreter of its own is not seen. The order of the next run follows these measurements (tests/conftest.py).
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest

COSTS = Path(".cache/test-costs.json")
SHIPPED = Path(__file__).with_name("long_files.json")  # file of tests → processor seconds, where they are many
LONG_S = 5.0
STARTS = "TEST_STARTS"  # environment: the file to which every start of a process or an engine adds a letter
ENGINE, PROCESS = "e", "p"
ENGINE_MODULE = "vllm.v1.engine.core"


@dataclass
class Cost:
    tests: int = 0
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    engines: int = 0
    processes: int = 0

    def __add__(self, other: Cost) -> Cost:
        return Cost(*(a + b for a, b in zip(asdict(self).values(), asdict(other).values(), strict=True)))

    def __sub__(self, other: Cost) -> Cost:
        return Cost(*(a - b for a, b in zip(asdict(self).values(), asdict(other).values(), strict=True)))


def load(path: Path) -> dict[str, Cost]:
    """File of tests → its cost when it last ran; empty where nothing was measured or the file cannot be read."""
    try:
        return {name: Cost(**cost) for name, cost in json.loads(path.read_text()).items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def order_by(path: Path) -> dict[str, float]:
    """File of tests → its processor seconds: those that ``path`` has, else the shipped ones."""
    known = {file: cost.cpu_seconds for file, cost in load(path).items()}
    return json.loads(SHIPPED.read_text()) | known


def ship(costs: dict[str, Cost]) -> None:
    """Write `SHIPPED`."""
    long = {file: round(cost.cpu_seconds) for file, cost in sorted(costs.items()) if cost.cpu_seconds >= LONG_S}
    SHIPPED.write_text(json.dumps(long, indent=1) + "\n")


def note_start(kind: str) -> None:
    """Count one start in the file that the environment names, if it names one."""
    if path := os.environ.get(STARTS):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.write(descriptor, kind.encode())
        os.close(descriptor)


class _EngineCounter:
    """An import hook: engines of vLLM count themselves from the moment that their module is imported."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != ENGINE_MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        run = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            run(module)
            start = module.EngineCore.__init__

            def counted(engine: Any, *args: Any, **keywords: Any) -> None:
                note_start(ENGINE)
                start(engine, *args, **keywords)

            module.EngineCore.__init__ = counted

        spec.loader.exec_module = exec_module
        return spec


def count_engines() -> None:
    """Count the engines of this process and of those that it forks, where the environment asks for it."""
    if os.environ.get(STARTS) and not any(isinstance(finder, _EngineCounter) for finder in sys.meta_path):
        sys.meta_path.insert(0, _EngineCounter())


def processor_seconds(root: int) -> float:
    """User and system time of process ``root`` and all below it, those that have ended included."""
    own, below = {}, defaultdict(list)
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                fields = Path("/proc", entry, "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue  # ended meanwhile
            own[int(entry)] = sum(map(int, fields[11:15]))
            below[int(fields[1])].append(int(entry))
    total, left = 0, [root]
    while left:
        process = left.pop()
        total += own.get(process, 0)
        left += below[process]
    return total / os.sysconf("SC_CLK_TCK")


class Meter:
    """The plugin of a worker, or of a run in one process: one `Cost` a file, sent to whoever writes them."""

    def __init__(self) -> None:
        descriptor, self._starts = tempfile.mkstemp(prefix="test-starts-")
        os.close(descriptor)
        os.environ[STARTS] = self._starts
        count_engines()
        self.costs: dict[str, Cost] = {}
        self._before, self._tests = self._now(), 0

    def _now(self) -> Cost:
        starts = Path(self._starts).read_text()
        cpu = processor_seconds(os.getpid())
        return Cost(0, time.monotonic(), cpu, starts.count(ENGINE), starts.count(PROCESS))

    def pytest_collection_finish(self) -> None:
        self._before = self._now()  # imports are nobody's

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None):
        result = yield
        self._tests += 1
        file = item.nodeid.partition("::")[0]
        if nextitem is None or nextitem.nodeid.partition("::")[0] != file:
            now = self._now()
            spent = now - self._before
            spent.tests = self._tests
            self.costs[file] = self.costs.get(file, Cost()) + spent
            self._before, self._tests = now, 0
        return result

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        os.environ.pop(STARTS, None)
        Path(self._starts).unlink(missing_ok=True)
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput["costs"] = {file: asdict(cost) for file, cost in self.costs.items()}


class Book:
    """The plugin of the process that the user started: what all workers measured, added to the file of costs."""

    def __init__(self, path: Path) -> None:
        self.path, self.costs = path, {}

    def add(self, costs: dict[str, Any]) -> None:
        for file, cost in costs.items():
            self.costs[file] = self.costs.get(file, Cost()) + Cost(**cost)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self.add(getattr(node, "workeroutput", {}).get("costs", {}))

    def write(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        known = load(self.path) | self.costs
        part = self.path.with_suffix(".part")
        part.write_text(json.dumps({file: asdict(cost) for file, cost in sorted(known.items())}, indent=1) + "\n")
        part.replace(self.path)


def main() -> None:
    parser = argparse.ArgumentParser(description="Print what each file of tests cost when it last ran.")
    parser.add_argument("--costs", type=Path, default=COSTS, help=f"the measurements (default {COSTS})")
    parser.add_argument("--by", choices=Cost.__dataclass_fields__, default="cpu_seconds", help="what to sort by")
    parser.add_argument("--ship", action="store_true", help=f"write {SHIPPED.name} of them and print nothing")
    arguments = parser.parse_args()
    costs = load(arguments.costs)
    if not costs:
        parser.error(f"{arguments.costs} has no measurements: `make test` or `make test-all` writes them")
    if arguments.ship:
        ship(costs)
        return
    rows = sorted(costs.items(), key=lambda row: getattr(row[1], arguments.by), reverse=True)
    for name, cost in [*rows, ("all", sum(costs.values(), Cost()))]:
        print(
            f"{cost.cpu_seconds:8.1f} CPU s {cost.seconds:8.1f} s {cost.tests:5} tests "
            f"{cost.engines:4} engines {cost.processes:4} processes  {name}"
        )


if __name__ == "__main__":
    main()
