"""The copy of a rank's share that a save beside training writes."""

from types import SimpleNamespace

import torch

from megatron_rl.checkpoint import save as checkpoint


class OnGpu(torch.Tensor):
    """Says that it lies on a GPU."""

    is_cuda = True


def test_a_share_is_copied_and_what_comes_from_a_gpu_is_waited_for(monkeypatch):
    own, calls = torch.empty, []

    def empty(shape, dtype, pin_memory):
        calls.append("pinned" if pin_memory else "pageable")
        return own(shape, dtype=dtype)

    monkeypatch.setattr(torch, "empty", empty)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: calls.append("synchronize"))
    whole = torch.arange(8.0)
    shard = SimpleNamespace(data=whole[2:6].view(2, 2))
    checkpoint._copy_to_host([shard])
    assert calls == ["pageable"]
    whole.zero_()
    assert shard.data.tolist() == [[2.0, 3.0], [4.0, 5.0]]
    assert shard.data.untyped_storage().nbytes() == 16, "a copy of the part alone"
    parts = [SimpleNamespace(data=torch.ones(2).as_subclass(OnGpu)) for _ in range(2)]
    checkpoint._copy_to_host(parts)
    assert calls == ["pageable", "pinned", "pinned", "synchronize"]
