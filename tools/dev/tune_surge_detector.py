"""How often the surge detector is right on made-up curves: the evidence behind its defaults.

    python -m tools.dev.tune_surge_detector [--seeds N] [--try surge_ratio=2.2,smoothing_steps=5 ...]

One block per setting (the defaults first), one row per curve, one column per noise level; each cell is the share of
seeds with the right outcome: silence for the quiet curves, one report within 5 steps of a threefold surge, and a period
of 1.8 × the reported step within 10% of the paper's 204 and 160 on its two curves (arXiv 2602.01826).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

import numpy as np
import yaml
from pydantic import ValidationError

from megatron_rl.config.learner import DetectorConfig
from megatron_rl.errors import EXIT_BAD_INPUT, EXIT_DONE
from megatron_rl.schedule import SurgeDetector
from tools.dev import length_curves

NOISES = (0.0, 0.05, 0.10, 0.15, 0.20, 0.25)
Outcome = Callable[[int | None], bool]


def silent(step: int | None) -> bool:
    return step is None


def within_five(at: int) -> Outcome:
    return lambda step: step is not None and at <= step <= at + 5


def period_near(target: int) -> Outcome:
    return lambda step: step is not None and abs(round(1.8 * step) - target) <= 0.1 * target


CASES: list[tuple[str, length_curves.Curve, Outcome]] = [
    ("flat", length_curves.flat(), silent),
    ("growth 10%/100 steps", length_curves.growth(0.10), silent),
    ("growth 20%/100 steps", length_curves.growth(0.20), silent),
    ("spikes x8", length_curves.spikes(), silent),
    ("decline 30%/100 steps", length_curves.decline(), silent),
    ("surge x3 at 40", length_curves.step_surge(40, num_steps=100), within_five(40)),
    ("surge x3 at 250", length_curves.step_surge(250), within_five(250)),
    *(
        (f"paper {centre}, to {high:.0f}", length_curves.paper_curve(centre, high, num_steps=200), period_near(target))
        for centre, target in ((110, 204), (90, 160))
        for high in (3000.0, 3500.0, 4000.0)
    ),
]


def surge_step(config: DetectorConfig, lengths: np.ndarray) -> int | None:
    """The step that the detector reports on ``lengths`` [num_steps], or None."""
    detector = SurgeDetector(config)
    return next((s for s, length in enumerate(lengths) if detector.observe(s, length) is not None), None)


def report(config: DetectorConfig, seeds: int) -> None:
    print("  ".join(f"{key}={value}" for key, value in config.model_dump().items()))
    print(f"{'noise':<24}" + "".join(f"{noise:>8.2f}" for noise in NOISES))
    for name, curve, outcome in CASES:
        cells = []
        for noise in NOISES:
            right = [outcome(surge_step(config, curve(np.random.default_rng(seed), noise))) for seed in range(seeds)]
            cells.append(f"{np.mean(right):>8.3f}")
        print(f"{name:<24}" + "".join(cells), flush=True)
    print()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--try", dest="settings", action="append", default=[], metavar="KEY=VALUE,...")
    options = parser.parse_args(argv)
    try:
        configs = [DetectorConfig()]
        for setting in options.settings:
            pairs = [pair.partition("=") for pair in setting.split(",")]
            configs.append(DetectorConfig.model_validate({key: yaml.safe_load(value) for key, _, value in pairs}))
    except ValidationError as error:
        print(f"tune_surge_detector: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT
    for config in configs:
        report(config, options.seeds)
    return EXIT_DONE


if __name__ == "__main__":
    sys.exit(main())
