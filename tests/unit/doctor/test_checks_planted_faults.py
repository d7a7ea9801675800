"""Every fault of docs/doctor.md turns its check red, with the message that stands there; without it the check is green.

The border is what the machine, the environment, a package, a collective or an engine returns. Faults that need real
learners and engines are planted by tests/e2e/test_doctor.py.
"""

from __future__ import annotations

import errno
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import megatron_rl.learner.learner
from megatron_rl.doctor import engine, learner, machine, rates
from megatron_rl.doctor.checks import CHECKS, Outcome, Setting
from megatron_rl.instruments.parity.compare import Comparison, OperatorError
from megatron_rl.layers import attention
from megatron_rl.learner import process_groups
from megatron_rl.patching.releases import Target, find_target
from megatron_rl.patching.states import apply_or_revert
from megatron_rl.process import host, ranks
from megatron_rl.process.devices import leave_default_stream
from megatron_rl.run import engines
from tests.support import nccl, planted, streams
from tests.support.nccl import Job
from tests.support.series import megatron_core
from tools.gpu.r4 import FAULTS

GIB = 1 << 30
CPU, GPU = Setting("cpu", 2, "/tmp"), Setting("cuda", 1, "/tmp", scratch="/tmp")
Plant = Callable[[Any, bool], Outcome]
PLANTS: dict[tuple[str, str], Plant] = {}
ROWS = planted.rows()


def plant(check: str, fault: str) -> Callable[[Plant], Plant]:
    """Marks a function of pytest's monkeypatch (with ``tmp_path``) and of whether to plant the fault."""
    return lambda function: PLANTS.setdefault((check, fault), function)


def test_every_check_has_a_fault_and_every_fault_a_plant():
    real = {(check, program.replace("_", " ")) for program, (_, check) in FAULTS.items()}
    assert PLANTS.keys() | real == ROWS.keys()
    assert {check for check, _ in ROWS} == {check.name for check in CHECKS}


@pytest.mark.parametrize("row", PLANTS, ids=": ".join)
@pytest.mark.parametrize("is_there", [True, False], ids=["planted", "sound"])
def test_a_fault_is_told(row, is_there, monkeypatch, tmp_path):
    monkeypatch.tmp_path = tmp_path
    outcome = PLANTS[row](monkeypatch, is_there)
    assert outcome.status == ("fail" if is_there else "pass"), outcome
    if is_there:
        assert ROWS[row] in outcome.reason
        assert outcome.fix


# -- the node


@plant("packages", "another vLLM")
def _(patch, is_there):
    own = machine.installed
    patch.setattr(machine, "installed", lambda name: "0.29.0" if "vllm" in name and is_there else own(name))
    if is_there:
        patch.setattr(machine, "CPU_FILE", machine.CUDA_FILE)
    return machine.versions(CPU)


@plant("patches", "reverted patches")
def _(patch, is_there):
    series = megatron_core()
    package = find_target(series, None, True)
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(package.root / "megatron", patch.tmp_path / "megatron", ignore=ignored)
    patch.setattr(machine.releases, "find_target", lambda *arguments: Target(patch.tmp_path, package.version))
    if is_there:
        apply_or_revert(series, Target(patch.tmp_path, None), True)
    return machine.patches(CPU)


def driver(patch, row: str = "580.65.06, 0, Disabled", names=("NVIDIA H100",) * 2, right=True, seen=True) -> Outcome:
    """`driver` on two GPUs of which the second is listed as ``row``."""
    listed = [text.split(", ") for text in ("580.65.06, 0, Disabled", row)]
    patch.setattr(machine, "smi", lambda fields, kind="gpu": listed)
    patch.setattr(torch.version, "cuda", "13.0")
    patch.setattr(torch.cuda, "device_count", lambda: 2)
    properties = [SimpleNamespace(name=name, total_memory=80 * GIB) for name in names]
    patch.setattr(torch.cuda, "get_device_properties", properties.__getitem__)
    patch.setattr(machine, "computes", lambda torch, device: right)
    return machine.driver(Setting("cuda" if seen else "cpu", 2, "/tmp"))


