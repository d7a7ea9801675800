"""The checks: what each answers, and how it is run."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from megatron_rl.doctor.outcome import Outcome
from megatron_rl.doctor.setting import Setting

RanksOf = Literal["one", "node", "job"]


@dataclass(frozen=True)
class Check:
    """``function``: `module.function` of this package. ``seconds``: when the check is ended and counts as failed.

    ``ranks``: one process, one for each rank of the node, or of the job where there is one (else of the node).
    ``gpu_only``: why the check has nothing to look at without a GPU; empty: it runs without one. ``environment``:
    variables of its processes.
    """

    name: str
    question: str
    function: str
    seconds: float
    ranks: RanksOf = "one"
    gpu_only: str = ""
    environment: dict[str, str] = field(default_factory=dict)

    def load(self) -> Callable[[Setting], Outcome]:
        module, _, name = self.function.rpartition(".")
        return getattr(importlib.import_module(f"megatron_rl.doctor.{module}"), name)


CHECKS = (
    Check("packages", "Are the installed versions those that were tested?", "packages.versions", 30),
    Check("patches", "Is Megatron-Core patched?", "packages.patches", 60),
    Check("driver", "Does every GPU compute, under this driver and this torch?", "machine.driver", 120),
    Check(
        "gpu-memory",
        "Is the memory of the GPUs free?",
        "machine.gpu_memory",
        60,
        gpu_only="no GPU",
    ),
    Check("shared-memory", "Is /dev/shm large enough?", "machine.shared_memory", 30),
    Check("open-files", "May a process open enough files and sockets?", "machine.open_files", 30),
    Check("host-memory", "Does the host have the memory that a run needs?", "machine.host_memory", 60),
    Check("shared-folder", "Can the folder of runs be written, and is its clock ours?", "machine.shared_folder", 60),
)


def find(name: str) -> Check:
    return next(check for check in CHECKS if check.name == name)
