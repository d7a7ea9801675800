"""What the reader of a checkpoint's index gives to the pickle that it reads."""

from __future__ import annotations

import pickle

import pytest
from torch.distributed.checkpoint.metadata import MetadataIndex

from megatron_rl.checkpoint.save import INDEX_FILE, no_foreign_code
from megatron_rl.errors import InputError

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
