"""CUDA is not started before a process forks."""

import ast
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import megatron_rl
from megatron_rl.errors import InputError
from megatron_rl.process import ranks
from megatron_rl.process.devices import default_device, leave_default_stream, refuse_shared_gpus, sharing

PACKAGE = Path(megatron_rl.__file__).parent


def test_a_gpu_is_looked_for_without_the_cuda_runtime(monkeypatch):
    """As on a node with two GPUs: the driver answers, and the runtime must not be asked."""

    def runtime() -> int:
        raise AssertionError("the CUDA runtime was asked: forks of this process could not use CUDA")

    monkeypatch.delenv("PYTORCH_NVML_BASED_CUDA_CHECK", raising=False)
    monkeypatch.setattr(torch.cuda, "_is_compiled", lambda: True)
    monkeypatch.setattr(torch.cuda, "_device_count_nvml", lambda: 2)
    monkeypatch.setattr(torch.cuda, "_cached_device_count", None)
    monkeypatch.setattr(torch._C, "_cuda_getDeviceCount", runtime, raising=False)
    assert default_device() == "cuda"


def test_without_cuda_it_is_the_cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "_is_compiled", lambda: False)
    assert default_device() == "cpu"


@pytest.mark.parametrize(("own", "is_shared"), [("GPU-a", True), ("GPU-b", False)])
def test_two_ranks_on_one_gpu_are_refused(own, is_shared, monkeypatch):
    """GPUs are told apart by the driver's identifiers: each rank may call its own GPU number 0."""
    monkeypatch.setattr(ranks, "world_size", lambda: 2)
    monkeypatch.setattr(ranks, "gather_objects", lambda of_this_rank: [("GPU-a", "node1", 1), of_this_rank])
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=own))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("SLURMD_NODENAME", "node1")
    if is_shared:
        with pytest.raises(InputError, match="ranks 0, 1 use the same GPU of node node1"):
            refuse_shared_gpus(0)
    else:
        refuse_shared_gpus(0)


@pytest.mark.parametrize(
    ("variable", "value", "allowed"),
    [
        ("MRL_SHARE_GPUS", "1", True),
        ("MRL_SHARE_GPUS", "0", False),
        ("NCCL_MULTI_RANK_GPU_ENABLE", "1", True),
        ("NCCL_HOSTID", "1", False),
    ],
)
def test_ranks_may_share_a_gpu_on_purpose(variable, value, allowed, monkeypatch):
    monkeypatch.setenv(variable, value)
    assert (sharing([("GPU-a", "node1", 1)] * 2) == "") == allowed


@pytest.mark.parametrize(("current", "changes"), [("default", True), ("vLLM's", False)])
def test_the_default_stream_is_left_once(current, changes, monkeypatch):
    made: list[object] = []
    cuda = SimpleNamespace(
        is_available=lambda: True,
        current_stream=lambda: current,
        default_stream=lambda: "default",
        Stream=lambda device: ("new", device),
        set_stream=made.append,
    )
    monkeypatch.setattr(torch, "cuda", cuda)
    device = torch.device("cuda", 1)
    leave_default_stream(device)
    leave_default_stream(torch.device("cpu"))
    assert made == [("new", device) if changes else current]  # once more, for a vLLM that was imported since


def asks_cuda(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func).startswith("torch.cuda.")


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_module_touches_cuda_while_it_is_imported(path):
    """vLLM and reward workers fork. What a function does is its caller's affair; an import is anybody's."""
    pending, at_import = [ast.parse(path.read_text())], []
    while pending:
        node = pending.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            pending += [*node.args.defaults, *(d for d in node.args.kw_defaults if d)]
            pending += getattr(node, "decorator_list", [])
            continue
        at_import += [node.lineno] if asks_cuda(node) else []
        pending += ast.iter_child_nodes(node)
    assert not at_import, f"lines {at_import}"


def test_only_one_place_asks_whether_there_is_a_gpu():
    askers = [
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        if any(asks_cuda(n) and n.func.attr == "is_available" for n in ast.walk(ast.parse(path.read_text())))
    ]
    assert askers == ["process/devices.py"]
