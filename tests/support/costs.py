"""What each file of tests costs: tests, seconds, seconds of all processors.

    python -m pytest --costs=.cache/test-costs.json …      measure (`make test` and `make test-all` do)
    python -m tests.support.costs                          print the table, dearest file first (`make test-costs`)
    python -m tests.support.costs --ship                   keep the long files' seconds for clones that measured nothing

Processor time is that of the worker and of every process below it, so it does not depend on who else uses the machine.
The order of the next run follows these measurements (tests/conftest.py).
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections import defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest

COSTS = Path(".cache/test-costs.json")
SHIPPED = Path(__file__).with_name("long_files.json")  # file of tests → processor seconds, where they are many
LONG_S = 5.0


@dataclass
class Cost:
    tests: int = 0
    seconds: float = 0.0
    cpu_seconds: float = 0.0

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
        self.costs: dict[str, Cost] = {}
        self._before, self._tests = self._now(), 0

    def _now(self) -> Cost:
        return Cost(0, time.monotonic(), processor_seconds(os.getpid()))

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
        print(f"{cost.cpu_seconds:8.1f} CPU s {cost.seconds:8.1f} s {cost.tests:5} tests  {name}")


if __name__ == "__main__":
    main()
