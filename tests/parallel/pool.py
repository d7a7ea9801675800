"""Ranks that are started once and run one job after another: a job runs when its result is first asked for.

    with Jobs({2: {"dp2": ("train", {…})}}, module="tests.parallel.programs.learner") as runs:
        first, second = runs["dp2"]                # what each rank returned

So a test pays for the jobs that it reads and for no other, whichever tests were selected, and a fault of one job is the
fault of the tests that read it. Ranks of a number are started at its first job; they stay until the end of the block.
"""

from __future__ import annotations

import pickle
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from tests.parallel.gloo import RankFailure, launch, report_of, wait_for
from tests.support.patience import PATIENCE_S
from tests.support.zygote import Zygote, zygote

RUNNER = "tests.parallel.jobs"
Job = tuple[str, dict[str, Any]]  # function (see `jobs.run_jobs`) and its arguments


class Ranks:
    """``world_size`` ranks in a gloo group, waiting for jobs that ``runner`` runs. Other arguments as of
    `gloo.run_ranks`."""

    def __init__(
        self, world_size: int, runner: str, helper: Zygote | None = None, init_process_group: bool = True
    ) -> None:
        from megatron_rl.process.ranks import store_for_ranks

        self._store, address = store_for_ranks()
        self._folder = tempfile.TemporaryDirectory(prefix="gloo-pool-")
        self._count, self.alive = 0, True
        call = {"folder": self._folder.name}
        self._ranks, self._logs = launch(
            helper or zygote(),
            "tests.parallel.gloo",
            "serve_jobs",
            call,
            world_size,
            address,
            Path(self._folder.name),
            init_process_group,
            imports=[runner],
        )

    def run(self, module: str, function: str, arguments: dict[str, Any]) -> list[Any]:
        """What each rank returned. `RankFailure` where one raised, died or took too long; all ranks end then."""
        number, self._count = self._count, self._count + 1
        folder = Path(self._folder.name)
        folder.joinpath(f"job{number}.pkl").write_bytes(pickle.dumps((module, function, arguments)))
        self._store.set(f"job{number}", "run")
        results = [folder / f"job{number}-rank{rank}.pkl" for rank in range(len(self._ranks))]
        deadline = time.monotonic() + PATIENCE_S
        failure = wait_for(self._ranks, deadline, lambda: all(result.exists() for result in results))
        if failure is not None:
            self.end()
            rank, reason = failure
            said = report_of(self._ranks, self._logs, failure)
            raise RankFailure(f"{module}.{function} on {len(self._ranks)} ranks: rank {rank} {reason}\n{said}")
        return [pickle.loads(result.read_bytes()) for result in results]

    def end(self) -> None:
        self.alive = False
        for child in self._ranks:
            child.end()

    def close(self) -> None:
        """Let the ranks leave together; end those that do not."""
        if self.alive:
            self._store.set(f"job{self._count}", "leave")
            wait_for(self._ranks, time.monotonic() + 30.0, lambda: False)
        self.end()
        self._folder.cleanup()


class Jobs(Mapping[str, list[Any]]):
    """Results of named jobs, by name, one a rank.

    Args:
        jobs: number of ranks → name → job, or a function without arguments that gives it when it is due (it may read
            results of other jobs).
        runner: module whose ``run_jobs`` runs a job.
        helper, init_process_group: as of `gloo.run_ranks`.
        options: further arguments of ``run_jobs``.
    """

    def __init__(
        self,
        jobs: Mapping[int, Mapping[str, Job | Callable[[], Job]]],
        runner: str = RUNNER,
        helper: Zygote | None = None,
        init_process_group: bool = True,
        **options: Any,
    ) -> None:
        self._runner, self._options = runner, options
        self._start = partial(Ranks, runner=runner, helper=helper, init_process_group=init_process_group)
        self._jobs = {name: (size, job) for size, named in jobs.items() for name, job in named.items()}
        self._found: dict[str, list[Any] | Exception] = {}
        self._ranks: dict[int, Ranks] = {}

    def __getitem__(self, name: str) -> list[Any]:
        if name not in self._found:
            size, job = self._jobs[name]
            try:
                job = job() if callable(job) else job
                if size not in self._ranks or not self._ranks[size].alive:
                    self._ranks[size] = self._start(size)
                arguments = {"jobs": {name: job}, **self._options}
                told = self._ranks[size].run(self._runner, "run_jobs", arguments)
                self._found[name] = [results[name] for results in told]
            except Exception as error:  # noqa: BLE001 - every test that reads it hears of it, and it is not run again
                self._found[name] = error
        if isinstance(self._found[name], Exception):
            raise self._found[name]
        return self._found[name]

    def of_rank(self, rank: int) -> Mapping[str, Any]:
        """What one rank returned, by name."""
        return _OfRank(self, rank)

    def __iter__(self) -> Iterator[str]:
        return iter(self._jobs)

    def __len__(self) -> int:
        return len(self._jobs)

    def __enter__(self) -> Jobs:
        return self

    def __exit__(self, *exception: object) -> None:
        for ranks in self._ranks.values():
            ranks.close()


class _OfRank(Mapping[str, Any]):
    def __init__(self, jobs: Jobs, rank: int) -> None:
        self._jobs, self._rank = jobs, rank

    def __getitem__(self, name: str) -> Any:
        return self._jobs[name][self._rank]

    def __iter__(self) -> Iterator[str]:
        return iter(self._jobs)

    def __len__(self) -> int:
        return len(self._jobs)
