"""The files and folders of a run directory."""

from __future__ import annotations

import stat
from dataclasses import dataclass
from pathlib import Path

from megatron_rl.errors import InputError, printable

STOP_FILE = "STOP"  # after `touch RUN/STOP` the run saves after the current step and exits


@dataclass(frozen=True)
class RunDirectory:
    """Paths in a run directory; only `create` creates any of them."""

    root: Path

    @property
    def recipe(self) -> Path:
        """The current recipe."""
        return self.root / "recipe.resolved.yaml"

    def kept_recipe(self, number: int) -> Path:
        """Return the path of the run's ``number``-th recipe (from 1); its first line has the step where it began."""
        return self.root / f"recipe.resolved.{number}.yaml"

    def kept_recipes(self) -> list[Path]:
        """Return all recipes that the run has used, the first one first."""
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
        """A few sampled responses; see the module `samples`."""
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
        """Exists once the run is complete and holds its number of steps. A scheduler's script looks for it."""
        return self.root / "DONE"

    @property
    def lock(self) -> Path:
        """Lock file of the process that writes to this folder; see `RunLock`."""
        return self.root / "LOCK"

    def check(self) -> None:
        """Raise `InputError` if a name that the run needs is taken, such as a file in place of a folder.

        Copies (samples, log) are not checked: the run continues when they fail. So does it for metrics.jsonl, up to its
        end.
        """
        folders = (self.root, self.tensorboard, self.checkpoints, self.batches, self.plots)
        files = (self.recipe, self.environment, self.done, self.lock)
        for path in (*folders, *files, self.root / STOP_FILE):
            try:
                kind = path.stat().st_mode
            except FileNotFoundError:
                if not path.is_symlink():
                    continue
                problem = "a link to nothing"
            except OSError as error:
                problem = error.strerror or str(error)
            else:
                if stat.S_ISDIR(kind) if path in folders else stat.S_ISREG(kind):
                    continue
                problem = "a folder" if stat.S_ISDIR(kind) else "a file" if stat.S_ISREG(kind) else "a device or pipe"
            expected_kind = "folder" if path in folders else "file"
            raise InputError(
                f"run directory {self.root}: {printable(path.name)} is not the {expected_kind} that a run keeps there "
                f"({problem}); move it away, or give the run another name (--set name=…)"
            )

    def create(self) -> RunDirectory:
        """Create missing folders and return the directory itself. Only one rank calls this."""
        for folder in (self.root, self.tensorboard, self.checkpoints, self.batches, self.plots):
            folder.mkdir(parents=True, exist_ok=True)
        return self
