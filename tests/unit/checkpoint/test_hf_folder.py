"""Which files of a Hugging Face folder count: one reader for learner, rollout engine and converter."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from megatron_rl.checkpoint.hf_folder import INDEX_FILE, SINGLE_FILE, HFFolder
from megatron_rl.errors import InputError


def write(folder: Path, files: dict[str, dict[str, float]], index: dict[str, str] | None = None) -> Path:
    """``files``: file name → tensor name → value of its two elements."""
    for file, tensors in files.items():
        save_file({name: torch.full((2,), value) for name, value in tensors.items()}, folder / file)
    if index is not None:
        (folder / INDEX_FILE).write_text(json.dumps({"weight_map": index}))
    return folder


def values(folder: HFFolder) -> dict[str, float]:
    return {name: float(tensor[0]) for name, tensor in folder.items()}


def test_a_stray_file_beside_an_index_is_not_read(tmp_path):
    """A left-over file sorts behind the real ones; a reader of all files would take its tensors."""
    files = {
        "model-00001.safetensors": {"a": 1.0},
        "model-00002.safetensors": {"b": 2.0},
        "old.safetensors": {"a": 9.0},
    }
    index = {"a": "model-00001.safetensors", "b": "model-00002.safetensors"}
    folder = HFFolder(write(tmp_path, files, index))
    assert values(folder) == {"a": 1.0, "b": 2.0}
    assert float(folder("a")[0]) == 1.0
    assert [file.name for file in folder.files] == ["model-00001.safetensors", "model-00002.safetensors"]


def test_a_tensor_that_two_files_hold_comes_from_the_one_that_the_index_names(tmp_path):
    files = {"x.safetensors": {"a": 1.0, "b": 2.0}, "y.safetensors": {"a": 9.0, "c": 3.0}}
    folder = HFFolder(write(tmp_path, files, {"a": "x.safetensors", "b": "x.safetensors", "c": "y.safetensors"}))
    assert values(folder) == {"a": 1.0, "b": 2.0, "c": 3.0}


def test_a_single_file_needs_no_index(tmp_path):
    folder = HFFolder(write(tmp_path, {SINGLE_FILE: {"a": 1.0}}))
    assert folder.shapes() == {"a": (2,)}
    assert folder.dtype("a") == torch.float32
    assert "a" in folder
    assert "b" not in folder
    with pytest.raises(InputError, match="has no tensor b; is it complete"):
        folder("b")


@pytest.mark.parametrize(
    ("files", "index", "message"),
    [
        ({}, None, f"holds neither {SINGLE_FILE} nor {INDEX_FILE}"),
        ({"part.safetensors": {"a": 1.0}}, None, f"holds neither {SINGLE_FILE}"),
        ({SINGLE_FILE: {"a": 1.0}, "old.safetensors": {"a": 9.0}}, None, "also old.safetensors, and no .* says which"),
        ({}, {"a": "gone.safetensors"}, "gone.safetensors cannot be read"),
        ({"x.safetensors": {"b": 1.0}}, {"a": "x.safetensors"}, "names x.safetensors for a, which is not in it"),
    ],
)
def test_what_is_missing_or_ambiguous_is_an_error(tmp_path, files, index, message):
    with pytest.raises(InputError, match=message):
        HFFolder(write(tmp_path, files, index))


def test_damaged_files_are_errors(tmp_path):
    (tmp_path / SINGLE_FILE).write_bytes(b"not safetensors")
    with pytest.raises(InputError, match=r"cannot be read .* is the download complete"):
        HFFolder(tmp_path)
    (tmp_path / INDEX_FILE).write_text("{}")
    with pytest.raises(InputError, match="is not an index of safetensors files"):
        HFFolder(tmp_path)
