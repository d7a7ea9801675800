"""What a study's report says: outcomes against hand-made curves, effects against closed forms, the files it writes."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from megatron_rl.errors import InputError
from megatron_rl.instruments.lab import load_study
from megatron_rl.instruments.lab.jobs import outcome_of
from megatron_rl.instruments.lab.report import MOST_COLUMNS, WIDTH, draw_study, write_report
from megatron_rl.instruments.lab.results import paired_effect, read_results, unseen_told
from megatron_rl.instruments.lab.runner import register
from megatron_rl.instruments.lab.study import Outcome
from megatron_rl.monitor.run_directory import encode_line
from tests.support.rounding import printed, rounded

LAB = Path(__file__).parents[4] / "recipes" / "lab"


def outcome(statistic, values, **more):
    """The outcome of a metric with these values at steps 0, 1, …; None in ``values`` is a step without it."""
    records = [{"step": step} | ({} if v is None else {"m": v}) for step, v in enumerate(values)]
    return outcome_of(records, Outcome(metric="m", statistic=statistic, **more))


def test_outcomes_of_a_curve():
    assert outcome("last", [1.0, 3.0, None]) == 3.0
    assert outcome("max", [1.0, 7.0, 2.0]) == 7.0
    assert outcome("mean", [1.0, None, 4.0, math.nan]) == 2.5
    assert np.mean([1e-4] * 200) > 1e-4  # a rate that a run yoked to it may not have
    assert outcome("mean", [1e-4] * 200) == 1e-4
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


def test_an_outcome_is_of_its_steps():
    curve = [9.0, 1.0, 2.0, 3.0, 9.0]
    assert outcome("mean", curve, first_step=1, last_step=3) == 2.0
    assert outcome("max", curve, first_step=1, last_step=3) == 3.0
    assert outcome("last", curve, last_step=2) == 2.0
    assert outcome("mean", curve, first_step=9) is None


def test_effects_pair_by_seed_and_ratios_are_of_logarithms():
    assert paired_effect({1: 5.0, 3: 8.0}, {2: 1.0}) is None
    assert paired_effect({1: 5.0, 3: 8.0}, {1: 4.0, 2: 0.0}).mean == 1.0
    one = paired_effect({1: 5.0}, {1: 4.0})
    assert (one.alike_lower, one.alike_upper) == (-math.inf, math.inf)
    assert math.isnan(one.d)
    ratio = paired_effect({0: 2.0, 1: 8.0}, {0: 1.0, 1: 1.0}, ratio=True)
    assert ratio.mean == rounded(4)
    assert ratio.alike_lower * ratio.alike_upper == rounded(16)  # symmetric in the logarithm
    assert ratio.d == rounded(math.log(4) / (math.log(4) / math.sqrt(2)))
    assert paired_effect({0: 0.0}, {0: 1.0}, ratio=True) is None


STUDY = """
name: made-up
title: A made-up study
source: nowhere
claim: two are better than one
setting: any
base: {base}
outcomes:
  reward: {{metric: val/reward/mean, statistic: last, margin: 0.05, spread: 0.02}}
  rho: {{metric: mismatch/rho_std, statistic: mean, ratio: true}}
  growth of rho: {{metric: mismatch/rho_std, statistic: log_slope}}
  collapse: {{metric: critic/rewards/mean, statistic: collapse_step}}
arms:
  none: {{}}
  one:
    set: {{num_steps: 79}}
    control: none
    differs_in: [num_steps]
    expect: {{reward: higher, growth of rho: same}}
  two: {{set: {{num_steps: 78}}, control: none, differs_in: [num_steps], expect: {{reward: same}}}}
  later: {{set: {{num_steps: 77}}, control: none, differs_in: [num_steps], expect: {{collapse: higher}}}}
primaries:
  - {{arm: one, outcome: reward}}
  - {{arm: two, outcome: reward}}
  - {{arm: later, outcome: collapse}}
trends:
  reward on rho: {{outcome: reward, dose: rho, arms: [none, one, two], expect: higher, doses: [0, 1], spread: 1}}
figure: [{{title: all, arms: [none, one, two]}}]
"""
NUM_STEPS = 12


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Made-up finished runs: the arm `one` ends 0.2 higher, `two` where the control does and lacks a seed."""
    root = tmp_path_factory.mktemp("runs")
    file = tmp_path_factory.mktemp("study") / "study.yaml"
    file.write_text(STUDY.format(base=LAB / "base.yaml"))
    study = load_study(file)
    for job in study.jobs(root):
        if job.arm == "later" or (job.arm, job.seed) == ("two", 2):
            continue
        folder = root / job.name
        folder.mkdir()
        final = 0.4 + 0.01 * job.seed**2 + {"none": 0.0, "one": 0.2, "two": 0.0}[job.arm] + 0.001 * job.seed
        final += 0.001 * (job.seed - 1) * (job.arm == "one")
        rho = {"none": 0.01, "one": 0.02, "two": 0.01}[job.arm]
        lines = [
            encode_line(step, {"critic/rewards/mean": 0.5, "mismatch/rho_std": rho * 1.02**step})
            for step in range(NUM_STEPS)
        ]
        (folder / "metrics.jsonl").write_text("".join([*lines, encode_line(NUM_STEPS, {"val/reward/mean": final})]))
        (folder / "DONE").write_text(f"{NUM_STEPS}\n")
    return study, root


