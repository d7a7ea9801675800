"""How often the verdicts of `run branch` are wrong where nothing differs, and its intervals where something does.

    python -m tools.dev.few_seeds [--studies 2000] [--seeds 3 4 5 7 10]

`false`: studies of three arms that are the control's twins, with an arm that "brings it back" or "makes it worse" at
one look, or at any of the looks at 3, 5, 8 and 12 seeds. `covered`: intervals of one arm against a steady control that
hold the true difference. Arms are normal, log-normal, of two values, or collapse in a fifth of their seeds.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import numpy as np

from megatron_rl.instruments.branch.verdict import price_of_look
from megatron_rl.instruments.lab.results import holm, paired_effect

LOOKS = (3, 5, 8, 12)
ARMS = 3
STEADY = 0.02  # standard deviation of a run of the steady control
Draw = Callable[[np.random.Generator, int], np.ndarray]
SHAPES: dict[str, tuple[Draw, float]] = {
    "normal": (lambda random, n: random.normal(0.5, 0.1, n), 0.5),
    "log-normal": (lambda random, n: random.lognormal(-1, 0.5, n), float(np.exp(-1 + 0.125))),
    "two values": (lambda random, n: np.where(random.random(n) < 0.3, 0.0, 1.0), 0.7),
    "collapses": (lambda random, n: np.where(random.random(n) < 0.2, 0.2, 0.8) + random.normal(0, 0.02, n), 0.68),
}
"""Outcomes of an arm's seeds, and their mean."""


def is_false(arms: np.ndarray, control: np.ndarray, look: int) -> bool:
    """Return whether an arm of ``arms`` [arms, n] has a verdict against ``control`` [n] at this look."""
    effects = [paired_effect(dict(enumerate(arm)), dict(enumerate(control))) for arm in arms]
    price = price_of_look(look)
    p_values = holm([effect.p for effect in effects])
    verdicts = [effect.verdict("higher", adjusted=price * p) for effect, p in zip(effects, p_values, strict=True)]
    return any(verdict in ("as predicted", "contrary") for verdict in verdicts)


def false_findings(draw: Draw, sizes: tuple[int, ...], studies: int, random: np.random.Generator) -> float:
    """Return the share of studies with a finding at any look at ``sizes`` seeds; all arms have one distribution."""
    found = 0
    for _ in range(studies):
        runs = draw(random, (ARMS + 1) * sizes[-1]).reshape(ARMS + 1, -1)
        found += any(is_false(runs[1:, :size], runs[0, :size], look) for look, size in enumerate(sizes, 1))
    return found / studies


def coverage(draw: Draw, mean: float, seeds: int, studies: int, random: np.random.Generator) -> float:
    """Return the share of intervals of an arm against a steady control that hold the true difference."""
    held = 0
    for _ in range(studies):
        arm, control = draw(random, seeds), random.normal(0.8, STEADY, seeds)
        effect = paired_effect(dict(enumerate(arm)), dict(enumerate(control)))
        held += effect.lower <= mean - 0.8 <= effect.upper
    return held / studies


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--studies", type=int, default=2000)
    parser.add_argument("--seeds", type=int, nargs="+", default=[3, 4, 5, 7, 10])
    options = parser.parse_args()
    random = np.random.default_rng(0)
    print("            false at one look        at looks   covered")
    print("            " + " ".join(f"{n:>4}" for n in options.seeds) + f"  {LOOKS}   " + f"{options.seeds}")
    for name, (draw, mean) in SHAPES.items():
        once = [false_findings(draw, (n,), options.studies, random) for n in options.seeds]
        looks = false_findings(draw, LOOKS, options.studies, random)
        covered = [coverage(draw, mean, n, options.studies, random) for n in options.seeds]
        row = " ".join(f"{share:4.1%}" for share in once)
        print(f"{name:11} {row}  {looks:13.1%}   " + " ".join(f"{share:.0%}" for share in covered), flush=True)


if __name__ == "__main__":
    main()
