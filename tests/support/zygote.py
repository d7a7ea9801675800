"""Real processes without paying for their imports each time.

    child = zygote().start("tests.parallel.programs.memory", "measure_cases", {"cases": []}, log=tmp_path / "log")
    status = child.wait(60)

A helper process imports torch, Megatron and vLLM once and forks a child for every call: a process (and process group)
of its own that has the caller's environment, joins its own job, is killed by a real SIGKILL, and leaves what a killed
process leaves. The helper has one thread and no process group; it imports a program's module before it forks.

What a child shares with the other children of its helper, and a fresh interpreter would not: the seed of string hashes,
and settings that libraries read while they are imported. A program that depends on either starts its own interpreter.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import functools
import gc
import importlib
import os
import runpy
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.support.heap import keep_hidden
from tests.support.patience import PATIENCE_S
from tests.support.tiny import REPOSITORY

WARM = (
    "megatron_rl.__main__",
    "megatron_rl.train",
    "megatron_rl.evaluate",
    "megatron_rl.run.engines",
    "megatron_rl.rollout.vllm_engine",
    "vllm.entrypoints.llm",
    "vllm.model_executor.layers.quantization.online.base",
    "vllm.v1.worker.cpu_worker",
)
QUIET = {
    "TORCH_CPP_LOG_LEVEL": "ERROR",  # what `megatron_rl.__main__` sets before it imports torch
    "JE_ARROW_MALLOC_CONF": "background_thread:false",  # pyarrow's allocator starts a thread at import otherwise
}
SLICE_S = 0.2
EXCEPTION = 1  # the status of a child that an exception ended


def surroundings() -> dict[str, str]:
    """The caller's environment, one thread a process, this repository's modules first."""
    path = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}


class Child:
    """A call under way, in a process of its own. ``returncode`` is negative where a signal ended it."""

    def __init__(self, zygote: Zygote, pid: int, log: Path) -> None:
        self.zygote, self.pid, self.log = zygote, pid, log

    @property
    def returncode(self) -> int | None:
        return self.zygote.ended.get(self.pid)

    @property
    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def poll(self) -> int | None:
        self.zygote.listen(0)
        return self.returncode

    def wait(self, seconds: float = PATIENCE_S) -> int:
        """The status; AssertionError with the output where the child takes longer, which is then ended."""
        if not self.ends_within(seconds):
            self.end()
            raise AssertionError(f"not finished within {seconds} s\n{self.output}")
        return self.returncode

    def end(self) -> None:
        """Kill it together with the processes that it started: they outlive a leader that left them behind."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.ends_within(60.0)

    def ends_within(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while self.poll() is None and (left := deadline - time.monotonic()) > 0:
            self.zygote.listen(left)
        return self.returncode is not None


class Zygote:
    """The caller's end of the helper process. ``settings``: environment variables that count while libraries load.

    With settings the helper is for one program: it imports what that needs and nothing else.
    """

    def __init__(self, settings: dict[str, str] | None = None) -> None:
        self.ended: dict[int, int] = {}
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as the helper; imports are noisy
        self._pipe, theirs = Pipe()
        self._reading = threading.RLock()  # servers are started again by another thread than the test's
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.zygote", str(theirs.fileno()), *(() if settings else WARM)],
            cwd=REPOSITORY,
            env={**surroundings(), **QUIET, **(settings or {})},
            stdin=subprocess.DEVNULL,
            stdout=self._said,
            stderr=subprocess.STDOUT,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
        theirs.close()

    def start(
        self,
        module: str,
        function: str,
        arguments: dict[str, Any],
        *,
        log: Path,
        errors: Path | None = None,
        env: dict[str, str] | None = None,
        imports: Sequence[str] = (),
    ) -> Child:
        """Call ``module.function(**arguments)`` in a new process, from the repository root.

        Args:
            arguments: picklable.
            log: the child's output, appended; its errors too unless ``errors`` names a file of their own.
            env: the whole environment of the child; by default `surroundings`.
            imports: modules that the helper imports before it forks, beside ``module``.
        """
        call = (module, function, arguments, str(log), str(errors or log), surroundings() if env is None else env)
        deadline = time.monotonic() + 240.0
        with self._reading:
            self._pipe.send(((module, *imports), call))
            while (pid := self._hear(max(0.0, deadline - time.monotonic()))) is None:
                if time.monotonic() > deadline:
                    raise RuntimeError("the helper process does not answer")
        return Child(self, pid, log)

    def __enter__(self) -> Zygote:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        self._pipe.close()  # the helper ends its children, then itself
        self._process.wait()
        self._said.close()

    def listen(self, seconds: float) -> None:
        """Hear how children ended; waits up to ``seconds`` for the first news, and does not keep other threads from it.

        What another thread hears ends no wait here: ``seconds`` is at most `SLICE_S`.
        """
        while self._pipe.poll(min(seconds, SLICE_S)):
            with self._reading:
                self._hear(0.0)
            seconds = 0.0

    def _hear(self, seconds: float) -> int | None:
        """One message: the number of a child that was started, or a status, which is noted."""
        if not self._pipe.poll(seconds):
            return None
        try:
            kind, pid, status = self._pipe.recv()
        except EOFError:
            status = self._process.wait(10)
            self._said.seek(0)
            said = self._said.read().decode(errors="replace")[-4000:]
            raise RuntimeError(f"the helper process is gone (status {status}):\n{said}") from None
        if kind == "ended":
            self.ended[pid] = status
            return None
        self.ended.pop(pid, None)  # the system gave a number a second time
        return pid


@functools.cache
def zygote() -> Zygote:
    """The helper of this process, started at the first call."""
    helper = Zygote()
    atexit.register(helper.close)
    return helper


def run_module(name: str, arguments: Sequence[str]) -> int:
    """``python -m name arguments`` in a child."""
    sys.argv = [name, *arguments]
    sys.modules.pop(f"{name}.__main__", None)  # or runpy warns
    runpy.run_module(name, run_name="__main__", alter_sys=True)
    return 0


def run_command(
    name: str, arguments: Sequence[str], folder: Path, *, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """``python -m name arguments``, as `subprocess.run` with captured text gives it; ``folder`` keeps the output."""
    out, errors = (folder / f"{name}-{time.monotonic_ns()}.{kind}" for kind in ("out", "err"))
    call = {"name": name, "arguments": list(arguments)}
    child = zygote().start("tests.support.zygote", "run_module", call, log=out, errors=errors, env=env)
    status = child.wait()
    return subprocess.CompletedProcess([name, *arguments], status, out.read_text(), errors.read_text())


def run_ranks_of_command(
    name: str, arguments: Sequence[str], folder: Path, size: int
) -> subprocess.CompletedProcess[str]:
    """``python -m name arguments`` on ranks, as `torchrun` starts them: the first status that is not 0, and the first
    rank's output."""
    from megatron_rl.process.ranks import store_for_ranks

    _store, world = store_for_ranks()  # the store lives as long as its name
    world |= {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
    call, ranks = {"name": name, "arguments": list(arguments)}, []
    try:
        for rank in range(size):
            files = [folder / f"{name}-{time.monotonic_ns()}-{rank}.{kind}" for kind in ("out", "err")]
            own = surroundings() | world | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            started = zygote().start("tests.support.zygote", "run_module", call, log=files[0], errors=files[1], env=own)
            ranks.append((started, *files))
        status = next(filter(None, [child.wait() for child, *_ in ranks]), 0)
    finally:
        for child, *_ in ranks:
            child.end()
    _, out, errors = ranks[0]
    return subprocess.CompletedProcess([name, *arguments], status, out.read_text(), errors.read_text())


def main(pipe: Connection, warm: Sequence[str]) -> None:
    """The helper: fork a child for every call, tell the status of each that ended, until the caller is gone."""
    faulthandler.enable()
    started_with = dict(os.environ)
    gc.disable()  # what imports make stays
    # pytest's, in processes that it does not know.
    plugins = [name for name in os.environ.get("PYTEST_PLUGINS", "").split(",") if name.startswith("tests.support.")]
    for module in (*plugins, *warm):
        importlib.import_module(module)
    children: dict[int, int] = {}  # descriptor of a process → its number
    while True:
        ready, _, _ = select.select([pipe.fileno(), *children], [], [])
        for descriptor in set(ready) & set(children):
            pid = children.pop(descriptor)
            os.close(descriptor)
            status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            with contextlib.suppress(BrokenPipeError):
                pipe.send(("ended", pid, status))
        if pipe.fileno() not in ready:
            continue
        try:
            modules, call = pipe.recv()
        except EOFError:
            break
        for module in modules:
            with contextlib.suppress(Exception):  # the child imports it again and shows what is wrong
                importlib.import_module(module)
        if len(threads := os.listdir("/proc/self/task")) > 1:
            raise RuntimeError(f"imports of {modules} started {len(threads) - 1} threads: a fork would lose them")
        gc.collect()
        gc.freeze()
        pid = os.fork()
        if pid == 0:
            pipe.close()
            _child(started_with, *call)
        with contextlib.suppress(OSError):  # the child does the same; who comes first is open
            os.setpgid(pid, pid)
        children[os.pidfd_open(pid)] = pid
        pipe.send(("started", pid, 0))
    for pid in children.values():
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)


def _child(
    started_with: dict[str, str],
    module: str,
    function: str,
    arguments: dict[str, Any],
    log: str,
    errors: str,
    environment: dict[str, str],
) -> None:
    status = EXCEPTION
    try:
        with contextlib.suppress(OSError):
            os.setpgid(0, 0)
        for path, number in ((log, 1), (errors, 2)):
            opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            os.dup2(opened, number)
            os.close(opened)
        _set_environment(started_with, environment)
        _forget_random_state()
        keep_hidden()
        gc.enable()
        status = getattr(importlib.import_module(module), function)(**arguments) or 0
    except SystemExit as leaving:
        status = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
        if isinstance(leaving.code, str):
            print(leaving.code, file=sys.stderr)
    except BaseException:  # noqa: BLE001 - the child must not become a second helper
        traceback.print_exc()
    finally:
        # What an interpreter does at its end, but for freeing memory.
        with contextlib.suppress(BaseException):
            threading._shutdown()
            atexit._run_exitfuncs()
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def _set_environment(started_with: dict[str, str], environment: dict[str, str]) -> None:
    """``environment``, together with what imports have set."""
    for name in started_with.keys() - environment.keys():
        os.environ.pop(name, None)
    for name, value in environment.items():
        if started_with.get(name) != value:
            os.environ[name] = value


def _forget_random_state() -> None:
    """A fresh interpreter's NumPy is seeded by the system; two children must not draw the same by accident."""
    import numpy as np

    np.random.seed()


if __name__ == "__main__":
    # Under its own name, so that children find one copy of this module.
    importlib.import_module("tests.support.zygote").main(Connection(int(sys.argv[1])), sys.argv[2:])