@plant("driver", "old driver")
def _(patch, is_there):
    if not is_there:
        return driver(patch)
    patch.setattr(torch.version, "cuda", "13.0")
    patch.setattr(machine, "smi", lambda fields, kind="gpu": [["550.54.15", "0", "[N/A]"]])
    return machine.driver(CPU)


@plant("driver", "MIG")
def _(patch, is_there):
    rows = [["580.65.06", "0", "Enabled" if is_there else "Disabled"]]
    outcome = driver(patch)
    patch.setattr(machine, "smi", lambda fields, kind="gpu": rows)
    return machine.driver(Setting("cuda", 1, "/tmp")) if is_there else outcome


@plant("driver", "two kinds")
def _(patch, is_there):
    return driver(patch, names=("NVIDIA H100", "NVIDIA A100" if is_there else "NVIDIA H100"))


@plant("driver", "ECC error")
def _(patch, is_there):
    return driver(patch, f"580.65.06, {3 if is_there else '[N/A]'}, [N/A]")


@plant("driver", "wrong product")
def _(patch, is_there):
    return driver(patch, right=not is_there)


@plant("gpu-memory", "another process")
def _(patch, is_there):
    rows = {"gpu": [["81559", "4"], ["81559", "30000" if is_there else "600"]], "compute-apps": [["4711"], ["4712"]]}
    patch.setattr(machine, "smi", lambda fields, kind="gpu": rows[kind])
    return machine.gpu_memory(GPU)


@plant("shared-memory", "container's default")
def _(patch, is_there):
    patch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=(64 << 20) if is_there else 3 * GIB))
    return machine.shared_memory(CPU, str(patch.tmp_path))


@plant("open-files", "limit of 1024")
def _(patch, is_there):
    patch.setattr(resource, "getrlimit", lambda kind: (1024 if is_there else resource.RLIM_INFINITY, 65535))
    return machine.open_files(CPU)


@plant("host-memory", "full control group")
def _(patch, is_there):
    """A control group of 8 GiB on a host of 64."""
    folder = patch.tmp_path
    (folder / "meminfo").write_text(f"MemTotal: 1 kB\nMemAvailable: {64 << 20} kB\n")
    texts = {"max": 8 * GIB, "current": (7 if is_there else 1) * GIB, "stat": "inactive_file 0"}
    for name, text in texts.items():
        (folder / f"memory.{name}").write_text(f"{text}\n")
    patch.setattr(host.available_gib, "__defaults__", (folder / "meminfo", folder))
    return machine.host_memory(CPU)


@plant("shared-folder", "stale file")
def _(patch, is_there):
    patch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=50 * GIB))
    if is_there:
        patch.setattr(Path, "read_text", lambda path: "stale")
    return machine.shared_folder(Setting("cpu", 2, str(patch.tmp_path)))


def compilers(patch, setting: Setting = CPU) -> Outcome:
    for variable in machine.CACHES:
        patch.setenv(variable, str(patch.tmp_path / variable))
    return machine.compilers(setting)


@plant("compilers", "read-only cache")
def _(patch, is_there):
    def refuse(dir):
        raise OSError(errno.EROFS, "Read-only file system")

    if is_there:
        patch.setattr(machine.tempfile, "TemporaryFile", refuse)
    return compilers(patch)


# -- between ranks and nodes


def in_job(patch, job: Job, check: Callable[[], Outcome]) -> Outcome:
    for module in (machine, rates):
        patch.setattr(module, "open_store", lambda setting: job.store)
    patch.setitem(rates.LINK_BYTES, "cuda", 4 << 10)
    nccl.steady(rates, patch)
    return job.run(patch, check)[0]


