"""What a node may lack, beside the faults of test_checks_planted_faults.py."""

from __future__ import annotations

import json
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


def test_a_recipe_that_moves_its_optimizer_wants_memory_for_it(monkeypatch):
    """As `plan` counts them: eight processes of a node, and what the recipe puts beside them."""
    recipe = "recipes/router_replay/grpo-qwen3-30b-a3b-1n8g-tp4ep8-r3.yaml"
    monkeypatch.setattr(machine, "available_gib", lambda: 8 * PROCESS_GIB)
    assert machine.host_memory(Setting("cuda", 8, "/tmp")).status == "pass"
    outcome = machine.host_memory(Setting("cuda", 8, "/tmp", recipe))
    assert outcome.status == "fail"
    assert outcome.figures["wanted_gib"]["processes"] == 8 * PROCESS_GIB
    assert outcome.figures["wanted_gib"]["Adam's states, page-locked"] > 0


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


@pytest.mark.parametrize(
    ("device", "devices", "environment", "has"),
    [
        ("cuda", [], {}, False),
        ("cuda", ["mlx5_0"], {}, True),
        ("cuda", [], {"NCCL_IB_DISABLE": "1"}, True),
        ("cuda", [], {"NCCL_NET": "Socket"}, True),
        ("cpu", [], {}, True),
    ],
)
def test_infiniband_is_asked_for_where_nccl_would_take_it(device, devices, environment, has, monkeypatch, tmp_path):
    for name in ("NCCL_IB_DISABLE", "NCCL_NET", "NCCL_NET_PLUGIN"):
        monkeypatch.delenv(name, raising=False)
    for name, text in environment.items():
        monkeypatch.setenv(name, text)
    for name in devices:
        (tmp_path / name).mkdir()
    setting = Setting(device, 1, "/tmp")
    assert machine.has_fabric(setting, tmp_path) == has
    assert machine.has_fabric(setting, tmp_path / "none") == (has and not devices)


def test_the_first_names_who_does_not_answer():
    store, setting = torch.distributed.HashStore(), Setting("cpu", 2, "/tmp", wait_s=0.01)
    assert machine.gather(store, "what", setting, 1, 3, [1]) == []
    answers = machine.gather(store, "what", setting, 0, 3, [0])
    assert answers == [[0], [1], None]
    outcome = machine.unanswered(answers, "rank")
    assert (outcome.status, outcome.reason) == ("fail", "no answer of rank 2")
    assert machine.unanswered(answers[:2], "rank") is None


def test_a_rank_tells_the_first_which_gpu_it_has(monkeypatch):
    store = torch.distributed.HashStore()
    monkeypatch.setattr(machine, "open_store", lambda setting: store)
    for name, value in {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "SLURMD_NODENAME": "node1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=f"GPU-{index}"))
    assert machine.binding(Setting("cuda", 1, "/tmp")).status == "not run"
    assert json.loads(store.get("gpu/5")) == ["GPU-1", "node1", 4]


def test_files_that_are_not_there_or_say_something_else_are_unseen(tmp_path):
    folder = tmp_path / ".doctor-x"
    folder.mkdir()
    (folder / "0").write_text(".doctor-x 0")
    (folder / "2").write_text("of an earlier call")
    assert machine._unseen(folder, 3) == [1, 2]


@pytest.fixture
def nvidia(monkeypatch, tmp_path):
    """`nvidia-smi` that answers with what the test writes."""

    def answer(*rows: str, fails: bool = False) -> None:
        program = tmp_path / "nvidia-smi"
        program.write_text("#!/bin/sh\n" + "exit 9\n" * fails + "cat <<E\n" + "\n".join(rows) + "\nE\n")
        program.chmod(0o755)

    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    return answer


def test_gpus_that_torch_does_not_see(nvidia):
    nvidia("580.65.06, 0, Disabled", "580.65.06, 0, Disabled")
    assert machine.smi("any") == [["580.65.06", "0", "Disabled"]] * 2
    outcome = machine.driver(SETTING)
    assert (outcome.status, "2 GPUs are listed" in outcome.reason) == ("fail", True)
    assert "CUDA_VISIBLE_DEVICES" in outcome.fix
    nvidia(fails=True)
    assert machine.smi("any") is None
    assert machine.driver(SETTING).status == machine.gpu_memory(SETTING).status == "not run"


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


def test_the_list_of_checks_has_their_bounds():
    bounds = {
        "shared-memory": f"{machine.SHARED_MEMORY_GIB:g} GiB free for each rank",
        "open-files": f"{machine.OPEN_FILES} files",
        "host-memory": f"{PROCESS_GIB:g} GiB a rank; {machine.CPU_RANK_GIB:g} on CPUs",
        "shared-folder": f"{machine.FREE_GIB:g} GiB free, and is its clock within {machine.MOST_SKEW_S:g} s",
    }
    assert {name: bound for name, bound in bounds.items() if bound not in find(name).question} == {}
