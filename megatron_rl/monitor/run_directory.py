"""Where a run keeps what: one place that knows the names."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class RunDirectory:
    """Paths below one run directory; nothing is created before `create`."""

    root: Path

    @property
    def recipe(self) -> Path:
        """The recipe in force."""
        return self.root / "recipe.resolved.yaml"

    def kept_recipe(self, number: int) -> Path:
        """The ``number``-th recipe (from 1) that was in force; its first line says from which step on."""
        return self.root / f"recipe.resolved.{number}.yaml"

    def kept_recipes(self) -> list[Path]:
        """Every recipe that was ever in force, the first one first."""
        numbers = [path.name.split(".")[2] for path in self.root.glob("recipe.resolved.*.yaml")]
        return [self.kept_recipe(number) for number in sorted(int(n) for n in numbers if n.isdigit())]

    @property
    def environment(self) -> Path:
        return self.root / "environment.json"

    @property
    def metrics(self) -> Path:
        return self.root / "metrics.jsonl"

    @property
    def samples(self) -> Path:
        """A few responses as they were sampled; see `samples`."""
        return self.root / "samples.jsonl"

    @property
    def tensorboard(self) -> Path:
        return self.root / "tensorboard"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def batches(self) -> Path:
        return self.root / "batches"

    @property
    def plots(self) -> Path:
        return self.root / "plots"

    @property
    def log(self) -> Path:
        return self.root / "log.txt"

    @property
    def done(self) -> Path:
        """There once the run is complete; holds the number of its steps. What a scheduler's script looks for."""
        return self.root / "DONE"

    @property
    def lock(self) -> Path:
        """Held by the process that writes here; see `RunLock`."""
        return self.root / "LOCK"

    def create(self) -> RunDirectory:
        """Make the folders, where they are missing; one rank calls it. Returns itself."""
        for folder in (self.root, self.tensorboard, self.checkpoints, self.batches, self.plots):
            folder.mkdir(parents=True, exist_ok=True)
        return self
