"""Runs in processes of their own, and the run without faults that every other must reproduce."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.written_run import without_times
from tests.support.zygote import Child, surroundings, zygote
from tools.dev.make_tiny_checkpoint import build_model, build_tiny_config, save_checkpoint

# What a machine of a user may hold, and no run may write down.
SECRETS = {"HF_TOKEN": "do-not-write-this", "VLLM_API_KEY": "do-not-write-this"}


@dataclass
class Ended:
    """How a run ended. ``status`` is negative where a signal did it."""

    status: int
    output: str  # stdout and stderr

    @property
    def last_line(self) -> str:
        return self.output.strip().splitlines()[-1] if self.output.strip() else ""


class Runs:
    """Runs below one folder, by name, of the smallest model."""

    def __init__(self, root: Path) -> None:
        self.root, self.model, self._count = root, root / "smallest-model", 0
        save_checkpoint(build_model(build_tiny_config(size="nano")), self.model)

    def start(self, name: str, *overrides: str, **keywords: Any) -> Child:
        self._count += 1
        overrides = (f"model.path={self.model}", *overrides)
        call = {"root": str(self.root), "name": name, "overrides": overrides, **keywords}
        log = self.root / f"child-{self._count}.log"
        return zygote().start("tests.reliability.programs", "train", call, log=log, env={**surroundings(), **SECRETS})

    def end(self, child: Child) -> Ended:
        """Wait for it."""
        return Ended(child.wait(), child.output)

    def train(self, name: str, *overrides: str, expect: int = 0, **keywords: Any) -> Ended:
        ended = self.end(self.start(name, *overrides, **keywords))
        assert ended.status == expect, ended.output[-4000:]
        return ended

    def rows(self, name: str) -> list[dict]:
        """Lines of metrics.jsonl without what a clock put there."""
        lines = (self.root / name / "metrics.jsonl").read_text().splitlines()
        return without_times([json.loads(line) for line in lines])

    def checkpoints(self, name: str) -> list[str]:
        return sorted(path.name for path in (self.root / name / "checkpoints").iterdir())

    def files(self, name: str) -> dict[str, bytes]:
        """Everything in the run directory but the lock, by its path there."""
        paths = (path for path in (self.root / name).rglob("*") if path.is_file() and path.name != "LOCK")
        return {str(path.relative_to(self.root / name)): path.read_bytes() for path in paths}

    def tensors(self, name: str, step: int = 7) -> dict[str, bytes]:
        """Files with the tensors of the checkpoint of ``step``: weights, Adam's moments, fp32 masters."""
        files = self.files(name)
        return {path: data for path, data in files.items() if f"step_{step:08d}/" in path and path.endswith(".distcp")}

    def log(self, name: str) -> str:
        return (self.root / name / "log.txt").read_text()


@pytest.fixture(scope="package")
def runs(tmp_path_factory) -> Runs:
    runs = Runs(tmp_path_factory.mktemp("reliability"))
    runs.train("whole")
    return runs


@pytest.fixture(scope="package")
def whole(runs) -> list[dict]:
    """The lines of the run that nothing happened to."""
    return runs.rows("whole")
