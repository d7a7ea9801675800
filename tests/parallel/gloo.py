"""Run a function on several gloo ranks and get back what each rank returned.

    from tests.parallel.gloo import run_ranks

    def test_sum():
        results = run_ranks("tests.parallel.programs", "all_reduce_rank", world_size=2, scale=3.0)
        assert results == [9.0, 9.0]

The function is named, not passed: every rank is a process of its own that has imported the module (from the repository
root) and calls `module.function(**kwargs)`. Ranks are forked from a helper that holds the imports (support.zygote).
Arguments and return values travel by pickle; return CPU tensors, numbers and containers of them. Keep rank programs in
a module that imports neither pytest nor this file's caller.

Each rank starts with RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT set as `torchrun` sets
them, so code that calls `torch.distributed.init_process_group()` itself works (`init_process_group=False`); by default
the rank has joined a gloo group before the function is called. The rendezvous store lives in the calling process on a
port the system chose: parallel test runs do not collide.

A rank that raises, dies or exceeds `timeout_s` ends all ranks, and `RankFailure` shows the end of every rank's output,
the one that failed first at the top. Program output is otherwise dropped; set GLOO_RANKS_VERBOSE=1 to see it.
"""

import importlib
import os
import pickle
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

from tests.support.patience import PATIENCE_S
from tests.support.zygote import Child, Zygote, surroundings, zygote

OUTPUT_TAIL_CHARS = 6000
POLL_SECONDS = 0.02
# Ranks that merely lost their peer get this long to print their own error before they are ended.
GRACE_SECONDS = 2.0
RAISED = ".raised"  # beside a rank's log: when its call raised


class RankFailure(AssertionError):
    """A rank raised, died or ran out of time; the message holds the output of all ranks."""


def run_ranks(
    fn_module: str,
    fn_name: str,
    world_size: int,
    *,
    timeout_s: float = PATIENCE_S,
    init_process_group: bool = True,
    env: dict[str, str] | None = None,
    helper: Zygote | None = None,
    **kwargs: Any,
) -> list[Any]:
    """Call `fn_module.fn_name(**kwargs)` on `world_size` ranks.

    Args:
        fn_module: dotted module name, importable from the repository root (for example "tests.parallel.programs").
        timeout_s: seconds for the whole call; the first of a session waits for the helper (8 s on a quiet machine).
        init_process_group: join the gloo group before the call, leave it after.
        env: additions to the environment of every rank, there before it imports anything; costs a helper.
        helper: forks the ranks, for programs that need other imports than the session's; ``env`` is then the ranks'
            alone.
        kwargs: picklable keyword arguments; the names above cannot be used.

    Returns:
        the pickled return value of every rank, in rank order.

    Raises:
        RankFailure: see the module's docstring.
    """
    from megatron_rl.process.ranks import store_for_ranks

    _store, address = store_for_ranks()  # the store lives as long as its name
    with tempfile.TemporaryDirectory(prefix="gloo-ranks-") as folder:
        ranks: list[Child] = []
        deadline = time.monotonic() + timeout_s
        with Zygote(env) if env and helper is None else nullcontext(helper or zygote()) as helper:
            try:
                ranks, logs = launch(
                    helper, fn_module, fn_name, kwargs, world_size, address, Path(folder), init_process_group, env
                )
                failure = wait_for(ranks, deadline)
            finally:
                for child in ranks:
                    child.end()
        if failure is not None or os.environ.get("GLOO_RANKS_VERBOSE"):
            report = report_of(ranks, logs, failure)
            if failure is not None:
                first, reason = failure
                raise RankFailure(f"{fn_module}.{fn_name} on {world_size} ranks: rank {first} {reason}\n{report}")
            print(report)
        return [pickle.loads(Path(folder, f"result{rank}.pkl").read_bytes()) for rank in range(world_size)]