def nodes(patch, folder_of: Callable[[int], Path], fabric: set[int] = frozenset({0, 1})) -> Outcome:
    """`nodes` on two nodes. ``folder_of``: node → its folder of runs; ``fabric``: nodes with InfiniBand."""
    patch.setattr(machine, "has_fabric", lambda setting: nccl._own.rank in fabric)
    setting = lambda: Setting("cuda", 1, str(folder_of(nccl._own.rank)), wait_s=0.5)  # noqa: E731
    outcome = in_job(patch, Job(2, 1), lambda: machine.nodes_together(setting()))
    assert outcome.status == "fail" or list(patch.tmp_path.iterdir()) == []
    return outcome


@plant("nodes", "two folders")
def _(patch, is_there):
    return nodes(patch, lambda node: patch.tmp_path / f"runs{node if is_there else ''}")


@plant("nodes", "no InfiniBand")
def _(patch, is_there):
    return nodes(patch, lambda node: patch.tmp_path / "runs", {0} if is_there else {0, 1})


@plant("collectives", "wrong sum")
def _(patch, is_there):
    if is_there:
        patch.setattr(rates, "all_reduce", lambda *arguments: (False, 1.0))
    return in_job(patch, Job(2, 2), lambda: rates.collectives(Setting("cuda", 2, "")))


@plant("binding", "shared GPU")
def _(patch, is_there):
    visible = "0,1" if is_there else "3,1,0,2"
    job = Job(2, 4, environment=lambda rank: {"CUDA_VISIBLE_DEVICES": visible})
    return in_job(patch, job, lambda: machine.binding(GPU))


# -- the learner


