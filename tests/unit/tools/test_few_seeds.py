"""Verdicts of few seeds: false findings at all looks together stay within the level."""

import numpy as np
import pytest
from scipy import stats

from tools.dev import few_seeds

STUDIES = 150
NORMAL, MEAN = few_seeds.SHAPES["normal"]


@pytest.mark.parametrize("shape", few_seeds.SHAPES)
def test_looks_together_find_nothing_false_beyond_the_level(shape):
    draw, _ = few_seeds.SHAPES[shape]
    share = few_seeds.false_findings(draw, few_seeds.LOOKS, STUDIES, np.random.default_rng(1))
    assert share * STUDIES <= stats.binom.ppf(0.999, STUDIES, 0.055)


def test_looks_without_a_price_do(monkeypatch):
    monkeypatch.setattr(few_seeds, "price_of_look", lambda look: 1)
    share = few_seeds.false_findings(NORMAL, few_seeds.LOOKS, STUDIES, np.random.default_rng(1))
    assert share > 0.055


def test_intervals_of_normal_outcomes_hold():
    covered = few_seeds.coverage(NORMAL, MEAN, 4, STUDIES, np.random.default_rng(1))
    assert covered * STUDIES >= stats.binom.ppf(0.001, STUDIES, 0.95)