def launch(
    helper: Zygote,
    fn_module: str,
    fn_name: str,
    kwargs: dict[str, Any],
    world_size: int,
    address: dict[str, str],
    folder: Path,
    join: bool = True,
    env: dict[str, str] | None = None,
    imports: Sequence[str] = (),
) -> tuple[list[Child], list[Path]]:
    """Start ranks that make one call, and the logs of each.

    ``address``: of `store_for_ranks`, where they meet. ``imports``: modules that the helper imports beside the program.
    """
    job = folder / "job.pkl"
    job.write_bytes(pickle.dumps((fn_module, fn_name, kwargs, join)))
    logs, ranks = [folder / f"rank{rank}.log" for rank in range(world_size)], []
    try:
        for rank, log in enumerate(logs):
            environment = _rank_environment(rank, world_size, address, env or {})
            ranks.append(
                helper.start(
                    __name__, "rank_main", {"job": job}, log=log, env=environment, imports=[fn_module, *imports]
                )
            )
    except BaseException:
        for child in ranks:
            child.end()
        raise
    return ranks, logs


def _rank_environment(rank: int, world_size: int, address: dict[str, str], extra: dict[str, str]) -> dict[str, str]:
    return {
        **surroundings(),
        "GLOO_SOCKET_IFNAME": "lo",
        **extra,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        **address,
    }


def wait_for(ranks: list[Child], deadline: float, done: Callable[[], bool] = lambda: False) -> tuple[int, str] | None:
    """Wait until all ranks have ended, or ``done``; the first that failed and why, or None."""
    while True:
        if done():
            return None
        codes = [process.poll() for process in ranks]
        failed = [rank for rank, code in enumerate(codes) if code not in (None, 0)]
        if failed:
            grace = time.monotonic() + GRACE_SECONDS
            while any(process.poll() is None for process in ranks) and time.monotonic() < grace:
                time.sleep(POLL_SECONDS)
            first = min(failed, key=lambda rank: (_raised_at(ranks[rank]), rank))
            code = codes[first]
            reason = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"left with status {code}"
            return first, reason
        if None not in codes:
            return None
        if time.monotonic() > deadline:
            return codes.index(None), "did not finish in time"
        time.sleep(POLL_SECONDS)


def _raised_at(rank: Child) -> int:
    """When the rank's call raised, in ns of the machine's monotonic clock; 0 where a signal ended it without a word."""
    raised = rank.log.with_suffix(RAISED)
    return int(raised.read_text() or 0) if raised.exists() else 0


def report_of(ranks: list[Child], logs: list[Path], failure: tuple[int, str] | None) -> str:
    order = sorted(range(len(ranks)), key=lambda rank: (failure is not None and rank != failure[0], rank))
    parts = []
    for rank in order:
        text = logs[rank].read_text(errors="replace")[-OUTPUT_TAIL_CHARS:].strip()
        parts.append(f"--- rank {rank} (status {ranks[rank].returncode}) ---\n{text or '(no output)'}")
    return "\n".join(parts)


def rank_main(job: Path) -> None:
    """What a rank runs: join, call, store the result beside the job."""
    fn_module, fn_name, kwargs, join = pickle.loads(job.read_bytes())
    import torch

    torch.set_num_threads(1)
    if join:
        torch.distributed.init_process_group("gloo")
    try:
        result = getattr(importlib.import_module(fn_module), fn_name)(**kwargs)
    except BaseException:
        # Peers fail as soon as this rank is gone: only the time says who was first.
        Path(job.parent, f"rank{os.environ['RANK']}{RAISED}").write_text(str(time.monotonic_ns()))
        raise
    Path(job.parent, f"result{os.environ['RANK']}.pkl").write_bytes(pickle.dumps(result))
    if torch.distributed.is_initialized():
        # A rank that leaves early tears down the connections that its peers still use.
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


def serve_jobs(folder: str) -> None:
    """What a rank of `pool.Ranks` calls: the jobs that it is told of, until it is told to leave."""
    from torch.distributed import TCPStore

    patience = timedelta(days=1)  # between two jobs; a caller that is gone ends its ranks
    store = TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), None, False, timeout=patience)
    number, rank = 0, os.environ["RANK"]
    while store.get(f"job{number}") == b"run":
        module, function, arguments = pickle.loads(Path(folder, f"job{number}.pkl").read_bytes())
        result = getattr(importlib.import_module(module), function)(**arguments)
        part = Path(folder, f"job{number}-rank{rank}.part")
        part.write_bytes(pickle.dumps(result))
        part.rename(part.with_suffix(".pkl"))
        number += 1
