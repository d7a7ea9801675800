"""Storages that go to host memory and come back, with views into them; on a GPU (replaced here) page-locked."""

import gc
from types import SimpleNamespace

import pytest
import torch

from megatron_rl.config.learner import OffloadConfig
from megatron_rl.errors import Fault
from megatron_rl.learner.offload import HostCopy, Offload, Visitor


def storage_bytes(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().nbytes()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_storage_leaves_once_with_all_its_views(dtype):
    whole = torch.arange(60).to(dtype)
    views = [whole[:20].view(4, 5), whole[20:], whole.view(6, 10).t()[3:, 1::2]]
    other = torch.randn(3)
    kept, values = [view.clone() for view in views], other.clone()
    copy = HostCopy(torch.device("cpu"))
    copy.leave([*views, other])
    assert storage_bytes(whole) == storage_bytes(other) == 0
    assert [copy.holds(tensor) for tensor in (whole, *views, torch.ones(1))] == [True] * 4 + [False]
    assert all(torch.equal(copy.values(view), was) for view, was in zip(views, kept, strict=True))
    copy.come_back()
    assert storage_bytes(whole) == whole.numel() * whole.element_size()
    assert all(torch.equal(view, was) for view, was in zip(views, kept, strict=True))
    assert torch.equal(other, values)
    assert not copy.holds(whole)


def test_host_memory_is_taken_at_the_start_for_what_comes_later():
    """Adam has no moments before its first update; a node without room for them fails before it."""
    copy, first, later = HostCopy(torch.device("cpu"), expected=6144), torch.ones(1000), torch.full((500,), 2.0)
    copy.leave([first])
    place = copy._memory.data_ptr()
    assert copy._memory.numel() == 6144
    copy.come_back()
    copy.leave([first, later])
    assert (copy._memory.data_ptr(), copy._memory.numel()) == (place, 6144)
    copy.come_back()
    assert first.unique().tolist() == [1.0]
    assert later.unique().tolist() == [2.0]


def test_host_memory_is_kept_and_grows_with_what_leaves():
    copy, first, later = HostCopy(torch.device("cpu")), torch.ones(1000), torch.full((500,), 2.0)
    copy.leave([first])
    copy.leave([later])  # away already: nothing happens
    assert storage_bytes(later) == 2000
    place = copy._memory.data_ptr()
    copy.come_back()
    first.fill_(3.0)
    copy.leave([first])
    assert copy._memory.data_ptr() == place
    assert copy._memory.numel() == 4096  # 4000, aligned
    copy.come_back()
    copy.leave([first, later])
    assert copy._memory.numel() == 4096 + 2048
    copy.come_back()
    assert first.unique().tolist() == [3.0]
    assert later.unique().tolist() == [2.0]


class Cudart:
    def __init__(self, code: int) -> None:
        self.code, self.locked, self.calls = code, {}, []

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        self.locked[address] = nbytes
        return self.code

    def cudaHostUnregister(self, address: int) -> int:
        del self.locked[address]
        return 0


def on_a_gpu(monkeypatch, code: int = 0) -> Cudart:
    cudart = Cudart(code)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    stream = SimpleNamespace(synchronize=lambda: cudart.calls.append("synchronize"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: cudart.calls.append("empty_cache"))
    return cudart


def test_host_memory_of_a_gpu_is_locked_exactly_and_unlocked(monkeypatch):
    cudart, copy = on_a_gpu(monkeypatch), HostCopy(torch.device("cpu"))
    copy._is_gpu = True
    copy.leave([torch.ones(1000), torch.ones(3)])
    assert list(cudart.locked.values()) == [4096 + 512], "no power of two"
    assert cudart.calls == ["synchronize"], "storage is freed after its copy"
    copy.come_back()
    copy.leave([torch.ones(5000)])  # does not fit in what there is
    gc.collect()
    assert list(cudart.locked.values()) == [20480], "what is not used is unlocked"


def test_host_memory_that_cannot_be_locked(monkeypatch):
    on_a_gpu(monkeypatch, code=2)
    copy = HostCopy(torch.device("cpu"))
    copy._is_gpu = True
    tensor = torch.ones(4)
    with pytest.raises(Fault, match=r"could not lock .* GiB of host memory \(error 2\).*ulimit -l"):
        copy.leave([tensor])
    assert tensor.tolist() == [1.0] * 4


def test_the_cache_is_emptied_once_something_left(monkeypatch):
    cudart = on_a_gpu(monkeypatch)
    module = torch.nn.Linear(2, 2)
    for config, calls in ((OffloadConfig(), []), (OffloadConfig(weights=True), ["synchronize", "empty_cache"])):
        offload = Offload(config, None, module, SimpleNamespace(chained_optimizers=[]), torch.device("cpu"))
        offload._is_gpu = offload._weights._is_gpu = True
        cudart.calls = []
        offload.step_aside(weights=True)
        assert cudart.calls == calls
    assert storage_bytes(module.weight) == 0


def test_a_visitor_is_there_inside_alone(monkeypatch):
    cudart, weight = on_a_gpu(monkeypatch), torch.arange(6.0)
    visitor = Visitor([weight], torch.device("cpu"))
    assert weight.tolist() == [0, 1, 2, 3, 4, 5], "on a CPU it stays"
    visitor._leaves = True
    visitor._leave(first=True)
    for _ in range(2):
        assert storage_bytes(weight) == 0
        with visitor.here():
            assert weight.tolist() == [0, 1, 2, 3, 4, 5]
    assert storage_bytes(weight) == 0
    assert cudart.calls == ["empty_cache"] * 3
