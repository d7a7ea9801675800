"""How the suite is spread over workers: on a small suite with the same conftest."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.support.patience import PATIENCE_S
from tests.support.tiny import REPOSITORY

TEST = """
import os, pytest

@pytest.mark.parametrize("number", range(3))
def test_where(number):
    with open(os.environ["FOUND"], "a") as file:
        file.write(f"{__name__.rpartition('.')[2]} {os.environ.get('PYTEST_XDIST_WORKER')}\\n")
"""


def workers_of(folder: Path, cores: set[int]) -> dict[str, set[str]]:
    """Test module → the workers that ran its tests."""
    for room in ("slurm", "unit"):
        (folder / "tests" / room).mkdir(parents=True)
        for name in ("a", "b"):
            (folder / "tests" / room / f"test_{room}_{name}.py").write_text(TEST)
    shutil.copy(REPOSITORY / "tests" / "conftest.py", folder / "tests")
    (folder / "tests" / "support").symlink_to(REPOSITORY / "tests" / "support")  # the conftest imports from there
    shutil.copy(REPOSITORY / "pyproject.toml", folder)
    command = [sys.executable, "-m", "pytest", "-q", "--numprocesses", "auto", "--dist", "loadscope"]
    done = subprocess.run(
        [*command, "-p", "no:cacheprovider"],
        cwd=folder,
        env={**os.environ, "FOUND": str(folder / "found"), "PYTHONPATH": ""},
        preexec_fn=lambda: os.sched_setaffinity(0, cores),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "12 passed" in done.stdout.splitlines()[-1]
    workers_of_file: dict[str, set[str]] = {}
    for line in (folder / "found").read_text().splitlines():
        name, worker = line.split()
        workers_of_file.setdefault(name, set()).add(worker)
    return workers_of_file


def test_a_file_has_one_worker_and_so_has_the_folder_of_the_cluster(tmp_path, monkeypatch):
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    cores = os.sched_getaffinity(0)
    by_file = workers_of(tmp_path, cores)
    assert len(by_file) == 4
    assert all(len(workers) == 1 for workers in by_file.values())
    assert by_file["test_slurm_a"] == by_file["test_slurm_b"]
    gib = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    assert (len(set.union(*by_file.values())) > 1) == (len(cores) > 1 and gib >= 10)


def test_one_core_has_no_workers(tmp_path, monkeypatch):
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    workers = workers_of(tmp_path, {min(os.sched_getaffinity(0))})
    assert set.union(*workers.values()) == {"None"}
