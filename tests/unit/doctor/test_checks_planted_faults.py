"""Every check of the doctor turns red where a fault is planted at its border, and is green on a sound node.

The border is what the machine, the environment, a package, a collective or an engine returns. `PROOFS` names the tests
of each check; those that are nowhere else are in this file.
"""

from __future__ import annotations

import ast
import functools
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import megatron_rl.learner.learner
from megatron_rl.doctor import engine, machine
from megatron_rl.doctor.checks import CHECKS, Outcome, Setting
from megatron_rl.learner import process_groups
from megatron_rl.process import host, ranks
from megatron_rl.process.devices import leave_default_stream
from megatron_rl.run import engines
from tests.support import streams

ROOT = Path(__file__).resolve().parents[3]
GIB = 1 << 30
GPU = Setting("cuda", 1, "/tmp")


@dataclass(frozen=True)
class Proof:
    """Tests as FILE::NAME, or NAME in this file. ``red``: a planted fault fails; ``green``: a sound node passes."""

    red: str
    green: str


E2E, UNIT = "tests/e2e/test_doctor.py::", "tests/unit/doctor/"
ALL_GREEN = E2E + "test_all_that_applies_passes"
BROKEN = E2E + "test_what_is_broken_fails_and_the_other_runner_passes"
PROOFS = {
    "packages": Proof(
        UNIT + "test_machine_packages.py::test_a_gpu_node_is_held_against_the_other_file",
        UNIT + "test_machine_packages.py::test_this_environment",
    ),
    "patches": Proof(
        UNIT + "test_machine_packages.py::test_patches_that_are_not",
        UNIT + "test_machine_packages.py::test_patches_that_are_applied",
    ),
    "driver": Proof(
        UNIT + "test_machine.py::test_gpus_that_torch_does_not_see",
        UNIT + "test_machine.py::test_a_driver_and_its_gpus",
    ),
    "gpu-memory": Proof(UNIT + "test_machine.py::test_gpu_memory", UNIT + "test_machine.py::test_gpu_memory"),
    "shared-memory": Proof(UNIT + "test_machine.py::test_shared_memory", ALL_GREEN),
    "open-files": Proof(UNIT + "test_machine.py::test_open_files", ALL_GREEN),
    "host-memory": Proof("test_host_memory", "test_host_memory"),
    "shared-folder": Proof(
        UNIT + "test_machine.py::test_a_file_system_that_gives_back_something_else",
        UNIT + "test_machine.py::test_shared_folder",
    ),
    "nodes": Proof(
        UNIT + "test_machine_nodes.py::test_nodes_without_one_folder", UNIT + "test_machine_nodes.py::test_nodes"
    ),
    "collectives": Proof(
        UNIT + "test_nccl.py::test_ranks_that_guess_their_gpu_hang", UNIT + "test_nccl.py::test_the_doctors_groups"
    ),
    "binding": Proof(
        UNIT + "test_machine_nodes.py::test_ranks_on_one_gpu",
        UNIT + "test_machine_nodes.py::test_ranks_with_a_gpu_each",
    ),
    "fp32": Proof(
        UNIT + "test_learner_fp32.py::test_a_library_with_tf32_is_named",
        UNIT + "test_learner_fp32.py::test_a_sound_process_passes",
    ),
    "attention": Proof(
        UNIT + "test_learner.py::test_an_a100_without_flash_attn_is_refused",
        UNIT + "test_learner.py::test_fused_attention_is_named",
    ),
    "experts": Proof(BROKEN, ALL_GREEN),
    "context": Proof(BROKEN, ALL_GREEN),
    "checkpoint": Proof(BROKEN, ALL_GREEN),
    "engine": Proof("test_an_engine_that_is_not_sound", "test_a_sound_engine"),
    "mismatch": Proof(BROKEN, ALL_GREEN),
    "parity": Proof(UNIT + "test_engine.py::test_an_operator_beyond_its_bound_is_named", ALL_GREEN),
    "refit": Proof(BROKEN, ALL_GREEN),
    "memory": Proof("test_memory_that_another_process_takes", "test_memory"),
    "runner-v2": Proof("test_a_runner_that_is_not_sound", "test_runners"),
    "runner-v1": Proof("test_a_runner_that_is_not_sound", "test_runners"),
}


