"""How many workers the suite takes, what each of them runs (pytest-xdist; `make test` asks for it), and Hypothesis."""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, settings

# A property holds or it does not, however slow the machine: no limit on the time of an example or of drawing it.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")

GIB_PER_WORKER = 5  # an engine, four ranks of the tiny model and what they were forked from
USEFUL_WORKERS = 12  # the longest file bounds the time of the suite: more would wait for it
# Tests of these folders share what is costly or there once on a machine: a cluster, the run without faults.
TOGETHER = ("tests/slurm/", "tests/reliability/")
# What takes longest comes first, so that workers end together; files of other folders follow.
FIRST = ("tests/slurm/", "tests/e2e/", "tests/parallel/", "tests/reliability/", "tests/patches/")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """One worker a core as far as memory goes; 0, which is this process alone, where that would be one."""
    cores = len(os.sched_getaffinity(0))
    gib = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    workers = min(cores, int(gib // GIB_PER_WORKER), USEFUL_WORKERS)
    return workers if workers > 1 else 0


def unit_of(nodeid: str) -> str:
    """Tests of one unit run in one worker, in their order: a file, whose fixtures they share, or a folder."""
    file = nodeid.partition("::")[0]
    return next((folder for folder in TOGETHER if file.startswith(folder)), file)


def rank_of(unit: str) -> int:
    return next((rank for rank, folder in enumerate(FIRST) if unit.startswith(folder)), len(FIRST))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log):
    if config.getoption("dist") != "loadscope":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class Units(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return unit_of(nodeid)

        def _assign_work_unit(self, node) -> None:
            self.workqueue.move_to_end(min(self.workqueue, key=rank_of), last=False)
            super()._assign_work_unit(node)

    return Units(config, log)
