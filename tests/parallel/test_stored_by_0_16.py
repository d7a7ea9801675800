"""A checkpoint and a recorded batch that runs under megatron-core 0.16.1 wrote are read bit for bit.

data/stored-by-0.16.1.tar.xz was written at 73ba9e5: a tiny GLM-4 MoE in bf16 with router biases after two updates, and
one batch of recipes/tiny/r3.yaml. Beside them are the CRC-32 sums that their writer took (sums.json, batch.json). The
weights that the learner starts from are made here: the checkpoint has others.
"""

import json
import shutil
import tarfile
from pathlib import Path

import pytest
from transformers import AutoConfig

from tests.parallel.gloo import run_ranks
from tools.dev.make_tiny_checkpoint import build_model, save_checkpoint

STORED = Path(__file__).parent / "data" / "stored-by-0.16.1.tar.xz"
PROGRAM = "tests.parallel.programs.stored"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("stored")
    with tarfile.open(STORED) as archive:
        archive.extractall(path)
    save_checkpoint(build_model(AutoConfig.from_pretrained(path / "model")), path / "start")
    shutil.copy(path / "start" / "model.safetensors", path / "model")
    return path


def test_a_checkpoint(folder):
    (result,) = run_ranks(PROGRAM, "read", 1, folder=str(folder))
    assert result["state"] == {"note": "kept"}
    assert result["updates"] == 2
    assert result["sums"] == json.loads((folder / "sums.json").read_text())
    assert result["grad_norm"] > 0


def test_a_recorded_batch(folder):
    (sums,) = run_ranks(PROGRAM, "sums_of_batch", 1, folder=str(folder / "batches" / "step_00000000.json"))
    assert sums == json.loads((folder / "batch.json").read_text())