@plant("fp32", "TF32")
def _(patch, is_there):
    multiply = torch.mm

    def as_tf32(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return multiply(*((x.view(torch.int32) & ~0x1FFF).view(torch.float32) for x in (a, b)))

    if is_there:
        patch.setattr(torch, "mm", as_tf32)
    return learner.products(CPU)


@plant("attention", "A100 without flash-attn")
def _(patch, is_there):
    config = SimpleNamespace(params_dtype=torch.bfloat16)
    patch.setattr(learner, "attention_config", lambda setting: (config, "bf16, heads of 128"))
    patch.setattr(attention, "packed_attention", lambda config: "unfused" if is_there else "flash")
    patch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    return learner.attention(GPU)


# -- engines, with stand-ins that answer as the real ones do


class Learner:
    """Its log-probs of each sequence; weights are elsewhere."""

    num_updates = 0

    def __init__(self, recipe: Any) -> None:
        leave_default_stream(torch.device(recipe.runtime.device))
        # In bf16 a learner is 1e-3 from itself in fp32.
        self.off = 1e-3 if recipe.learner.dtype == "bf16" else 0.0

    def compute_logprobs(self, batch: Any) -> list[np.ndarray]:
        return [np.full(4, -1.0 + self.off) for _ in batch.sequences]

    def update(self, batch: Any) -> None:
        pass

    def save(self, folder: Path, state: dict) -> None:
        pass


class Engine:
    """What one engine returns. Faults are keywords."""

    def __init__(self, attention="FLASH_ATTN", experts="TritonExperts", off=2e-3, stream="learner's") -> None:
        self.attention, self.experts, self.off = attention, experts, off
        if stream == "learner's":
            leave_default_stream(torch.device("cuda", 0))
        if stream != "none":
            streams.ask_vllm()
        self._llm = SimpleNamespace(llm_engine=SimpleNamespace(vllm_config=SimpleNamespace(use_v2_model_runner=True)))

    def describe_precision(self) -> dict[str, str]:
        return {"attention": f"vLLM {self.attention}", "activation": f"vLLM {self.experts}"}

    def batch(self) -> Any:
        return SimpleNamespace(sequences=[SimpleNamespace(inference_logprobs=np.full(4, -1.0 + self.off, np.float32))])

    def sleep(self) -> None:
        pass

    def close(self) -> None:
        pass


def on_gpu(patch, **faults: Any) -> None:
    """A node with a GPU whose engines have ``faults``: in their place, and in that of learners."""
    streams.install(patch)
    patch.setattr(megatron_rl.learner.learner, "Learner", Learner)

    def start(recipe: Any, learner: Any) -> Engine:
        streams.import_vllm(patch)
        return Engine(**faults)

    patch.setattr(engine, "start_engine", start)
    patch.setattr(engine, "generate", lambda recipe, learner, generator: generator.batch())
    patch.setattr(ranks, "gather_objects", lambda own: [own])
    patch.setattr(process_groups, "resolve_device", lambda device: torch.device("cuda", 0))
    patch.setattr(engines, "hand_over", lambda learner, generator: None)


def built(patch, setting: Setting = GPU, **faults: Any) -> Outcome:
    on_gpu(patch, **faults)
    return engine.built(setting)


@plant("engine", "stream of its own")
def _(patch, is_there):
    return built(patch, stream="its own" if is_there else "learner's")


@plant("engine", "other kernels")
def _(patch, is_there):
    return built(patch, experts="TrtLlmBf16ExpertsModular" if is_there else "TritonExperts")


@plant("engine", "wrong log-probs")
def _(patch, is_there):
    return built(patch, off=0.02 if is_there else 2e-3)


@plant("parity", "wrong operator")
def _(patch, is_there):
    ratios = [("learner", "0.q", 0.5), ("vLLM decode", "0.q", 0.7), ("vLLM decode", "0.k", 2.0 if is_there else 0.2)]
    errors = [OperatorError(w, tap, r, 1.0, r, r, 1.0, 0.0, (0, 3), int(r > 1), 8) for w, tap, r in ratios]
    return engine.judge_parity("the tiny model", Comparison(errors))


@plant("memory", "memory of others")
def _(patch, is_there):
    """The driver says that 1 GiB is in use, and from the second question on more."""
    on_gpu(patch)
    used = [1.0, 1.0, 60.0 if is_there else 1.0]

    def mem_get_info() -> tuple[int, int]:
        return int((80 - (used.pop(0) if len(used) > 1 else used[0])) * GIB), 80 * GIB

    patch.setattr(torch.cuda, "mem_get_info", mem_get_info)
    for name in ("reset_peak_memory_stats", "memory_reserved", "max_memory_reserved"):
        patch.setattr(torch.cuda, name, lambda: 0)
    return engine.memory(GPU)


def test_a_learner_on_the_default_stream_is_named(monkeypatch):
    monkeypatch.setitem(globals(), "leave_default_stream", lambda device: None)
    assert "the current stream is default" in built(monkeypatch, stream="none").reason


def test_the_kernels_of_fp32_are_others(monkeypatch):
    recipe = Setting("cuda", 1, "/tmp", "recipes/tiny/grpo.yaml", ["learner.dtype=fp32", "rollout.dtype=fp32"])
    assert "vLLM took FLASH_ATTN for attention in fp32" in built(monkeypatch, recipe).reason
    assert built(monkeypatch, recipe, attention="TRITON_ATTN").status == "pass"


def test_ranks_of_one_engine_with_different_sums(monkeypatch):
    """As where one rank may not reach its peer's memory, and vLLM leaves its own all-reduce there alone."""
    from vllm.distributed import parallel_state

    on_gpu(monkeypatch)
    gathered = []
    for disabled in (False, True):
        group = SimpleNamespace(device_communicator=SimpleNamespace(ca_comm=SimpleNamespace(disabled=disabled)))
        monkeypatch.setattr(parallel_state, "get_tp_group", lambda group=group: group)
        monkeypatch.setattr(ranks, "gather_objects", lambda own: gathered.append(own) or list(gathered))
        outcome = engine.built(Setting("cuda", 2, "/tmp"))
    assert gathered[0].sums == "custom, SimpleNamespace"
    assert (outcome.status, outcome.reason.startswith("rank 1: kernels are")) == ("fail", True), outcome