def test_every_check_has_its_proof():
    assert PROOFS.keys() == {check.name for check in CHECKS}


@functools.cache
def names_in(file: str) -> set[str]:
    tree = ast.parse((ROOT / file).read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}


@pytest.mark.parametrize("name", PROOFS)
def test_the_tests_of_a_check_exist(name):
    for test in (PROOFS[name].red, PROOFS[name].green):
        file, _, function = test.rpartition("::")
        assert function in names_in(file or str(Path(__file__).relative_to(ROOT))), test


# -- the host's memory


@pytest.mark.parametrize(("used", "status"), [(1, "pass"), (7, "fail")])
def test_host_memory(used, status, monkeypatch, tmp_path):
    """A control group of 8 GiB on a host of 64."""
    (tmp_path / "meminfo").write_text(f"MemTotal: 1 kB\nMemAvailable: {64 << 20} kB\n")
    texts = {"max": 8 * GIB, "current": used * GIB, "stat": "inactive_file 0"}
    for name, text in texts.items():
        (tmp_path / f"memory.{name}").write_text(f"{text}\n")
    monkeypatch.setattr(host.available_gib, "__defaults__", (tmp_path / "meminfo", tmp_path))
    assert machine.host_memory(Setting("cpu", 2, "/tmp")).status == status


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

    kept: list[Any] = []

    def __init__(
        self, attention="FLASH_ATTN", experts="TritonExperts", off=0.0, is_second=True, keeps=False, stream="learner's"
    ) -> None:
        self.attention, self.experts, self.off, self.keeps = attention, experts, off, keeps
        if stream == "learner's":
            leave_default_stream(torch.device("cuda", 0))
        if stream != "none":
            streams.ask_vllm()
        self.model = torch.nn.Linear(2, 2)
        self.model.kv_cache = [torch.zeros(2)]
        configuration = SimpleNamespace(use_v2_model_runner=is_second)
        self._llm = SimpleNamespace(
            llm_engine=SimpleNamespace(vllm_config=configuration), apply_model=lambda function: [function(self.model)]
        )

    def describe_precision(self) -> dict[str, str]:
        return {"attention": f"vLLM {self.attention}", "activation": f"vLLM {self.experts}"}

    def batch(self) -> Any:
        return SimpleNamespace(sequences=[SimpleNamespace(inference_logprobs=np.full(4, -1.0 + self.off, np.float32))])

    def sleep(self) -> None:
        pass

    def close(self) -> None:
        if self.keeps:
            self.kept.append(self.model)
        self.model = None


@pytest.fixture
def node(monkeypatch):
    """A node with a GPU whose engines are as the test plants them: in their place, and in that of learners."""
    Engine.kept = []
    planted: dict[str, Any] = {}
    streams.install(monkeypatch)
    monkeypatch.setattr(megatron_rl.learner.learner, "Learner", Learner)

    def start(recipe: Any, learner: Any) -> Engine:
        streams.import_vllm(monkeypatch)
        return Engine(**planted)

    for module in (engine, engine):
        monkeypatch.setattr(module, "start_engine", start)
        monkeypatch.setattr(module, "generate", lambda recipe, learner, generator: generator.batch())
    monkeypatch.setattr(ranks, "gather_objects", lambda own: [own])
    monkeypatch.setattr(process_groups, "resolve_device", lambda device: torch.device("cuda", 0))
    monkeypatch.setattr(engines, "hand_over", lambda learner, generator: None)
    return planted


