"""Steps of programs in turn: a driver lets one worker make one step, while the others wait and use no processor.

So two programs that are compared run under the same load of the machine, step by step. Nothing of ours is imported
here: a worker may live in another virtual environment.
"""

from __future__ import annotations

import contextlib
import os
import resource
import subprocess
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.connection import Client, Listener
from pathlib import Path
from typing import Any

ADDRESS = "BENCH_GATE"  # environment variable: the driver's socket


class Gate:
    """A worker's end. Call `wait` before every step; it reports the previous step, if there was one."""

    def __init__(self) -> None:
        self._driver = Client(os.environ[ADDRESS], "AF_UNIX")
        self._start: tuple[float, float] | None = None

    def wait(self, **facts: Any) -> Any:
        """End the step that runs, tell the driver its times and ``facts``, and wait for what the driver gives to the
        next one. None: there is no other."""
        if self._start is not None:
            wall, processor = time.perf_counter() - self._start[0], time.process_time() - self._start[1]
            memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
            self._driver.send({"wall": wall, "processor": processor, "memory_mib": memory, **facts})
        else:
            self._driver.send("ready")
        message = self._driver.recv()
        self._start = (time.perf_counter(), time.process_time())
        return message

    def leave(self) -> None:
        """End the process at once: what a framework does at its own end is not part of a benchmark."""
        os._exit(0)


class Worker:
    """The driver's end of one program, which starts at once; `connect` before the first step."""

    def __init__(self, name: str, command: Sequence[str], log: Path, environment: dict[str, str] | None = None) -> None:
        self.name, self.log, self.steps = name, log, []
        self._socket = Path(tempfile.mkdtemp()) / "gate"
        self._listener = Listener(str(self._socket), "AF_UNIX")
        env = {**os.environ, **(environment or {}), ADDRESS: str(self._socket)}
        with log.open("w") as output:
            self._process = subprocess.Popen(command, env=env, stdout=output, stderr=subprocess.STDOUT)
        self._connection: Any = None

    def connect(self) -> None:
        """Wait until the program stands before its first step."""
        self._listener._listener._socket.settimeout(1.0)
        while self._connection is None:
            try:
                self._connection = self._listener.accept()
            except TimeoutError:
                self._check()
        self._listener.close()
        self._socket.parent.rmdir()
        self._receive()

    def step(self, given: Any = True) -> dict[str, Any]:
        """One step with ``given``: ``wall`` and ``processor`` seconds, ``memory_mib`` and what the worker adds."""
        self._connection.send(given)
        self.steps.append(self._receive())
        return self.steps[-1]

    def _receive(self) -> Any:
        try:
            while not self._connection.poll(1.0):
                self._check()
            return self._connection.recv()
        except EOFError:
            self._process.wait()
            self._check()
            raise

    def _check(self) -> None:
        if self._process.poll() is not None:
            tail = "".join(self.log.read_text().splitlines(keepends=True)[-15:])
            raise SystemExit(f"{self.name} ended with status {self._process.returncode}:\n{tail}")

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._connection.send(None) if self._connection else self._process.terminate()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
