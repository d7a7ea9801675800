"""The copy of a rank's share that a save beside training writes, and what the reader of an index refuses."""

import pickle
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.checkpoint.metadata import MetadataIndex

from megatron_rl.checkpoint import save as checkpoint
from megatron_rl.checkpoint.save import INDEX_FILE, no_foreign_code
from megatron_rl.errors import InputError


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


METADATA, PLANNER = "torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.planner"


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("os", "mkdir"),
        (METADATA, "os"),
        (METADATA, "dataclass"),
        (METADATA, "__builtins__"),
        (METADATA, "MetadataIndex.__init__"),
        (PLANNER, "reduce"),
    ],
)
def test_names_that_no_index_needs_are_refused(module, name, tmp_path):
    (tmp_path / INDEX_FILE).write_bytes(f"c{module}\n{name}\n.".encode())
    with pytest.raises(InputError, match=f"index names {module}.{name}"), no_foreign_code(tmp_path):
        pytest.fail("it was let in")


@pytest.mark.parametrize("taken", ["__init__", "mro", "_member_map_"])
def test_getattr_takes_members_of_enumerations_alone(taken, tmp_path):
    """Python 3.11.2 pickles them so, 3.11.7 does not; each reads what the other wrote."""
    layout = f"cbuiltins\ngetattr\nc{METADATA}\n_MEM_FORMAT_ENCODING\nV{{}}\n\x86R."
    (tmp_path / INDEX_FILE).write_bytes(layout.format("TORCH_CONTIGUOUS_FORMAT").encode("latin-1"))
    with no_foreign_code(tmp_path):
        pass
    (tmp_path / INDEX_FILE).write_bytes(layout.format(taken).encode("latin-1"))
    with pytest.raises(InputError, match=f"index takes '{taken}' of "), no_foreign_code(tmp_path):
        pytest.fail("it was let in")
    (tmp_path / INDEX_FILE).write_bytes(
        layout.replace("_MEM_FORMAT_ENCODING", "MetadataIndex").format("fqn").encode("latin-1")
    )
    with pytest.raises(InputError, match="index takes 'fqn' of "), no_foreign_code(tmp_path):
        pytest.fail("it was let in")


def test_classes_of_an_index_are_read(tmp_path):
    (tmp_path / INDEX_FILE).write_bytes(pickle.dumps(MetadataIndex("weight")))
    with no_foreign_code(tmp_path):
        pass
