"""The input of a plan: lengths of responses, and sizes."""

from __future__ import annotations

import math

import numpy as np
import pytest

from megatron_rl.__main__ import main
from megatron_rl.errors import InputError
from megatron_rl.instruments.plan.workload import assumed_lengths, read_lengths
from tests.support.planned import MOE, work
from tests.support.tiny import REPOSITORY


def test_lognormal_has_the_median_and_is_cut():
    lengths = read_lengths("lognormal:100,0.5,400", 8192)
    sample = lengths.quantiles(1000)
    assert sample.min() >= 1
    assert sample.max() == 400
    wanted = math.erf(math.log(400 / 100) / 0.5 / math.sqrt(2)) / 2 + 0.5
    assert abs((sample < 400).sum() - 1000 * wanted) <= 1
    assert (sample <= 100).sum() == 500
    assert read_lengths("lognormal:100,3", 50).quantiles(100).max() == 50


@pytest.mark.parametrize("mean", [1.0, 100.0, 3200.0, 4000.0, 4096.0])
def test_the_assumed_spread_has_the_given_mean(mean):
    """But for a millionth, to which it is found."""
    lengths = assumed_lengths(mean, 4096)
    assert abs(lengths.mean - mean) <= 1e-6 * mean
    assert lengths.quantiles(64).max() <= 4096


def test_lengths_of_a_file(tmp_path):
    file = tmp_path / "lengths.txt"
    file.write_text("3\n5\n900\n")
    lengths = read_lengths(str(file), 100)
    assert (lengths.mean, list(lengths.found)) == (36, [3, 5, 100])
    assert list(lengths.quantiles(1)) == [5]


def test_lengths_of_a_run(tmp_path):
    from safetensors.numpy import save_file

    (tmp_path / "batches").mkdir()
    for step in range(2):
        ends = np.array([0, 4, 4, 11 + step])
        save_file({"cu_response": ends}, tmp_path / "batches" / f"step_{step:08d}.safetensors")
    assert list(read_lengths(str(tmp_path), 100).found) == [4, 4, 7, 8]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("lognormal:16", "MEDIAN,SIGMA"),
        ("lognormal:0,1", "MEDIAN,SIGMA"),
        ("nothing-there", "no such file or directory"),
        (".", "record_batches"),
    ],
)
def test_wrong_lengths_are_refused(text, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=says):
        read_lengths(text, 100)


@pytest.mark.parametrize("content", ["", "12\nx\n", "0\n", "1.5\n"])
def test_a_wrong_file_is_refused(content, tmp_path):
    file = tmp_path / "lengths.txt"
    file.write_text(content)
    with pytest.raises(InputError, match=r"empty|entry"):
        read_lengths(str(file), 100)


def error_of(capsys, *arguments: str) -> str:
    assert main(["plan", *arguments]) == 2
    return capsys.readouterr().err


def test_size_comes_from_the_name_or_the_flags(capsys):
    tiny = str(REPOSITORY / "recipes" / "tiny" / "grpo.yaml")
    assert "--nodes and --gpus-per-node" in error_of(capsys, tiny, "--gpu", "h100-80")
    assert main(["plan", tiny, "--gpu", "h100-80", "--nodes", "1", "--gpus-per-node", "2"]) == 0
    assert work().ranks == 32
    with pytest.raises(InputError, match="does not divide the number of ranks"):
        work(MOE, nodes=1, gpus_per_node=6)


def test_rounds_of_their_own_size_are_counted():
    """64 prompts a step, 1.5 rounds of them expected: two rounds of 48 prompts, or one of 192."""
    assert work().sampled_sequences == 1.5 * 64 * 16
    assert work(MOE, "h100-80", "batch.generation_prompts=48").sampled_sequences == 2 * 48 * 16
    assert work(MOE, "h100-80", "batch.generation_prompts=192").sampled_sequences == 192 * 16
