"""What a study's report says: outcomes against hand-made curves, effects against closed forms, the files it writes."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from megatron_rl.errors import InputError
from megatron_rl.lab import load_study
from megatron_rl.lab.report import write_docs, write_report
from megatron_rl.lab.results import read_results
from megatron_rl.lab.statistics import interval_half_width, outcome_of, paired_effect
from megatron_rl.lab.study import Outcome
from megatron_rl.monitor.jsonl import encode_line
from tests.support.rounding import printed, rounded, standard_errors

LAB = Path(__file__).parents[3] / "recipes" / "lab"


def outcome(statistic, values, **more):
    """The outcome of a metric with these values at steps 0, 1, …; None in ``values`` is a step without it."""
    records = [{"step": step} | ({} if v is None else {"m": v}) for step, v in enumerate(values)]
    return outcome_of(records, Outcome(metric="m", statistic=statistic, **more))


def test_outcomes_of_a_curve():
    assert outcome("last", [1.0, 3.0, None]) == 3.0
    assert outcome("max", [1.0, 7.0, 2.0]) == 7.0
    assert outcome("mean", [1.0, None, 4.0, math.nan]) == 2.5
    assert outcome("slope", [5.0, 3.0, 1.0]) == rounded(-2)
    assert outcome("log_slope", [0.01 * math.exp(0.3 * t) for t in range(6)]) == rounded(0.3)
    # zeros (a step without mismatch) are left out, steps stay where they are
    assert outcome("log_slope", [1.0, 0.0, math.e**2, math.e**3]) == rounded(1.0)
    assert outcome("log_slope", [0.0, 0.0, 0.0]) is None
    # symmetric around its middle: no correlation with the step; 0, 0, 1 is the textbook sqrt(3)/2
    assert outcome("step_pcc", [1.0, 0.0, 1.0]) == rounded(0)
    assert outcome("step_pcc", [0.0, 0.0, 1.0]) == rounded(math.sqrt(3) / 2)
    assert outcome("step_pcc", [2.0, 2.0, 2.0]) is None
    assert outcome("last", [None, None]) is None


def test_collapse_is_half_of_the_best_running_mean():
    healthy = [0.5, 0.6, 0.7, 0.8, 0.8, 0.8]
    assert outcome("collapse_step", healthy, window=2) == 6  # never: the number of steps
    # best mean of two is 0.8; (0.8 + 0.1)/2 = 0.45 is above half of it, (0.1 + 0.6)/2 = 0.35 below
    assert outcome("collapse_step", [*healthy, 0.1, 0.6, 0.9], window=2) == 7
    assert outcome("collapse_step", [0.8, 0.41], window=1) == 2
    assert outcome("collapse_step", [0.8, 0.39], window=1) == 1
    assert outcome("collapse_step", [0.8], window=2) is None


def test_paired_effect_is_students_t_of_the_differences():
    # differences 1, 2, 3: mean 2, deviation 1; t of 2 degrees of freedom has 97.5% at 4.3027 (closed form)
    effect = paired_effect({0: 11.0, 1: 22.0, 2: 33.0}, {0: 10.0, 1: 20.0, 2: 30.0})
    t2 = 0.95 / math.sqrt(2 * 0.975 * 0.025) / math.sqrt(1)  # quantile p: (2p - 1) / sqrt(2 p (1 - p))
    assert t2 == printed(4.302653, 6)
    assert (effect.num_seeds, effect.mean, effect.d) == (3, rounded(2), rounded(2))
    assert (effect.lower, effect.upper) == (rounded(2 - t2 / math.sqrt(3)), rounded(2 + t2 / math.sqrt(3)))
    # two seeds: t of 1 degree is tan(0.475 π)
    two = paired_effect({0: 1.0, 1: 3.0}, {0: 0.0, 1: 0.0})
    assert two.upper - two.mean == rounded(math.tan(0.475 * math.pi) * math.sqrt(2) / math.sqrt(2))
    assert interval_half_width(3) == rounded(t2 / math.sqrt(3))


def test_effects_pair_by_seed_and_ratios_are_of_logarithms():
    assert paired_effect({1: 5.0, 3: 8.0}, {2: 1.0}) is None
    assert paired_effect({1: 5.0, 3: 8.0}, {1: 4.0, 2: 0.0}).mean == 1.0
    one = paired_effect({1: 5.0}, {1: 4.0})
    assert (one.lower, one.upper, one.excludes_none) == (-math.inf, math.inf, False)
    assert math.isnan(one.d)
    ratio = paired_effect({0: 2.0, 1: 8.0}, {0: 1.0, 1: 1.0}, ratio=True)
    assert ratio.mean == rounded(4)
    assert ratio.lower * ratio.upper == rounded(16)  # symmetric in the logarithm
    assert ratio.d == rounded(math.log(4) / (math.log(4) / math.sqrt(2)))
    assert paired_effect({0: 0.0}, {0: 1.0}, ratio=True) is None


def test_the_interval_covers_the_true_difference_95_times_in_100():
    rng = np.random.default_rng(0)
    hits = 0
    for _ in range(2000):
        differences = rng.normal(0.7, 2.0, size=3)
        effect = paired_effect(dict(enumerate(differences)), dict.fromkeys(range(3), 0.0))
        hits += effect.lower < 0.7 < effect.upper
    assert abs(hits / 2000 - 0.95) < standard_errors(math.sqrt(0.95 * 0.05), 2000)


@pytest.mark.parametrize(
    ("differences", "verdicts"),
    [
        ((1.0, 1.1, 0.9), {"higher": "as predicted", "lower": "contrary", "same": "contrary"}),
        ((-1.0, -1.1, -0.9), {"higher": "contrary", "lower": "as predicted", "same": "contrary"}),
        ((1.0, -1.0, 0.9), {"higher": "undecided", "lower": "undecided", "same": "not contradicted"}),
    ],
)
def test_a_verdict_needs_an_interval_that_excludes_no_effect(differences, verdicts):
    for ratio in (False, True):
        scale = [math.exp(d) if ratio else d for d in differences]
        effect = paired_effect(dict(enumerate(scale)), dict.fromkeys(range(3), 1.0 if ratio else 0.0), ratio)
        assert {expected: effect.verdict(expected) for expected in verdicts} == verdicts


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Made-up finished runs of the length-decay study: the arm `auto` ends 0.2 higher, `small` lacks a seed."""
    root = tmp_path_factory.mktemp("runs")
    study = load_study(LAB / "length_decay")
    for job in study.jobs(root):
        if (job.arm, job.seed) == ("small", 2):
            continue
        folder = root / job.name
        folder.mkdir()
        final = 0.4 + 0.01 * job.seed**2 + (0.2 + 0.001 * job.seed if job.arm == "auto" else 0)
        lines = [
            encode_line(step, {"critic/rewards/mean": 0.5, "mismatch/rho_std": 0.01 * 1.02**step, "actor/lr": 3e-4})
            for step in range(80)
        ]
        (folder / "metrics.jsonl").write_text("".join([*lines, encode_line(80, {"val/reward/mean": final})]))
        (folder / "DONE").write_text("80\n")
    return study, root


