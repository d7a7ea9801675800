"""How many workers the suite takes and what each runs next, what it says meanwhile, and Hypothesis."""

from __future__ import annotations

import gc
import os
import shlex
import signal
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.support import costs, heap

# A property holds or it does not, however slow the machine: no limit on the time of an example or of drawing it.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")
# A suite under `nohup` ignores SIGHUP and so would every run that it starts: tests of that signal want it as it is.
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

GIB_PER_WORKER = 5  # an engine, four ranks of the tiny model and what they were forked from
USEFUL_WORKERS = 12  # the longest file bounds the time of the suite: more would wait for it
# Tests of these folders, and of files whose names begin so, share what is costly or there once on a machine: a cluster,
# the run without faults, a process that has imported TransformerEngine.
TOGETHER = ("tests/slurm/", "tests/reliability/", "tests/parallel/test_transformer_engine")
# One worker takes the cluster, whose tests are the longest and mostly wait; the others what is broad and quick, so that
# a fault is seen early, then what takes long, so that workers end together.
FIRST = ("tests/slurm/", "tests/unit/", "tests/e2e/", "tests/reliability/", "tests/parallel/", "tests/patches/")
STARTED = time.monotonic()
BROAD_S = costs.LONG_S  # a unit whose last measured processor time is below this counts as quick


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--costs", type=Path, metavar="FILE", help="add to FILE what each file of tests costs")


def pytest_configure(config: pytest.Config) -> None:
    gc.disable()  # what imports make stays
    path = config.getoption("costs")
    if path is None:
        return
    is_worker, has_workers = hasattr(config, "workerinput"), bool(config.getoption("numprocesses", None))
    if is_worker or not has_workers:
        config.pluginmanager.register(costs.Meter(), "meter")
    if not is_worker:
        config.pluginmanager.register(costs.Book(config.rootpath / path), "book")


def pytest_collection_finish() -> None:
    heap.hide()
    gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    manager = session.config.pluginmanager
    if book := manager.get_plugin("book"):
        if meter := manager.get_plugin("meter"):
            book.add({file: costs.asdict(cost) for file, cost in meter.costs.items()})
        book.write()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """One worker a core as far as memory goes, and one more for the cluster's tests, which wait; 0, which is this
    process alone, where there is one core, or memory for one worker."""
    cores = len(os.sched_getaffinity(0))
    gib = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    workers = min(cores + 1, int(gib // GIB_PER_WORKER), USEFUL_WORKERS)
    return workers if workers > 1 and cores > 1 else 0


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """Bytes are named by their argument: their content may hold the time at which they were made, and workers that
    collect at different seconds must agree on every name."""
    return argname if isinstance(val, bytes) else None


def unit_of(nodeid: str) -> str:
    """Tests of one unit run in one worker, in their order: a file, whose fixtures they share, or what is `TOGETHER`."""
    file = nodeid.partition("::")[0]
    return next((folder for folder in TOGETHER if file.startswith(folder)), file)


def rank_of(unit: str, measured: dict[str, float]) -> tuple[int, float]:
    """What a unit is sorted by: quick ones first, then the longest first, then by folder what nobody measured.

    Unit tests are quick unless measured otherwise.
    """
    folder = next((rank for rank, name in enumerate(FIRST) if unit.startswith(name)), len(FIRST))
    if folder == 0:
        return -1, 0.0
    seconds = measured.get(unit, BROAD_S if folder == 1 else None)
    if seconds is None:
        return folder, 0.0
    return (1, -seconds) if seconds > BROAD_S else (0, seconds)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log):
    if config.getoption("dist") != "loadscope":
        return None
    from xdist.scheduler import LoadScopeScheduling

    measured: dict[str, float] = {}
    for file, seconds in costs.order_by(config.rootpath / (config.getoption("costs") or costs.COSTS)).items():
        measured[unit_of(file)] = measured.get(unit_of(file), 0.0) + seconds

    class Units(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return unit_of(nodeid)

        def _assign_work_unit(self, node) -> None:
            following = min(self.workqueue, key=lambda unit: rank_of(unit, measured))
            self.workqueue.move_to_end(following, last=False)
            say(config, f"{node.gateway.id}: {following} ({len(self.workqueue[following])} tests)")
            super()._assign_work_unit(node)

    return Units(config, log)


def say(config: pytest.Config, line: str) -> None:
    """A line of its own on the terminal, with the time since the start."""
    if reporter := config.pluginmanager.get_plugin("terminalreporter"):
        minutes, seconds = divmod(int(time.monotonic() - STARTED), 60)
        reporter.ensure_newline()
        reporter.write_line(f"{minutes:3}:{seconds:02} {line}")


def how_to_repeat(nodeid: str) -> str:
    return f"OMP_NUM_THREADS=1 .venv/bin/python -m pytest {shlex.quote(nodeid)}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo):
    report = yield
    if report.failed:
        report.sections.append(("this test alone", how_to_repeat(item.nodeid)))
    return report


@pytest.hookimpl(trylast=True)
def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Say at once what failed where workers run the tests; without workers pytest's own lines name the file."""
    if report.failed and hasattr(report, "node"):
        say(report.node.config, f"FAILED ({report.when}) {report.nodeid}\n       {how_to_repeat(report.nodeid)}")
