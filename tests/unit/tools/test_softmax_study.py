"""The study of bf16 softmax gives the figures of "objective-level hacking", App. C.1."""

from __future__ import annotations

import math

import pytest
import torch

from megatron_rl.commands.softmax_study import PAPER, histogram_kl, study


def test_the_papers_figures():
    found = study(seed=0)
    assert found["mean"] == pytest.approx(PAPER["mean"], abs=1e-4)
    assert found["std"] == pytest.approx(PAPER["std"], abs=1e-4)
    assert found["max"] == pytest.approx(PAPER["max"], abs=3e-3)
    assert found["min"] == pytest.approx(PAPER["min"], abs=3e-3)
    assert 0 < found["kl"] < 1e-4


def test_the_two_divergences_are_two_things():
    """That of the histograms is 0 for equal samples; where one moved, the bins that it left and filled count."""
    exact = torch.tensor([0.1, 0.1, 0.9, 0.9], dtype=torch.float64)
    assert histogram_kl(exact, exact) == 0
    moved = torch.tensor([0.1, 0.1, 0.9, 0.5], dtype=torch.float64)
    want = 0.5 * math.log(0.5 / 0.25) + 1e-10 * math.log(1e-10 / 0.25)
    assert histogram_kl(exact, moved) == pytest.approx(want, abs=1e-8)


def test_a_seed_is_one_draw():
    first, again, other = study(3, 4000), study(3, 4000), study(4, 4000)
    assert first == again
    assert first["std"] != other["std"]