def test_a_panel_without_curves_says_why(runs):
    study, root = runs
    results = read_results(study, root)
    for by_seed in results.records.values():
        for records in by_seed.values():
            for record in records:
                record["hacking/J"] = 0.0
    figure = draw_study(results)
    assert figure.get_figwidth() == MOST_COLUMNS * WIDTH, "panels beyond the third begin a new row"
    assert not any(axes.get_ylabel() for axes in figure.axes), "it would be read as the unit of the panel"
    said = {axes.get_title(): [text.get_text() for text in axes.texts] for axes in figure.axes}
    assert said["hacking/J"] == ["0 throughout"]
    assert said["entropy"] == ["not recorded"]
    assert said["reward"] == ["all"]  # the title of the row


def test_report_holds_the_numbers_and_a_figure(runs):
    study, root = runs
    figure, text, values = write_report(study, root)
    assert figure.read_bytes().startswith(b"\x89PNG")
    report = text.read_text()
    # mean of 0.4, 0.411, 0.442 is 0.418, deviation 0.022; the differences of `one` are 0.199, 0.2, 0.201
    assert "| none | 0.418 ± 0.022 |" in report
    assert "| one | none | reward | +0.2 | +0.198 to +0.202 |" in report
    assert "Not finished and not counted: later-seed0, later-seed1, two-seed2, later-seed2." in report
    # not a primary, and described
    stored = json.loads(values.read_text())
    assert stored["arms"]["one"]["reward"] == {"0": 0.599, "1": 0.611, "2": 0.643}
    assert stored["arms"]["none"]["growth of rho"]["0"] == printed(math.log(1.02), 7)
    assert stored["study"]["code"] == {"unknown": 8}


def test_primaries_are_decided_together(runs):
    study, root = runs
    decisions = {decision.name: decision for decision in read_results(study, root).decisions()}
    assert list(decisions) == ["one", "two", "later", "reward on rho"]
    # t = 0.2 / (0.001 / √3)
    assert (decisions["one"].p, decisions["one"].verdict) == (
        printed(stats.t.sf(200 * 3**0.5, 2) * 2, 12),
        "as predicted",
    )
    assert (decisions["two"].expected, decisions["two"].p, decisions["two"].verdict) == ("same", 0.0, "undecided")
    # Nothing was run: it stays in the family.
    assert (decisions["later"].effect, decisions["later"].p_holm, decisions["later"].verdict) == (
        None,
        1.0,
        "undecided",
    )
    slope = decisions["reward on rho"].effect
    rho = 0.01 * sum(1.02**t for t in range(NUM_STEPS)) / NUM_STEPS
    # The outcome rho is a ratio; as a dose it counts as it is: 0.2 more reward over one more rho.
    assert abs(slope.mean * rho - 0.2) < 0.001  # what the seeds of `one` differ by
    rest = decisions["reward on rho"].p
    assert decisions["reward on rho"].p_holm == min(1.0, 3 * rest)


def test_behind_a_gate_that_fails_nothing_is_testable(runs):
    study, root = runs
    text = study.path.read_text().replace("primaries:\n  - {arm: one, outcome: reward}\n", "primaries:\n")
    verdicts = []
    for arm, outcome in (("one", "reward"), ("later", "collapse")):
        file = study.path.with_name(f"gate-{arm}.yaml")
        both = text if arm == "one" else study.path.read_text().replace("  - {arm: later, outcome: collapse}\n", "")
        file.write_text(both + f"gate: {{arm: {arm}, outcome: {outcome}}}\n")
        verdicts.append([(d.name, d.verdict) for d in read_results(load_study(file), root).decisions()])
    through, shut = verdicts
    assert through[0] == ("one", "as predicted")
    assert ("two", "undecided") in through  # it has two seeds
    assert shut[0] == ("later", "undecided")
    assert {verdict for _, verdict in shut[1:]} == {"not testable"}


def test_the_report_says_what_was_fixed_and_when(runs, tmp_path):
    study, root = runs
    fixed = register(study, root)
    try:
        text = write_report(study, root)[1].read_text()
        assert f"Fixed before the runs: study {fixed.sha256[:12]}" in text
        assert "changed after the runs began" not in text
        assert unseen_told(2) == [text.splitlines()[-1]]  # the arm with the fewest seeds
        other = study.path.with_name("other.yaml")
        other.write_text(study.path.read_text().replace("margin: 0.05", "margin: 0.5"))
        text = write_report(load_study(other), root)[1].read_text()
        assert "changed after the runs began: outcomes.reward.margin" in text
    finally:
        (root / "registered.json").unlink()


def test_nothing_finished_is_said(tmp_path):
    with pytest.raises(InputError, match=r"no finished run of study hacking; start it with `megatron-rl lab run`"):
        read_results(load_study(LAB / "hacking"), tmp_path)
