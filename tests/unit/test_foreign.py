"""What the reader of a checkpoint's index gives to the pickle that it reads."""

from __future__ import annotations

import pickle

import pytest
from torch.distributed.checkpoint.metadata import MetadataIndex

from megatron_rl.errors import InputError
from megatron_rl.learner.foreign import INDEX_FILE, no_foreign_code

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


def test_classes_of_an_index_are_read(tmp_path):
    (tmp_path / INDEX_FILE).write_bytes(pickle.dumps(MetadataIndex("weight")))
    with no_foreign_code(tmp_path):
        pass
