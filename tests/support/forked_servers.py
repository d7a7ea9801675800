"""Servers of a run in processes that have done their imports: a start costs a third of a fresh interpreter's.

`tests/e2e/test_servers.py` starts the command itself.
"""

import contextlib
import os
import signal
import subprocess

from megatron_rl.rollout.servers.run_servers import LocalServers
from tests.support.zygote import Child, zygote

IMPORTS = ("megatron_rl.rollout.servers.server", "vllm.entrypoints.openai.api_server")


class _Process:
    """A forked server as `LocalServers` uses one of `subprocess.Popen`."""

    def __init__(self, child: Child) -> None:
        self._child, self.pid = child, child.pid

    @property
    def returncode(self) -> int | None:
        return self._child.returncode

    def poll(self) -> int | None:
        return self._child.poll()

    def wait(self, seconds: float = 60.0) -> int:
        if not self._child.ends_within(seconds):
            raise subprocess.TimeoutExpired("serve", seconds)
        return self.returncode

    def _signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)


class ForkedServers(LocalServers):
    """`LocalServers`, forked from the helper of the tests."""

    def _launch(self, name: str) -> None:
        self._address(name).unlink(missing_ok=True)
        _, _, module, *arguments = self._command
        call = {"name": module, "arguments": [*arguments, "--name", name]}
        child = zygote().start(
            "tests.support.zygote", "run_module", call, log=self._log(name), env=self._environment, imports=IMPORTS
        )
        self._processes[name] = _Process(child)
