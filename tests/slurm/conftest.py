"""One cluster for all Slurm tests, and a place to submit from whose path holds a space."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.slurm.cluster import PACKAGES, Cluster, Job, missing_programs
from tests.support.debian import install
from tests.support.tiny import REPOSITORY


@dataclass
class Site:
    """Where a user submits from. ``repo`` is the checkout, through a link with a space in its path."""

    cluster: Cluster
    folder: Path
    repo: Path
    programs: Path

    @property
    def runs(self) -> Path:
        return self.folder / "the runs"

    def settings(self, name: str, *overrides: str) -> list[str]:
        """``--set`` arguments for a run of seconds; overrides come last."""
        values = [f"name={name}", f"run_root={self.runs}", "runtime.device=cpu", "batch.prompts=2"]
        values += ["rollout.num_samples=4", "validation.every=0", "checkpoint.every=0", "monitor.plots=false"]
        values += ["rollout.verify_refit=false"]  # a second at every start; test_vllm_engine.py is about it
        return [argument for value in (*values, *overrides) for argument in ("--set", value)]

    def submit(self, script: str, *arguments: str, options: tuple[str, ...] = ("--nodes=2",), **env: str) -> Job:
        """``sbatch repo/slurm/<script> <arguments>`` from the folder above, by relative paths."""
        path = Path(self.repo.name) / "slurm" / script
        return self.cluster.submit(path, *arguments, cwd=self.folder, options=options, **self.environment(**env))

    def environment(self, **env: str) -> dict[str, str]:
        values = {"MRL_PYTHON": str(self.python), "MRL_MIN_FREE_GIB": "1", "MRL_RANKS_PER_NODE": "1"}
        values["MRL_NETWORK_MIB"] = "0"  # costs every job two imports of torch; what is about it asks for it
        values |= {"PATH": f"{self.programs}{os.pathsep}{self.cluster.environment['PATH']}", **env}
        return {name: value for name, value in values.items() if value}

    @property
    def python(self) -> Path:
        """Python, whose `check` leaves out the comparison with transformers: it would take half of a job's time."""
        path = self.programs / "quick python"
        if not path.exists():  # a job may be reading it
            without = 'case "$*" in "-m megatron_rl check "*) set -- "$@" --no-transformers ;; esac'
            self.program(path.name, f'{without}\nexec {sys.executable} "$@"\n')
        return path

    def program(self, name: str, text: str) -> Path:
        """A program that jobs find before any other of that name."""
        path = self.programs / name
        path.write_text(f"#!/usr/bin/env bash\n{text}")
        path.chmod(0o755)
        return path

    def ahead_of(self, name: str, text: str) -> None:
        """Jobs run ``text`` before the cluster's program ``name``, which gets the arguments that it leaves."""
        self.program(name, f'{text}exec {shutil.which(name, path=self.cluster.environment["PATH"])} "$@"\n')

    def attempts(self, run: str) -> list[Path]:
        return sorted(path for path in (self.runs / run / "slurm").iterdir() if path.is_dir() and not path.is_symlink())


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    if missing_programs():
        install(PACKAGES)
    if missing := missing_programs():
        pytest.skip(f"no {', '.join(missing)}: Debian's {' '.join(PACKAGES)} could not be installed")
    # pytest's own folders have paths too long for a unix socket.
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))
    with Cluster(folder) as cluster:
        yield cluster
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def site(cluster) -> Iterator[Site]:
    folder = Path(tempfile.mkdtemp(prefix="a user's ", dir=cluster.folder))
    repo, programs = folder / "my checkout", folder / "bin"
    repo.symlink_to(REPOSITORY)
    programs.mkdir()
    yield Site(cluster, folder, repo, programs)
    cluster.end_jobs()  # of a test that failed
