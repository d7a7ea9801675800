"""One helper process for all tests of this folder, and the run without faults that every other must reproduce."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.reliability.zygote import Child, Ended, Zygote


class Runs:
    """Runs below one folder, by name."""

    def __init__(self, zygote: Zygote, root: Path) -> None:
        self.zygote, self.root = zygote, root

    def start(self, name: str, *overrides: str, **keywords: Any) -> Child:
        return self.zygote.start("train", root=str(self.root), name=name, overrides=overrides, **keywords)

    def train(self, name: str, *overrides: str, expect: int = 0, **keywords: Any) -> Ended:
        ended = self.start(name, *overrides, **keywords).wait()
        assert ended.status == expect, ended.output[-4000:]
        return ended

    def rows(self, name: str) -> list[dict]:
        """Lines of metrics.jsonl without what a clock put there."""
        lines = (self.root / name / "metrics.jsonl").read_text().splitlines()
        rows = [json.loads(line) for line in lines]
        return [{k: v for k, v in row.items() if not k.startswith("perf/") and k != "time"} for row in rows]

    def checkpoints(self, name: str) -> list[str]:
        return sorted(path.name for path in (self.root / name / "checkpoints").iterdir())

    def log(self, name: str) -> str:
        return (self.root / name / "log.txt").read_text()


@pytest.fixture(scope="package")
def runs(tmp_path_factory) -> Iterator[Runs]:
    folder = tmp_path_factory.mktemp("reliability")
    with Zygote(folder) as zygote:
        runs = Runs(zygote, folder)
        runs.train("whole")
        yield runs


@pytest.fixture(scope="package")
def whole(runs) -> list[dict]:
    """The lines of the run that nothing happened to."""
    return runs.rows("whole")
