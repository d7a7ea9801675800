"""Real processes that can be killed, without paying for their imports each time.

A helper imports Megatron once, before any process group exists, and forks a child for every program: a process of its
own that joins its own job, is killed by a real SIGKILL, and leaves what a killed process leaves.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.tiny import MODEL, REPOSITORY


@dataclass
class Ended:
    """How a program ended. ``status`` is negative where a signal did it."""

    status: int
    output: str  # stdout and stderr

    @property
    def last_line(self) -> str:
        return self.output.strip().splitlines()[-1] if self.output.strip() else ""


class Child:
    """A program under way."""

    def __init__(self, zygote: Zygote, pid: int, log: Path) -> None:
        self.zygote, self.pid, self.log = zygote, pid, log

    @property
    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def wait(self, seconds: float = 240.0) -> Ended:
        status = self.zygote.reply(seconds, self)["status"]
        return Ended(status, self.output)


class Zygote:
    """``with Zygote(folder) as z: z.run("function", **arguments)`` runs `tests.reliability.programs.function`."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._count = folder, 0

    def __enter__(self) -> Zygote:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
        environment |= {"HF_TOKEN": "do-not-write-this", "VLLM_API_KEY": "do-not-write-this"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.reliability.zygote"],
            cwd=REPOSITORY,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        return self

    def __exit__(self, *exception: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def start(self, function: str, **arguments: Any) -> Child:
        self._count += 1
        log = self.folder / f"child-{self._count}.log"
        request = {"function": function, "arguments": arguments, "log": str(log)}
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        self._process.stdin.flush()
        return Child(self, self.reply(240.0)["pid"], log)

    def run(self, function: str, **arguments: Any) -> Ended:
        return self.start(function, **arguments).wait()

    def reply(self, seconds: float, child: Child | None = None) -> dict[str, Any]:
        if not select.select([self._process.stdout], [], [], seconds)[0]:
            raise AssertionError(f"no answer within {seconds} s\n{child.output if child else ''}")
        return json.loads(self._process.stdout.readline())


def main() -> None:
    # What children need, loaded once; nothing here starts a thread or a process group.
    import tests.reliability.programs as programs
    from megatron_rl.data import load_tokenizer

    load_tokenizer(str(MODEL))

    replies = os.dup(1)
    os.dup2(2, 1)
    for line in sys.stdin:
        request = json.loads(line)
        pid = os.fork()
        if pid == 0:
            output = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            os.dup2(output, 1)
            os.dup2(output, 2)
            status = 70
            try:
                status = getattr(programs, request["function"])(**request["arguments"]) or 0
            except BaseException:  # noqa: BLE001 - the child must not become a second helper
                traceback.print_exc()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
        os.write(replies, json.dumps({"pid": pid}).encode() + b"\n")
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        os.write(replies, json.dumps({"status": status}).encode() + b"\n")


if __name__ == "__main__":
    main()
