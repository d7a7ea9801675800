"""The study of bf16 softmax gives the figures of "objective-level hacking", App. C.1."""

from __future__ import annotations

import pytest

from megatron_rl.commands.softmax_study import PAPER, study


def test_the_papers_figures():
    found = study(seed=0)
    assert found["mean"] == pytest.approx(PAPER["mean"], abs=1e-4)
    assert found["std"] == pytest.approx(PAPER["std"], abs=1e-4)
    assert found["max"] == pytest.approx(PAPER["max"], abs=3e-3)
    assert found["min"] == pytest.approx(PAPER["min"], abs=3e-3)
    assert 0 < found["kl"] < 1e-4


def test_a_seed_is_one_draw():
    first, again, other = study(3, 4000), study(3, 4000), study(4, 4000)
    assert first == again
    assert first["std"] != other["std"]
