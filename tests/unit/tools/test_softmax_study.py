"""The study of bf16 softmax gives the figures of "objective-level hacking", App. C.1."""

import math

import torch

from tests.support.rounding import rounded, standard_errors
from tools.dev.softmax_study import EMPTY_BIN, NUM_TOKENS, PAPER, histogram_kl, sample, study

HALF_DIGIT = 0.5e-4  # of the four decimals that the paper prints


def test_the_papers_figures():
    """The paper's draw is one and ours another: each figure within its printed digits and 5 standard errors of both."""
    figures, values = study(seed=0), sample(seed=0).ratios
    both = math.sqrt(2)
    squares = (values - values.mean()).square()
    assert abs(figures["mean"] - PAPER["mean"]) < both * standard_errors(figures["std"], NUM_TOKENS) + HALF_DIGIT
    spread = both * standard_errors(squares.std().item(), NUM_TOKENS) / (2 * figures["std"])  # of a root, by its slope
    assert abs(figures["std"] - PAPER["std"]) < spread + HALF_DIGIT
    # Of two draws of one size, more than 20 values of the one beyond the other's last have a probability of 2^-20.
    assert (values > PAPER["max"] + HALF_DIGIT).sum() <= 20
    assert (values < PAPER["min"] - HALF_DIGIT).sum() <= 20
    # A logit from 4 to 8 moves by 2^-6 at most in bf16: the extremes are of that size.
    assert math.log(figures["max"]) > 2**-7
    assert math.log(figures["min"]) < -(2**-7)
    # KL of a relative error e is E[e²]/2 to second order, or less where e shifts all tokens alike.
    assert 0 < figures["kl"] < (values - 1).square().mean().item()


def test_the_two_divergences_are_two_things():
    """That of the histograms is 0 for equal samples; where one moved, the bins that it left and filled count."""
    exact = torch.tensor([0.1, 0.1, 0.9, 0.9], dtype=torch.float64)
    assert histogram_kl(exact, exact) == 0
    moved = torch.tensor([0.1, 0.1, 0.9, 0.5], dtype=torch.float64)
    half, quarter = 0.5 + EMPTY_BIN, 0.25 + EMPTY_BIN
    want = half * math.log(half / quarter) + EMPTY_BIN * math.log(EMPTY_BIN / quarter)
    assert histogram_kl(exact, moved) == rounded(want)
