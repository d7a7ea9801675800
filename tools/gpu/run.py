"""One run of a script of the campaign: its parts, its deadline, its result file, its verdict, and ranks on one GPU."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_rl.process.host import write_whole
from megatron_rl.process.ranks import store_for_ranks

ROOT = Path(__file__).resolve().parents[2]
SITE = Path(__file__).parent / "site"
SECONDS = 480.0  # of a script on the GPU
GRACE_S = 3.0  # for ranks that lost a peer, to say so
LOG_CHARACTERS = 20_000  # the watchdog's message comes before a long stack
GREEN, RED, OPEN = 0, 1, 3  # exit status
PLANT = "GPU_CAMPAIGN_PLANT"  # environment variable of ranks: the fault that `rank` plants

# Several ranks of NCCL on one GPU: a network of sockets between them, a fixed order of sums, nothing of NVLink or
# shared memory. NCCL_HOSTID, in which ranks must differ, is set by site/sitecustomize.py.
NCCL = {
    "NCCL_NET": "Socket",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_FAMILY": "AF_INET",
    "NCCL_IB_DISABLE": "1",
    "NCCL_NET_PLUGIN": "none",
    "NCCL_ALGO": "Ring",
    "NCCL_PROTO": "Simple",
    "NCCL_P2P_LL_THRESHOLD": "0",
    "NCCL_MNNVL_ENABLE": "0",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_CUMEM_ENABLE": "0",
    "NCCL_CUMEM_HOST_ENABLE": "0",
    "NCCL_RAS_ENABLE": "0",
    "NCCL_MAX_CTAS": "4",
    "GLOO_SOCKET_IFNAME": "lo",
    "MRL_SHARE_GPUS": "1",
}
Job = tuple[str, dict[str, Any]]
"""A function, "module.function", and its arguments."""


class Problem(Exception):
    """What makes a part red."""


class NotRun(Exception):
    """Why a part stays open."""


@dataclass
class Ranks:
    """How the ranks of one start ended. ``results``: of each rank, job → what it returned, as far as it came."""

    codes: list[int | None]  # None: it was still running at the end of its time
    seconds: list[float]  # until each ended
    results: list[dict[str, Any]]
    logs: list[str]
    began: float  # by time.monotonic(), which processes of a machine share

    def whole(self) -> list[dict[str, Any]]:
        """The results of all ranks. Raises `Problem` unless all ended well."""
        for rank in sorted(range(len(self.codes)), key=lambda rank: self.seconds[rank]):
            if self.codes[rank] != 0:
                how = "was still running" if self.codes[rank] is None else f"left with status {self.codes[rank]}"
                raise Problem(f"rank {rank} {how} after {self.seconds[rank]:.0f} s:\n{self.logs[rank]}")
        return self.results


@dataclass
class Run:
    """``keep``: a folder for what parts leave to others; parts that are green in ``out`` are not run again then.
    ``only``: a pattern in the names of parts that are run; empty: all."""

    name: str
    out: Path
    rehearse: bool
    plant: str = ""
    seconds: float = SECONDS
    only: str = ""
    keep: Path | None = None
    parts: dict[str, dict[str, Any]] = field(default_factory=dict)
    start: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self.folder = self.keep or Path(tempfile.mkdtemp(prefix=f"gpu-{self.name}-"))
        self.folder.mkdir(parents=True, exist_ok=True)
        if self.keep and self.out.exists():
            parts = json.loads(self.out.read_text())["parts"]
            self.parts = {name: part for name, part in parts.items() if part["state"] == "green"}
        self.write()

    @property
    def device(self) -> str:
        return "cpu" if self.rehearse else "cuda"

    @property
    def left(self) -> float:
        return self.seconds - (time.monotonic() - self.start)

    def part(self, name: str, function: Callable[[], Mapping[str, Any] | None]) -> None:
        """Run ``function``, and write what it returns, its figures, or what it raises: a `Problem`, or any error."""
        if not re.search(self.only, name) or name in self.parts:
            return
        part = self.parts[name] = {"state": "open", "reason": "it was under way when the run was cut off"}
        self.write()
        start = time.monotonic()
        if self.left <= 0:
            part["reason"] = f"the {self.seconds:g} s of the run were over"
        else:
            try:
                figures = dict(function() or {})
                part.update(state="green", reason="", **figures)
            except NotRun as reason:
                part.update(reason=str(reason))
            except Problem as problem:
                part.update(state="red", reason=str(problem))
            except Exception as error:  # noqa: BLE001 - the other parts are to run, whatever broke this one
                part.update(state="red", reason=f"{type(error).__name__}: {error}", stack=traceback.format_exc())
        part["seconds"] = round(time.monotonic() - start, 2)
        self.write()
        print(f"{self.name}, {name}: {part['state']} in {part['seconds']} s {part['reason'][:400]}", flush=True)

    def tiny_model(self) -> Path:
        """The tiny model with four key heads, so that up to four ranks divide them."""
        from tools.dev.exact_runs import with_four_key_heads

        path = self.folder / "model"
        return path if path.exists() else with_four_key_heads(ROOT / "recipes" / "tiny" / "model", path)

    @property
    def states(self) -> list[str]:
        return [part["state"] for part in self.parts.values()]

    def verdict(self) -> str:
        """One line."""
        worst = next((state for state in ("red", "open") if state in self.states), "green" if self.states else "open")
        names = [name for name, part in self.parts.items() if part["state"] == worst]
        which = f"all {len(names)} parts" if worst == "green" else ", ".join(names) or "no part"
        where = "rehearsal on a CPU, no GPU ran" if self.rehearse else "on a GPU"
        planted = f", fault {self.plant} planted" if self.plant else ""
        return f"{self.name}: {worst}: {which}; {time.monotonic() - self.start:.0f} s ({where}{planted})"

    def write(self) -> str:
        document = {"verdict": self.verdict(), "rehearsal": self.rehearse, "plant": self.plant, **about()}
        text = json.dumps(document | {"parts": self.parts}, indent=1, ensure_ascii=False, default=str)
        write_whole(self.out, text + "\n")
        return document["verdict"]

    def end(self) -> int:
        print(self.write(), flush=True)
        return RED if "red" in self.states else OPEN if "open" in self.states or not self.states else GREEN

    # -- ranks

    def ranks(
        self,
        size: int,
        jobs: Mapping[str, Job],
        seconds: float = SECONDS,
        *,
        libraries: str = "",
        grace_s: float = GRACE_S,
        plant: str | None = None,
        mark: Path | None = None,
    ) -> Ranks:
        """Run ``jobs``, one after the other, on ``size`` ranks of this machine's one device, for at most ``seconds``,
        and for ``grace_s`` after one failed.

        ``plant``: the fault of its processes, default that of this run. ``libraries``: "te" for TransformerEngine,
        whose reference takes its place in a rehearsal. ``mark``: a file; ``seconds`` count from when it is there.
        """
        folder = Path(tempfile.mkdtemp(dir=self.folder))
        (folder / "jobs.pkl").write_bytes(pickle.dumps((dict(jobs), self.device, libraries)))
        command = [sys.executable, "-m", "tools.gpu.rank", str(folder)]
        processes, logs = [], [folder / f"rank{rank}.log" for rank in range(size)]
        for log, environment in zip(logs, self.environments(size, self.plant if plant is None else plant), strict=True):
            with log.open("wb") as file:
                if self.rehearse and libraries != "te":
                    processes.append(Forked(folder, environment, file.fileno()))
                    continue
                how = {"env": environment, "stdout": file, "stderr": subprocess.STDOUT, "start_new_session": True}
                processes.append(subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, **how))
        began = time.monotonic()
        try:
            codes, ended = watch(processes, min(seconds, self.left), grace_s, mark, self.left)
        finally:
            for process in processes:
                end(process)
        results = [read_results(folder, rank) for rank in range(size)]
        return Ranks(codes, ended, results, [log.read_text(errors="replace")[-LOG_CHARACTERS:] for log in logs], began)

    def of_job(self, found: dict[str, Any], size: int, jobs: Mapping[str, Job], name: str, **options: Any) -> list[Any]:
        """What each rank returned of the job ``name``. All ``jobs`` that this run asks for are made in one start, the
        first time that one is wanted; each has the name of its part."""
        if "ended" not in found:
            wanted = {part: job for part, job in jobs.items() if re.search(self.only, part)}
            found["ended"] = self.ranks(size, wanted, **options)
        if any(name not in results for results in found["ended"].results):
            found["ended"].whole()
        return [results[name] for results in found["ended"].results]

    def shared(self) -> dict[str, str]:
        """Environment variables of all processes that use the GPU together."""
        path = os.pathsep.join([str(SITE), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        return {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"), **NCCL, "PYTHONPATH": path}

    def environments(self, size: int, plant: str) -> list[dict[str, str]]:
        self.store, address = store_for_ranks()  # until the next ranks
        base = {**os.environ, **self.shared(), **address, PLANT: plant}
        base |= {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size), "TOKENIZERS_PARALLELISM": "false"}
        return [base | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(size)]


class Forked:
    """A rank of a rehearsal: this process may have done the imports that take most of a start."""

    returncode: int | None = None

    def __init__(self, folder: Path, environment: dict[str, str], output: int) -> None:
        self.pid = os.fork()
        if self.pid:
            return
        try:
            os.setsid()
            for stream in (1, 2):
                os.dup2(output, stream)
            os.environ.clear()
            os.environ.update(environment)
            from tools.gpu import rank

            rank.main(folder)
        except BaseException:  # noqa: BLE001 - nothing of the caller's is to run in this process
            traceback.print_exc()
        finally:
            os._exit(1)

    def poll(self, options: int = os.WNOHANG) -> int | None:
        if self.returncode is None and (ended := os.waitpid(self.pid, options))[0]:
            self.returncode = os.waitstatus_to_exitcode(ended[1])
        return self.returncode

    def wait(self) -> int | None:
        return self.poll(0)


Process = subprocess.Popen | Forked


def watch(
    processes: Sequence[Process], seconds: float, grace_s: float, mark: Path | None = None, most: float = SECONDS
) -> tuple[list[int | None], list[float]]:
    """Wait until all have ended, ``seconds`` have passed (since ``mark`` is there, in all ``most``), or ``grace_s``
    since one failed. Status and seconds of each."""
    start, limit = time.monotonic(), time.monotonic() + (seconds if mark is None else most)
    ended: dict[int, float] = {}
    while len(ended) < len(processes) and time.monotonic() < limit:
        for number, process in enumerate(processes):
            if number not in ended and process.poll() is not None:
                ended[number] = time.monotonic() - start
                if process.returncode:
                    limit = min(limit, time.monotonic() + grace_s)
        if mark is not None and mark.exists():
            limit, mark = min(limit, time.monotonic() + seconds), None
        time.sleep(0.02)
    passed = time.monotonic() - start
    return [process.poll() for process in processes], [ended.get(n, passed) for n in range(len(processes))]


def end(process: Process) -> None:
    """End a rank, and all that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def read_results(folder: Path, rank: int) -> dict[str, Any]:
    files = sorted(folder.glob(f"rank{rank}-*.pkl"), key=lambda file: file.stat().st_mtime_ns)
    return dict(pickle.loads(file.read_bytes()) for file in files)


def about() -> dict[str, Any]:
    """Commit, command and machine."""
    git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    smi = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    found = shutil.which(smi[0]) and subprocess.run(smi, capture_output=True, text=True, check=False).stdout.strip()
    command = " ".join(["python -m tools.gpu", *sys.argv[1:]])
    return {"commit": commit, "command": command, "gpu": found or None, "python": platform.python_version()}
