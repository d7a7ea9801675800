"""The first layers of a model as a folder of their own, and the memory that a comparison takes, by arithmetic."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megatron_rl.checkpoint.hf_folder import HFFolder, check_weights
from megatron_rl.errors import InputError
from megatron_rl.instruments.parity import transformers_taps, witnesses
from megatron_rl.instruments.parity.witnesses import fewest_layers, first_layers_of, write_first_layers
from megatron_rl.instruments.plan.hardware import GIB
from megatron_rl.model.architecture import read_architecture, shape_of
from tests.support.families import save_family
from tests.support.tiny import MODEL

TOKENS = [[5, 9, 2, 7, 11]]


def taps_of(model):
    return transformers_taps.taps_of(transformers_taps.load(model, torch.float32), TOKENS, 1.0)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_next", "qwen2_moe", "glm4_moe", "deepseek_v3", "olmoe"])
def test_the_first_layers_compute_what_they_do_in_the_whole_model(tmp_path, family):
    whole = save_family(tmp_path / "whole", family)
    write_first_layers(whole, 2, tmp_path / "cut")
    cut = read_architecture(tmp_path / "cut")
    assert (cut.num_layers, cut.hidden_size) == (2, read_architecture(whole).hidden_size)
    assert cut.moe_layers == read_architecture(whole).moe_layers[:2]
    assert check_weights(HFFolder(tmp_path / "cut"), cut) == []
    before, after = taps_of(whole), taps_of(tmp_path / "cut")
    in_layers = [tap for tap in before.taps if tap.startswith(("0.", "1."))]
    assert in_layers == [tap for tap in after.taps if "." in tap]
    assert [tap for tap in in_layers if not torch.equal(before.taps[tap], after.taps[tap])] == []
    assert not torch.equal(before.taps["logits"], after.taps["logits"])


def test_layers_that_cannot_be_cut_are_refused(tmp_path):
    model = save_family(tmp_path / "model", "deepseek_v3")
    a = read_architecture(model)
    assert fewest_layers(a) == 2
    with pytest.raises(InputError, match="--layers 1: the model has 3 layers; 2 … 3 are allowed: layer 1 is the first"):
        first_layers_of(a, 1)
    with pytest.raises(InputError, match="2 … 3 are allowed: layer 1 is the first with attention"):
        first_layers_of(read_architecture(save_family(tmp_path / "delta", "qwen3_next")), 1)
    with pytest.raises(InputError, match="--layers 5: the model has 4 layers; 1 … 4 are allowed"):
        first_layers_of(read_architecture(MODEL), 5)


def test_a_folder_without_room_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=1000))
    with pytest.raises(InputError, match=r"--layers 2 writes .* below .*; name another folder with TMPDIR"):
        write_first_layers(MODEL, 2, tmp_path / "cut")


def qwen3_30b():
    return shape_of(Path("models/Qwen3-30B-A3B"))[0]


def test_memory_at_30_billion_parameters():
    """By hand: 48 layers of 63 616 numbers a token, of which 32 768 are rows of experts; embedding and head 152 k."""
    setup, outside = witnesses.of_model(MODEL, "bf16", [[1] * 103]), 2 * 2048 + 151936
    taps, definition = 103 * (48 * 63616 + outside) * 2, 103 * (48 * (63616 - 32768) + outside) * 16
    expected = 2 * 30.53e9 + 6 * taps + definition + 151936 * 2048 * 16
    assert witnesses.host_gib(setup, qwen3_30b()) == pytest.approx(expected / GIB + 3, rel=1e-3)


def test_a_model_too_large_is_refused(monkeypatch, tmp_path):
    setup = witnesses.of_model(MODEL, "bf16", [[1, 2, 3]])
    monkeypatch.setattr(witnesses, "read_architecture", lambda path: qwen3_30b())
    enough = witnesses.host_gib(setup, first_layers_of(qwen3_30b(), 2))
    with pytest.raises(InputError, match=r"48 layers of .* take 6\d\.\d GiB of host memory, .*; --layers 2 fits"):
        witnesses.refuse_without_memory(setup, None, enough)
    witnesses.refuse_without_memory(setup, 2, enough)
    with pytest.raises(InputError, match=r"3 layers of .*; --layers 2 fits"):
        witnesses.refuse_without_memory(setup, 3, enough)
    with pytest.raises(InputError, match="not even its first layers fit"):
        witnesses.refuse_without_memory(setup, None, 5.0)
    assert enough == pytest.approx(witnesses.host_gib(setup, first_layers_of(qwen3_30b(), 1)) + 1.25e9 / GIB, rel=0.02)
    assert json.loads((MODEL / "config.json").read_text())["num_hidden_layers"] == 4
