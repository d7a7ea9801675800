"""Servers that a run starts by itself on its own machine: `rollout.servers.launch`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from megatron_rl.config.servers import TOKEN_VARIABLE
from megatron_rl.rollout.generator import RolloutError
from megatron_rl.rollout.servers.rendezvous import folder

END_S = 20.0  # for a server to leave after SIGTERM, before it is killed
LAST_LINES = 15
RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")


class LocalServers:
    """``count`` processes of `megatron-rl serve`, with their logs beside their addresses.

    ``recipe``: the resolved recipe, a YAML file. The token reaches them in their environment.
    """

    def __init__(self, count: int, recipe: Path, run_dir: Path, token: str) -> None:
        logs = folder(run_dir)
        logs.mkdir(parents=True, exist_ok=True)
        # The variables of this rank would make a server think that it is one.
        environment = {name: value for name, value in os.environ.items() if name not in RANK_VARIABLES}
        environment |= {TOKEN_VARIABLE: token, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
        self._processes: dict[str, subprocess.Popen] = {}
        self._logs = {f"local-{index}": logs / f"local-{index}.log" for index in range(count)}
        for name, log in self._logs.items():
            (logs / f"{name}.json").unlink(missing_ok=True)  # of an attempt that was killed
            command = [sys.executable, "-m", "megatron_rl", "serve", str(recipe), "--name", name]
            command += ["--set", f"run_root={run_dir.resolve().parent}", "--ends-with-parent"]
            with log.open("w") as out:
                self._processes[name] = subprocess.Popen(
                    command,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # Ctrl-C is for the trainer, which needs them to finish its step
                )

    def check(self) -> None:
        """Raises `RolloutError` with a server's last words when it ended before it could be used."""
        for name, process in self._processes.items():
            if process.poll() is not None:
                last = "\n".join(self._logs[name].read_text(errors="replace").splitlines()[-LAST_LINES:])
                raise RolloutError(
                    f"server {name} ended at its start (status {process.returncode}); {self._logs[name]}:\n{last}"
                )

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
            self._logs[name].with_suffix(".json").unlink(missing_ok=True)  # one that was killed leaves its address
