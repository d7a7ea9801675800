"""What the checks of one call have in common."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_rl.config import Recipe

TINY = "recipes/tiny/grpo.yaml"
CPU_RANKS = 2


@dataclass(frozen=True)
class Setting:
    """Passed to every process of a check as a file.

    ``ranks``: processes of a check between ranks, the node's GPUs or `CPU_RANKS`. ``shared``: a folder that all nodes
    should see. ``recipe``: what is to be run here; None: nothing in particular. ``scratch``: this check's own folder.
    """

    device: str  # "cpu" or "cuda"
    ranks: int
    shared: str
    recipe: str | None = None
    overrides: list[str] = field(default_factory=list)
    scratch: str = ""
    in_job: bool = False  # the ranks are those of a job over several nodes, one process of each at hand

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))

    @staticmethod
    def read(path: Path) -> Setting:
        return Setting(**json.loads(path.read_text()))


def tiny(setting: Setting, *overrides: str) -> Recipe:
    """The tiny recipe that ships with the package, on this setting's device, with overrides of its keys."""
    from megatron_rl.config import load_recipe

    own = (f"runtime.device={setting.device}", f"run_root={setting.scratch}/runs", "name=doctor")
    return load_recipe(TINY, [*own, *overrides])


def planned(setting: Setting) -> Recipe | None:
    """The recipe that the command named, if it did."""
    if not setting.recipe:
        return None
    from megatron_rl.config import load_recipe

    return load_recipe(setting.recipe, setting.overrides)
