"""Groups between GPUs under the rules of NCCL: the doctor's and the preflight's, on one node and on several."""

from __future__ import annotations

import ast
import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron_rl.doctor import rates
from megatron_rl.doctor.checks import Setting
from megatron_rl.errors import InputError
from megatron_rl.process import devices
from tests.support import nccl
from tests.support.nccl import Job

ROOT = Path(__file__).resolve().parents[3]
SETTING = Setting("cuda", 8, "")


@pytest.fixture
def network():
    spec = importlib.util.spec_from_file_location("network", ROOT / "slurm/lib/network.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def guessing(monkeypatch):
    """As if nobody named a GPU: barriers without device_ids, groups without device_id."""

    def forget() -> None:
        monkeypatch.setattr(rates, "barrier_devices", lambda device: None)
        init = nccl.init_process_group
        monkeypatch.setattr(dist, "init_process_group", lambda *a, device_id=None, **k: init(*a, **k))

    return forget


def doctor_in(job: Job, monkeypatch, before=lambda: None) -> list:
    monkeypatch.setitem(rates.LINK_BYTES, "cuda", 4 << 10)
    monkeypatch.setattr(rates, "open_store", lambda setting: job.store)
    nccl.steady(rates, monkeypatch)
    job._install(monkeypatch)
    before()
    monkeypatch.setattr(job, "_install", lambda patch: None)
    return job.run(monkeypatch, lambda: rates.collectives(SETTING))


@pytest.mark.parametrize(("nodes", "gpus"), [(1, 8), (2, 8), (4, 8), (2, 1)])
def test_the_doctors_groups(nodes, gpus, monkeypatch):
    job = Job(nodes, gpus)
    outcome, *others = doctor_in(job, monkeypatch)
    assert (outcome.status, job.bad_groups()) == ("pass", set()), outcome
    assert {other.status for other in others} == {"not run"}
    assert len(job.meetings) == (nodes * gpus + 1 if nodes * gpus > 2 else 2)


def test_the_doctors_groups_where_each_rank_sees_one_gpu(monkeypatch):
    job = Job(2, 4, environment=lambda rank: {"CUDA_VISIBLE_DEVICES": str(3 - rank % 4)})
    assert doctor_in(job, monkeypatch)[0].status == "pass"


def test_ranks_that_guess_their_gpu_hang(monkeypatch, guessing):
    """On one node of eight, in the pairs 1-2, 3-4 …: what a rank is first in a pair decides for good."""
    job = Job(1, 8)
    outcome = doctor_in(job, monkeypatch, guessing)[0]
    assert outcome.status == "fail"
    assert len(job.bad_groups()) == 3, job.bad_groups()
    assert "NCCL" in outcome.reason


def speeds(network, job: Job, monkeypatch) -> list[float]:
    """Of every group that the preflight makes, on the slower end."""
    speeds_of: dict[str, list[float]] = {}
    monkeypatch.setattr(network, "mebibytes", lambda: 1)
    nccl.steady(network, monkeypatch)

    def main() -> None:
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        for pair in [pair for pairs in network.ring(size) for pair in pairs if rank in pair]:
            speeds_of.setdefault(str(pair), []).append(network.speed_of(job.store, str(pair), pair.index(rank), 2))
        speeds_of.setdefault("all", []).append(network.speed_of(job.store, "all", rank, size))

    job.run(monkeypatch, main)
    return [min(both) for both in speeds_of.values()]


@pytest.mark.parametrize(("nodes", "groups"), [(2, 2), (4, 5)])
def test_the_preflights_groups(nodes, groups, network, monkeypatch):
    speed = speeds(network, Job(nodes, 8, per_node=1), monkeypatch)
    assert len(speed) == groups
    assert all(speed)


@pytest.mark.parametrize(("nodes", "groups"), [(2, 2), (4, 5)])
def test_a_preflight_that_guesses_hangs_in_every_group(nodes, groups, network, monkeypatch):
    job = Job(nodes, 8, per_node=1)
    job._install(monkeypatch)
    init = nccl.init_process_group
    monkeypatch.setattr(dist, "init_process_group", lambda *a, device_id=None, **k: init(*a, **k))
    monkeypatch.setattr(network, "barrier_devices", lambda device: None)
    monkeypatch.setattr(job, "_install", lambda patch: None)
    assert speeds(network, job, monkeypatch) == [0.0] * groups


# -- every call that makes a group, or waits in one


NAMES = ("barrier", "init_process_group", "split_group")


def calls() -> Iterator[tuple[str, ast.Call, str]]:
    """Where, the call, and the function's name: of all of ours that make groups or wait for ranks."""
    for folder in ("megatron_rl", "slurm", "tools"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            if not any(name in (text := path.read_text()) for name in NAMES):
                continue
            for node in ast.walk(ast.parse(text)):
                name = getattr(node.func, "attr", getattr(node.func, "id", "")) if isinstance(node, ast.Call) else ""
                if name in NAMES:
                    yield f"{path.relative_to(ROOT)}:{node.lineno}", node, name


def without_device(call: ast.Call, name: str) -> bool:
    """Whether NCCL would have to guess the GPU of ``call``."""
    given = {keyword.arg for keyword in call.keywords}
    if name == "barrier":
        return "device_ids" not in given
    if name == "init_process_group":
        backend = ast.unparse(call.args[0]) if call.args else ""
        # Of these two, one never reaches a GPU, and the other has gloo for what has no device (`test_process_groups`).
        return "device_id" not in given and backend not in ("'gloo'", "'fake'", "_backend(where)")
    return name == "split_group"


def test_no_call_leaves_its_gpu_to_nccl():
    calls_made = list(calls())
    assert {name for _, _, name in calls_made} >= {"barrier", "init_process_group"}
    assert [where for where, call, name in calls_made if without_device(call, name)] == []


@pytest.mark.parametrize(
    ("text", "is_bad"),
    [
        ("dist.barrier()", True),
        ("torch.distributed.barrier(group)", True),
        ("dist.barrier(device_ids=[0])", False),
        ("dist.init_process_group('nccl', store=store)", True),
        ("dist.init_process_group('gloo', store=store)", False),
        ("dist.init_process_group()", True),
        ("dist.init_process_group('nccl', device_id=device)", False),
    ],
)
def test_a_call_without_a_device_is_found(text, is_bad):
    call = ast.parse(text).body[0].value
    assert without_device(call, call.func.attr) == is_bad


def test_a_barrier_of_a_world_with_gloo_needs_no_gpu(monkeypatch):
    """The learner's world, and all groups that Megatron makes in it."""
    job = Job(2, 8)

    def main() -> None:
        rank = int(os.environ["RANK"])
        dist.init_process_group("cpu:gloo,cuda:nccl", store="world", rank=rank, world_size=16, timeout=None)
        dist.barrier()
        dist.all_reduce(torch.ones(1, device=torch.device("cuda", rank % 8)))

    job.run(monkeypatch, main)
    assert job.bad_groups() == set()


# -- which GPU a rank uses


def gpus(job: Job, monkeypatch) -> list[tuple[str, str, int]]:
    def main() -> tuple[str, str, int]:
        index = devices.local_gpu()
        return torch.cuda.get_device_properties(index).uuid, os.environ["SLURMD_NODENAME"], torch.cuda.device_count()

    return job.run(monkeypatch, main)


BINDINGS = {
    "all visible": lambda rank: {},
    "one a task, as each sees it": lambda rank: {"CUDA_VISIBLE_DEVICES": str(rank % 4)},
    "permuted": lambda rank: {"CUDA_VISIBLE_DEVICES": "3,1,0,2"},
    "two a task": lambda rank: {"CUDA_VISIBLE_DEVICES": f"{2 * (rank % 2)},{2 * (rank % 2) + 1}"},
    "MIG slices": lambda rank: {"CUDA_VISIBLE_DEVICES": f"MIG-{rank:08x}"},
}


@pytest.mark.parametrize("name", BINDINGS)
def test_every_rank_has_a_gpu_of_its_own(name, monkeypatch):
    per_node = 2 if name == "two a task" else 4
    gpu_of_rank = gpus(Job(2, 4, per_node=per_node, environment=BINDINGS[name]), monkeypatch)
    assert len({gpu for gpu, _, _ in gpu_of_rank}) == 2 * per_node
    assert devices.sharing(gpu_of_rank) == ""


@pytest.mark.parametrize(
    ("binding", "seen"),
    [({}, "4 GPUs"), ({"CUDA_VISIBLE_DEVICES": "2"}, "1 GPU"), ({"CUDA_VISIBLE_DEVICES": "0,1"}, "2 GPUs")],
)
def test_fewer_gpus_than_ranks_is_one_clear_error(binding, seen, monkeypatch):
    problem = devices.sharing(gpus(Job(2, 4, per_node=8, environment=lambda rank: binding), monkeypatch))
    assert "use the same GPU of node node0" in problem
    assert f"8 ranks run on that node, and each of these sees {seen}." in problem
    assert "--gpus-per-node=8" in problem


@pytest.mark.parametrize(("visible", "told"), [("", "CUDA_VISIBLE_DEVICES is ''"), (None, "is not set")])
def test_no_visible_gpu_is_one_clear_error(visible, told, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with pytest.raises(InputError, match=told):
        devices.local_gpu()
