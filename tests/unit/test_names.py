"""Every module's test is found by its name: test_MODULE.py or test_MODULE_subject.py, in the folder of its room."""

from __future__ import annotations

from fnmatch import fnmatch
from functools import cache
from pathlib import Path

import pytest

from tests.support.tiny import REPOSITORY

PACKAGE, TESTS = REPOSITORY / "megatron_rl", REPOSITORY / "tests"
MODULES = {
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts): path
    for path in PACKAGE.rglob("*.py")
    if path.stem not in ("__init__", "__main__")
}
FILES = sorted(path.relative_to(TESTS) for path in TESTS.rglob("test_*.py"))
DOORS = {
    "commands": ("*.command",),
    "instruments.convert": ("checkpoint.conversion",),
    "instruments.parity": ("instruments.parity.*",),
    "instruments.translate.rules": ("instruments.translate.objective_rules", "instruments.translate.translation"),
    "exact.kernels": ("exact.kernel_ops", "exact.kernels.*"),
    "learner.learner": ("learner.passes",),
    "model.families": ("model.families.*",),
    "rewards.math_task": tuple(
        f"rewards.{part}" for part in ("atoms", "forms", "grammar", "latex", "phrases", "tree", "units")
    ),
    "rollout.servers.client": ("rollout.servers.rendezvous",),
    "rollout.vllm_engine": ("rollout.worker_extension",),
    "run.prepare": ("learner.compare_logits",),
    "train": ("evaluate",),
}
"""Module or folder → modules behind it, * for all of a folder: tests reach them through it."""


def is_named(test: Path, module: str) -> bool:
    """Whether the file ``test`` (from the folder of tests) is named after ``module``.

    A test under unit/ stands in the folder of the module's room or in one above it. Other tests are of several rooms.
    """
    *rooms, name = module.split(".")
    subject = f"{test.stem.removeprefix('test_')}_"
    names = [name, "_".join([*rooms[-1:], name])]
    if not any(subject.startswith(f"{each}_") for each in names):
        return False
    folder = list(test.parts[:-1])
    return folder[0] != "unit" or (folder[1:] == rooms[: len(folder) - 1] and (len(folder) > 1 or not rooms))


@cache
def named_after(module: str) -> list[Path]:
    return [test for test in FILES if is_named(test, module)]


def stands_behind(module: str) -> bool:
    return any(fnmatch(module, pattern) for patterns in DOORS.values() for pattern in patterns)


def test_every_module_has_a_test_of_its_name_or_stands_behind_a_door():
    assert sorted(module for module in MODULES if not named_after(module) and not stands_behind(module)) == []


@pytest.mark.parametrize("pattern", [pattern for patterns in DOORS.values() for pattern in patterns])
def test_what_stands_behind_a_door_exists_and_has_no_test_of_its_own(pattern):
    hidden = [module for module in MODULES if fnmatch(module, pattern)]
    assert hidden != []
    assert "*" in pattern or [module for module in hidden if named_after(module)] == []


@pytest.mark.parametrize("door", DOORS)
def test_a_door_has_a_test_of_its_name(door):
    assert named_after(door) != []
    assert door in MODULES or PACKAGE.joinpath(*door.split(".")).is_dir()


@pytest.mark.parametrize(
    ("test", "module", "is_one"),
    [
        ("unit/run/test_lock.py", "run.lock", True),
        ("unit/run/test_lock_of_a_host.py", "run.lock", True),
        ("unit/run/test_locks.py", "run.lock", False),
        ("unit/data/test_lock.py", "run.lock", False),
        ("unit/test_lock.py", "run.lock", False),
        ("unit/test_batch.py", "batch", True),
        ("unit/instruments/test_why.py", "instruments.why.why", True),
        ("unit/instruments/plan/test_report.py", "instruments.plan.report", True),
        ("unit/instruments/lab/test_report.py", "instruments.plan.report", False),
        ("parallel/test_run_lock.py", "run.lock", True),
        ("e2e/test_lock.py", "run.lock", True),
    ],
)
def test_what_a_file_is_named_after(test, module, is_one):
    assert is_named(Path(test), module) == is_one