def test_report_holds_the_numbers_and_a_figure(runs):
    study, root = runs
    figure, text, values = write_report(study, root)
    assert figure.read_bytes().startswith(b"\x89PNG")
    report = text.read_text()
    # mean of 0.4, 0.41, 0.44 is 0.417, deviation 0.021; differences are 0.2, 0.201, 0.202
    assert "| constant | 0.417 ± 0.021 |" in report
    assert (
        "| auto | constant | val reward, end | +0.201 | +0.199 to +0.203 | +201.0 | higher | as predicted |" in report
    )
    assert "| auto | constant | growth of rho_std | +0 |" in report
    assert "Not finished and not counted: small-seed2." in report
    stored = json.loads(values.read_text())
    assert stored["auto"]["val reward, end"] == {"0": 0.6, "1": 0.611, "2": 0.642}
    assert stored["small"]["growth of rho_std"]["0"] == printed(math.log(1.02), 7)


def test_docs_tables_go_between_the_marks(runs, tmp_path):
    study, root = runs
    page = tmp_path / "lab" / "length_decay.md"
    with pytest.raises(InputError, match="lab: length_decay"):
        write_docs(study, root, tmp_path)
    page.parent.mkdir()
    page.write_text("before\n")
    with pytest.raises(InputError, match="lab: length_decay"):
        write_docs(study, root, tmp_path)
    page.write_text("before\n<!-- lab: length_decay -->\nold\n<!-- /lab: length_decay -->\nafter\n")
    write_docs(study, root, tmp_path)
    once = page.read_text()
    write_docs(study, root, tmp_path)
    assert page.read_text() == once
    assert once.startswith("before\n<!-- lab: length_decay -->\n![")
    assert once.endswith("<!-- /lab: length_decay -->\nafter\n")
    assert "old" not in once
    assert json.loads((tmp_path / "lab" / "length_decay.json").read_text()).keys() == study.study.arms.keys()
    assert (tmp_path / "images" / "lab-length_decay.png").stat().st_size < 200_000


def test_nothing_finished_is_said(tmp_path):
    with pytest.raises(InputError, match=r"no finished run of study hacking; start it with `megatron-rl lab run`"):
        read_results(load_study(LAB / "hacking"), tmp_path)
