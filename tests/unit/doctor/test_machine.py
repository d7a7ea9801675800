"""What a node may lack, in both outcomes."""

from __future__ import annotations

import resource
import shutil
from types import SimpleNamespace

import pytest
import torch

from megatron_rl.doctor import machine
from megatron_rl.doctor.checks import Setting, find
from megatron_rl.instruments.plan.hardware import PROCESS_GIB

SETTING = Setting("cpu", 2, "/tmp")
GIB = machine.GIB


def disk(monkeypatch, gib: float) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=gib * GIB))


def limits(monkeypatch, soft: int) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (soft, 65535))


@pytest.mark.parametrize(("gib", "status"), [(2.1, "pass"), (0.06, "fail")])  # two ranks want one each
def test_shared_memory(monkeypatch, tmp_path, gib, status):
    disk(monkeypatch, gib)
    outcome = machine.shared_memory(SETTING, str(tmp_path))
    assert outcome.status == status
    assert "--shm-size" in outcome.fix or status == "pass"
    assert machine.shared_memory(SETTING, str(tmp_path / "none")).status == "fail"


@pytest.mark.parametrize(("soft", "status"), [(1024, "fail"), (8192, "pass"), (resource.RLIM_INFINITY, "pass")])
def test_open_files(monkeypatch, soft, status):
    limits(monkeypatch, soft)
    assert machine.open_files(SETTING).status == status


@pytest.mark.parametrize(("gib", "status"), [(3.9, "fail"), (4.1, "pass")])
def test_host_memory(monkeypatch, gib, status):
    monkeypatch.setattr(machine, "available_gib", lambda: gib)
    assert machine.host_memory(SETTING).status == status


def test_a_recipe_that_records_routes_wants_their_memory(monkeypatch):
    """As `plan` counts them: eight processes of a node, and what the recipe puts beside them."""
    recipe = "recipes/router_replay/grpo-qwen3-30b-a3b-4n8g-tp4ep8-r3.yaml"
    monkeypatch.setattr(machine, "available_gib", lambda: 8 * PROCESS_GIB)
    assert machine.host_memory(Setting("cuda", 8, "/tmp")).status == "pass"
    outcome = machine.host_memory(Setting("cuda", 8, "/tmp", recipe))
    assert outcome.status == "fail"
    assert outcome.figures["wanted_gib"]["processes"] == 8 * PROCESS_GIB
    assert outcome.figures["wanted_gib"]["responses, routes, packed rows"] > 0


def test_shared_folder(monkeypatch, tmp_path):
    folder = tmp_path / "runs"
    setting = Setting("cpu", 2, str(folder))
    disk(monkeypatch, 50)
    assert machine.shared_folder(setting).status == "pass"
    assert not folder.exists()  # the doctor leaves no folder that it made
    folder.mkdir()
    assert machine.shared_folder(setting).status == "pass"
    assert list(folder.iterdir()) == []
    disk(monkeypatch, 1)
    assert "1.0 GiB free" in machine.shared_folder(setting).reason
    (tmp_path / "file").write_text("")
    assert machine.shared_folder(Setting("cpu", 2, str(tmp_path / "file"))).status == "fail"


def test_a_file_servers_clock(monkeypatch, tmp_path):
    disk(monkeypatch, 50)
    now = machine.time.time()
    monkeypatch.setattr(machine.time, "time", lambda: now - 3600)
    outcome = machine.shared_folder(Setting("cpu", 2, str(tmp_path)))
    assert (outcome.status, "clock is +3600" in outcome.reason) == ("fail", True)


def test_a_file_system_that_gives_back_something_else(monkeypatch, tmp_path):
    disk(monkeypatch, 50)
    monkeypatch.setattr(machine.Path, "read_text", lambda path: "stale")
    outcome = machine.shared_folder(Setting("cpu", 2, str(tmp_path)))
    assert (outcome.status, "read back as 'stale'" in outcome.reason) == ("fail", True)


# -- GPUs, with a driver of ours


@pytest.fixture
def nvidia(monkeypatch, tmp_path):
    """`nvidia-smi` that answers with what the test writes."""

    def answer(rows: list[str], processes: list[str] = (), fails: bool = False) -> None:
        text = "exit 9\n" if fails else ""
        text += 'case "$1" in --query-compute-apps*) cat <<E\n' + "\n".join(processes) + "\nE\n;; *) cat <<E\n"
        program = tmp_path / "nvidia-smi"
        program.write_text(f"#!/bin/sh\n{text}" + "\n".join(rows) + "\nE\n;; esac\n")
        program.chmod(0o755)

    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    return answer


def test_smi_reads_rows(nvidia):
    nvidia(["81559, 4", "81559, 5"])
    assert machine.smi("memory.total,memory.used") == [["81559", "4"], ["81559", "5"]]
    nvidia([], fails=True)
    assert machine.smi("name") is None


def test_gpus_that_torch_does_not_see(nvidia):
    nvidia(["NVIDIA H100, 580.65, 9.0, 0"])
    outcome = machine.driver(SETTING)
    assert outcome.status == "fail"
    assert "does not see one" in outcome.reason
    assert "CUDA_VISIBLE_DEVICES" in outcome.fix
    nvidia([], fails=True)
    assert machine.driver(SETTING).status == "not run"


@pytest.mark.parametrize(
    ("ecc", "right", "status"),
    [("0", True, "pass"), ("[N/A]", True, "pass"), ("3", True, "fail"), ("0", False, "fail")],
)
def test_a_driver_and_its_gpus(nvidia, monkeypatch, ecc, right, status):
    nvidia([f"NVIDIA H100, 580.65, 9.0, {ecc}"])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    properties = SimpleNamespace(name="NVIDIA H100", total_memory=80 * GIB)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(machine, "computes", lambda torch, device: right)
    assert machine.driver(Setting("cuda", 1, "/tmp")).status == status


def test_a_product_that_is_wrong_is_seen(monkeypatch):
    assert machine.computes(torch, "cpu")
    own = torch.Tensor.__matmul__

    def wrong(a, b):
        problem = own(a, b)
        if problem.dtype == torch.bfloat16:
            problem[3, 5] += 1
        return problem

    monkeypatch.setattr(torch.Tensor, "__matmul__", wrong)
    assert not machine.computes(torch, "cpu")


def test_gpu_memory(nvidia):
    setting = Setting("cuda", 2, "/tmp")
    nvidia(["81559, 4", "81559, 600"])
    assert machine.gpu_memory(setting).status == "pass"
    nvidia(["81559, 4", "81559, 30000"], ["4711", "4712"])
    outcome = machine.gpu_memory(setting)
    assert (outcome.status, "GPU 1 30000 MiB; processes: 4711, 4712" in outcome.reason) == ("fail", True)
    nvidia([], fails=True)
    assert machine.gpu_memory(setting).status == "not run"


def test_the_list_of_checks_has_their_bounds():
    bounds = {
        "shared-memory": f"{machine.SHARED_MEMORY_GIB:g} GiB free for each rank",
        "open-files": f"{machine.OPEN_FILES} files",
        "host-memory": f"{PROCESS_GIB:g} GiB a rank; {machine.CPU_RANK_GIB:g} on CPUs",
        "shared-folder": f"{machine.FREE_GIB:g} GiB free, and is its clock within {machine.MOST_SKEW_S:g} s",
        "nodes": f"within {machine.MOST_SKEW_S:g} s",
    }
    assert {name: bound for name, bound in bounds.items() if bound not in find(name).question} == {}
