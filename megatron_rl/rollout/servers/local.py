"""Servers that a run starts by itself on its own machine: `rollout.servers.launch`."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from megatron_rl.config.servers import TOKEN_VARIABLE
from megatron_rl.rollout.generator import RolloutError
from megatron_rl.rollout.servers.rendezvous import folder

END_S = 20.0  # for a server to leave after SIGTERM, before it is killed
LAST_LINES = 15
MAX_ENDS = 3  # of one server, in a row: another start would not help
RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")


class LocalServers:
    """``count`` processes of `megatron-rl serve`, with their logs beside their addresses.

    ``recipe``: the resolved recipe, a YAML file. The token reaches them in their environment. ``command``: what starts
    one; the name is added to it.
    """

    def __init__(
        self, count: int, recipe: Path, run_dir: Path, token: str, command: Sequence[str] | None = None
    ) -> None:
        self._folder = folder(run_dir)
        self._folder.mkdir(parents=True, exist_ok=True)
        # The variables of this rank would make a server think that it is one.
        environment = {name: value for name, value in os.environ.items() if name not in RANK_VARIABLES}
        environment |= {TOKEN_VARIABLE: token, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
        self._environment = environment
        serve = [sys.executable, "-m", "megatron_rl", "serve", str(recipe), "--ends-with-parent"]
        self._command = list(command or [*serve, "--set", f"run_root={run_dir.resolve().parent}"])
        self._ended: dict[str, int] = {}  # how often a server ended since it could last be used
        self._processes: dict[str, subprocess.Popen] = {}
        for index in range(count):
            self._log(f"local-{index}").unlink(missing_ok=True)
            self._launch(f"local-{index}")

    def _launch(self, name: str) -> None:
        self._address(name).unlink(missing_ok=True)  # of a server that was killed
        with self._log(name).open("a") as out:
            self._processes[name] = subprocess.Popen(
                [*self._command, "--name", name],
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is for the trainer, which needs them to finish its step
            )

    def _log(self, name: str) -> Path:
        return self._folder / f"{name}.log"

    def _address(self, name: str) -> Path:
        return self._folder / f"{name}.json"

    def check(self) -> None:
        """Raises `RolloutError` with a server's last words when it ended before it could be used."""
        for name, process in self._processes.items():
            if process.poll() is not None:
                raise RolloutError(f"server {name} ended at its start ({self._last_words(name)}")

    def relaunch(self, say: Callable[[str], None]) -> None:
        """Start servers again that have ended. ``say``: one line for the log.

        A server that ended `MAX_ENDS` times and could not be used in between is left alone. Raises `RolloutError` with
        the last words of one where this is so of all.
        """
        for name, process in self._processes.items():
            if process.poll() is None or self._is_given_up(name):
                continue
            self._ended[name] = self._ended.get(name, 0) + 1
            if self._is_given_up(name):
                say(f"server {name} ended {MAX_ENDS} times and could not be used in between; it is left alone")
            else:
                say(f"server {name} ended (status {process.returncode}) and is started again; see {self._log(name)}")
                self._launch(name)
        if all(self._is_given_up(name) for name in self._processes):
            raise RolloutError(f"no server can be started; {name} ended ({self._last_words(name)}")

    def came_up(self, name: str) -> None:
        """A server can be used: its ends count from 0 again."""
        self._ended.pop(name, None)

    def _is_given_up(self, name: str) -> bool:
        return self._ended.get(name, 0) >= MAX_ENDS

    def _last_words(self, name: str) -> str:
        last = "\n".join(self._log(name).read_text(errors="replace").splitlines()[-LAST_LINES:])
        return f"status {self._processes[name].returncode}); {self._log(name)}:\n{last}"

    def close(self) -> None:
        """End them all; returns when they are gone."""
        for process in self._processes.values():
            process.terminate()
        for name, process in self._processes.items():
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            self._address(name).unlink(missing_ok=True)  # one that was killed leaves its address
