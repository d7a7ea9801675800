"""R4, the doctor: every check is green, each planted fault is red, and how long each takes."""

from __future__ import annotations

import os
from functools import partial
from typing import Any
from unittest import mock

from megatron_rl.doctor.checks import Outcome, Setting, find
from megatron_rl.doctor.frame import run_check
from tools.gpu.run import NotRun, Problem, Run

PLANTS = ("deaf", "lost_moments")
OF_ONE = (
    *("packages", "patches", "driver", "gpu-memory", "shared-memory", "open-files", "host-memory", "shared-folder"),
    *("compilers", "fp32", "attention", "experts", "checkpoint", "engine", "refit", "parity", "mismatch", "memory"),
)
OF_TWO = ("collectives", "experts", "context", "checkpoint")
FAULTS = {  # program of tests/parallel/programs/doctor.py → its ranks and the check that is to fail
    "unmarked_experts": (2, "experts"),
    "lost_keys": (2, "context"),
    "lost_moments": (2, "checkpoint"),
    "corrupted_update": (1, "refit"),
    "stale_engine": (1, "refit"),
    "other_logprobs": (1, "mismatch"),
}
REHEARSED = {"fp32, 1 rank", "checkpoint, 2 ranks", "planted lost_moments"}  # the others are doctor's own tests


def main(run: Run) -> None:
    parts = [(f"{name}, 1 rank", partial(check, run, name, 1)) for name in OF_ONE]
    # What needs no engine comes first: a start takes half a minute.
    parts[11:11] = [(f"{name}, 2 ranks", partial(check, run, name, 2)) for name in OF_TWO]
    parts[15:15] = [(f"planted {name}", partial(planted, run, name)) for name in FAULTS if FAULTS[name][0] == 2]
    parts += [(f"planted {name}", partial(planted, run, name)) for name in FAULTS if FAULTS[name][0] == 1]
    for name, function in parts:
        if not run.rehearse or name in REHEARSED:
            run.part(name, function)


def setting(run: Run, ranks: int) -> Setting:
    return Setting(run.device, ranks, str(run.folder), scratch=str(run.folder))


def check(run: Run, name: str, ranks: int) -> dict[str, Any]:
    """One check as `megatron-rl doctor` runs it. With a planted fault, the ranks that `planted` would have."""
    if FAULTS.get(run.plant, (0, ""))[::-1] == (name, ranks):
        outcome = in_ranks(run, run.plant)
    else:
        with mock.patch.dict(os.environ, run.shared()):
            outcome = run_check(find(name), setting(run, ranks), run.left).outcome
    if outcome.status == "not run":
        raise NotRun(outcome.reason)
    if outcome.status == "fail":
        raise Problem(outcome.reason)
    return {"said": outcome.reason, "figures": outcome.figures}


def planted(run: Run, name: str) -> dict[str, Any]:
    """A fault, of which the check has to tell. The script's own fault `deaf` leaves it out."""
    ranks, about = FAULTS[name]
    deaf = run.plant == "deaf"
    outcome = in_ranks(run, "healthy", name=about, ranks=ranks) if deaf else in_ranks(run, name)
    if outcome.status != "fail":
        raise Problem(f"the check {about} is {outcome.status}: {outcome.reason}")
    return {"said": outcome.reason}


def in_ranks(run: Run, program: str, ranks: int = 0, **arguments: Any) -> Outcome:
    ranks = ranks or FAULTS[program][0]
    job = (f"tests.parallel.programs.doctor.{program}", {"setting": setting(run, ranks), **arguments})
    with mock.patch.dict(os.environ, find("checkpoint").environment):
        return run.ranks(ranks, {"check": job}, 180, plant="").whole()[0]["check"]
