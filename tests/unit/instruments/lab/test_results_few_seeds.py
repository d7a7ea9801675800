"""How often verdicts on few seeds are false where nothing differs, and what intervals hold where something does.

`python -m tests.unit.instruments.lab.test_results_few_seeds` makes 2000 studies of each kind.
"""

import numpy as np
import pytest

from megatron_rl.instruments.branch.verdict import price_of_look
from megatron_rl.instruments.lab.results import holm, paired_effect, unseen_told

LOOKS, ARMS, SEEDS = (3, 5, 8, 12), 3, (3, 4, 5, 7, 10, 28, 29)
SHAPES = {  # outcomes of an arm's seeds, and their mean
    "normal": (lambda random, n: random.normal(0.5, 0.1, n), 0.5),
    "log-normal": (lambda random, n: random.lognormal(-1, 0.5, n), float(np.exp(-1 + 0.125))),
    "two values": (lambda random, n: np.where(random.random(n) < 0.3, 0.0, 1.0), 0.7),
    "mixed": (lambda random, n: np.where(random.random(n) < 0.2, 0.2, 0.8) + random.normal(0, 0.02, n), 0.68),
}


def is_false(arms, control, look):
    """Whether an arm [n] has a verdict against the control at this look."""
    effects = [paired_effect(dict(enumerate(arm)), dict(enumerate(control))) for arm in arms]
    adjusted = [price_of_look(look) * p for p in holm([effect.p for effect in effects])]
    verdicts = [effect.verdict("higher", adjusted=p) for effect, p in zip(effects, adjusted, strict=True)]
    return bool({"as predicted", "contrary"} & {*verdicts})


def false_findings(shape, sizes, studies, random):
    """The share of studies with a finding at any look at ``sizes`` seeds, where all arms are alike."""
    found = 0
    for _ in range(studies):
        runs = SHAPES[shape][0](random, (ARMS + 1) * sizes[-1]).reshape(ARMS + 1, -1)
        found += any(is_false(runs[1:, :n], runs[0, :n], look) for look, n in enumerate(sizes, 1))
    return found / studies


def coverage(shape, seeds, studies, random):
    """The share of studies of an arm and a steady control whose interval holds the true difference; of those told."""
    draw, mean = SHAPES[shape]
    held = told = 0
    for _ in range(studies):
        effect = paired_effect(dict(enumerate(draw(random, seeds))), dict(enumerate(random.normal(0.8, 0.02, seeds))))
        held += effect.lower <= mean - 0.8 <= effect.upper
        told += bool(np.isfinite(effect.upper))
    return held / studies, told / studies


@pytest.mark.parametrize("shape", SHAPES)
def test_few_seeds_find_nothing_false_and_their_intervals_hold(shape):
    random = np.random.default_rng(0)
    for seeds in (3, 10):
        assert false_findings(shape, (seeds,), 200, random) <= 0.085  # 5.5% and two standard errors
        assert coverage(shape, seeds, 200, random) == (1.0, 0.0)  # cannot tell
    assert false_findings(shape, LOOKS, 100, random) <= 0.1
    held, told = coverage(shape, 29, 200, random)
    assert (held >= 0.89, told) == (True, 1.0)
    assert [len(unseen_told(seeds)) for seeds in (2, 28, 29)] == [1, 1, 0]


if __name__ == "__main__":
    for name in SHAPES:
        generator = np.random.default_rng(0)
        once = {n: f"{false_findings(name, (n,), 2000, generator):.1%}" for n in SEEDS[:5]}
        looks = f"{false_findings(name, LOOKS, 2000, generator):.1%}"
        held = {n: coverage(name, n, 2000, generator) for n in SEEDS}
        print(name, "false", once, "at looks", looks, "held, told", held)