def test_a_sound_engine(node):
    outcome = engine.built(GPU)
    assert (outcome.status, "all 3 tensors of the closed engine are gone" in outcome.reason) == ("pass", True), outcome


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ({"stream": "its own"}, "the current stream is stream 0 before the engine and stream 1 beside it"),
        ({"attention": "FLEX_ATTENTION"}, "vLLM took FLEX_ATTENTION for attention in bf16"),
        ({"experts": "TrtLlmBf16ExpertsModular"}, "vLLM took TrtLlmBf16ExpertsModular for experts"),
        ({"keeps": True}, "3 of 3 tensors live on"),
    ],
    ids=["stream", "attention", "experts", "release"],
)
def test_an_engine_that_is_not_sound(fault, told, node):
    node |= fault
    outcome = engine.built(GPU)
    assert (outcome.status, told in outcome.reason) == ("fail", True), outcome
    assert outcome.fix


def test_a_learner_on_the_default_stream_is_named(node, monkeypatch):
    monkeypatch.setitem(globals(), "leave_default_stream", lambda device: None)
    node["stream"] = "none"
    assert "the current stream is default" in engine.built(GPU).reason


def test_the_kernels_of_fp32_are_others(node, tmp_path):
    recipe = Setting("cuda", 1, "/tmp", "recipes/tiny/grpo.yaml", ["learner.dtype=fp32", "rollout.dtype=fp32"])
    assert "vLLM took FLASH_ATTN for attention in fp32" in engine.built(recipe).reason
    node["attention"] = "TRITON_ATTN"
    assert engine.built(recipe).status == "pass"


def test_ranks_of_one_engine_with_different_sums(node, monkeypatch):
    """As where one rank may not reach its peer's memory, and vLLM leaves its own all-reduce there alone."""
    others = {"ca_comm": SimpleNamespace(disabled=False)}, {"ca_comm": SimpleNamespace(disabled=True)}
    groups = [SimpleNamespace(device_communicator=SimpleNamespace(**parts)) for parts in others]
    from vllm.distributed import parallel_state

    gathered = []
    for group in groups:
        monkeypatch.setattr(parallel_state, "get_tp_group", lambda group=group: group)
        monkeypatch.setattr(ranks, "gather_objects", lambda own: gathered.append(own) or list(gathered))
        outcome = engine.built(Setting("cuda", 2, "/tmp"))
    assert gathered[0].sums == "custom, SimpleNamespace"
    assert (outcome.status, outcome.reason.startswith("rank 1: kernels are")) == ("fail", True), outcome


@pytest.mark.parametrize("version", [1, 2])
def test_runners(version, node, monkeypatch):
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", str(version - 1))
    node |= {"is_second": version == 2, "off": 2e-3}
    assert engine.runner(GPU).status == "pass"


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("fault", ["another runner", "other log-probs"])
def test_a_runner_that_is_not_sound(fault, version, node, monkeypatch):
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", str(version - 1))
    node |= {"is_second": (version == 2) != (fault == "another runner"), "off": 0.02 if "log" in fault else 2e-3}
    outcome = engine.runner(GPU)
    assert (outcome.status, "model runner" in outcome.reason) == ("fail", True), outcome


def measured(monkeypatch, used: list[float]) -> Outcome:
    """`memory` where the driver says ``used`` GiB of 80, one after the other, and then the last."""
    left = list(used)

    def mem_get_info() -> tuple[int, int]:
        return int((80 - (left.pop(0) if len(left) > 1 else left[0])) * GIB), 80 * GIB

    monkeypatch.setattr(torch.cuda, "mem_get_info", mem_get_info)
    for name in ("reset_peak_memory_stats", "memory_reserved", "max_memory_reserved"):
        monkeypatch.setattr(torch.cuda, name, lambda: 0)
    return engine.memory(Setting("cuda", 1, "/tmp", scratch="/tmp"))


def test_memory(node, monkeypatch):
    outcome = measured(monkeypatch, [1.0])
    assert outcome.status == "pass", outcome


def test_memory_that_another_process_takes(node, monkeypatch):
    outcome = measured(monkeypatch, [1.0, 1.0, 60.0])
    assert (outcome.status, "engine asleep 60.00 of" in outcome.reason) == ("fail", True), outcome
