"""Checks between nodes: one folder, one time, and a GPU for each rank."""

from __future__ import annotations

import json
import time
from types import SimpleNamespace

import pytest
import torch

from megatron_rl.doctor import machine
from megatron_rl.doctor.checks import Outcome, Setting
from tests.support import nccl
from tests.support.nccl import Job

GPU = Setting("cuda", 1, "/tmp")


def on_nodes(monkeypatch, folder_of, ahead: float = 0.0) -> Outcome:
    """`nodes` on two nodes. ``folder_of``: node → its folder of runs; the second node's clock is ``ahead``."""
    job = Job(2, 1)
    monkeypatch.setattr(machine, "open_store", lambda rank: job.store)
    monkeypatch.setattr(machine, "SEEN_S", 0.5)

    def now() -> float:
        return time.time() + (ahead if nccl._own.rank else 0.0)

    monkeypatch.setattr(machine, "time", SimpleNamespace(time=now, monotonic=time.monotonic, sleep=time.sleep))
    return job.run(monkeypatch, lambda: machine.nodes_together(Setting("cpu", 1, str(folder_of(nccl._own.rank)))))[0]


def test_nodes(monkeypatch, tmp_path):
    outcome = on_nodes(monkeypatch, lambda node: tmp_path / "runs")
    assert (outcome.status, "seen by 2 of 2 nodes" in outcome.reason) == ("pass", True), outcome
    assert list(tmp_path.iterdir()) == []


def test_nodes_without_one_folder(monkeypatch, tmp_path):
    outcome = on_nodes(monkeypatch, lambda node: tmp_path / str(node))
    assert (outcome.status, "node0 does not see files of node1" in outcome.reason) == ("fail", True), outcome


def test_nodes_with_two_times(monkeypatch, tmp_path):
    outcome = on_nodes(monkeypatch, lambda node: tmp_path, ahead=60.0)
    assert (outcome.status, "node1 +6" in outcome.reason) == ("fail", True), outcome


def bound(monkeypatch, visible) -> Outcome:
    """`binding` on two nodes of four GPUs. ``visible``: rank → its CUDA_VISIBLE_DEVICES, None where it is not set."""
    named = {rank: {"CUDA_VISIBLE_DEVICES": text} for rank in range(8) if (text := visible(rank)) is not None}
    job = Job(2, 4, environment=lambda rank: named.get(rank, {}))
    monkeypatch.setattr(machine, "open_store", lambda rank: job.store)
    return job.run(monkeypatch, lambda: machine.binding(GPU))[0]


@pytest.mark.parametrize("visible", [lambda rank: None, lambda rank: str(rank % 4), lambda rank: "3,1,0,2"])
def test_ranks_with_a_gpu_each(visible, monkeypatch):
    outcome = bound(monkeypatch, visible)
    assert (outcome.status, "8 ranks use 8 GPUs" in outcome.reason) == ("pass", True), outcome


def test_a_rank_tells_the_first_which_gpu_it_has(monkeypatch):
    store = torch.distributed.HashStore()
    monkeypatch.setattr(machine, "open_store", lambda rank: store)
    for name, value in {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "SLURMD_NODENAME": "node1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=f"GPU-{index}"))
    assert machine.binding(GPU).status == "not run"
    assert json.loads(store.get("gpu/5")) == ["GPU-1", "node1", 4]


@pytest.mark.parametrize("visible", [lambda rank: "0", lambda rank: "0,1"])
def test_ranks_on_one_gpu(visible, monkeypatch):
    outcome = bound(monkeypatch, visible)
    assert (outcome.status, "use the same GPU of node node0" in outcome.reason) == ("fail", True), outcome
    assert "CUDA_VISIBLE_DEVICES" in outcome.fix
