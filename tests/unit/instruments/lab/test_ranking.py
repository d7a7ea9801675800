"""Remedies of several studies side by side: shares by hand, one control, the table on the page."""

from __future__ import annotations

import json

import pytest

from megatron_rl.errors import InputError
from megatron_rl.instruments.lab import load_study
from megatron_rl.instruments.lab.archive import read_packed
from megatron_rl.instruments.lab.ranking import STUDIES, draw, rank, read_costs, table
from megatron_rl.instruments.lab.results import paired_effect, read_results
from tests.support.rounding import rounded
from tests.unit.instruments.lab.test_study import LAB

DOCS = LAB.parents[1] / "docs"
STUDY = """
name: {name}
title: t
source: s
claim: c
setting: s
pilots: [p]
base: {base}
seeds: {seeds}
outcomes:
  early reward: {{metric: val/reward/mean, statistic: mean, margin: 0.2}}
  collapse step: {{metric: critic/rewards/mean, statistic: collapse_step, window: 1}}
  dose: {{metric: exact/log_rho_std, statistic: mean}}
arms:
  int4: {{label: control}}
  exact:
    control: int4
    differs_in: [learner.optimizer.lr]
    set: {{learner.optimizer.lr: 2.0e-4}}
    expect: {{early reward: higher}}
  {arm}:
    control: {control}
    differs_in: [learner.optimizer.lr]
    set: {{learner.optimizer.lr: {rate}}}
    label: {label}
gate: {{arm: exact, outcome: early reward}}
figure: [{{title: all, arms: [int4, exact, {arm}]}}]
"""
REWARD = {"int4": 0.4, "exact": 0.8, "good": 0.7, "bad": 0.2}


def results_of(folder, name, arm, control="int4", rate="3.0e-4", shift=0.0, seeds=(0, 1, 2)):
    """Return results of made-up runs. The reward is the arm's plus a tenth of the seed. ``bad`` collapses in seed 0,
    and every arm in seed 3. ``exact`` has no dose."""
    folder.mkdir()
    file = folder / "study.yaml"
    file.write_text(
        STUDY.format(
            name=name, base=LAB / "base.yaml", arm=arm, control=control, rate=rate, label=arm.title(), seeds=[*seeds]
        )
    )
    loaded = load_study(file)
    for job in loaded.jobs(folder):
        fell = job.seed == 3 or (job.arm == "bad" and job.seed == 0)
        values = [{"critic/rewards/mean": reward} for reward in (0.8, 0.1 if fell else 0.8)]
        if job.arm != "exact":
            values = [value | {"exact/log_rho_std": 0.4 + shift} for value in values]
        values[-1]["val/reward/mean"] = REWARD[job.arm] + 0.1 * job.seed
        (folder / job.name).mkdir()
        lines = [json.dumps({"step": step} | value) + "\n" for step, value in enumerate(values)]
        (folder / job.name / "metrics.jsonl").write_text("".join(lines))
        (folder / job.name / "DONE").write_text("2")
    return read_results(loaded, folder)


def test_a_remedy_is_compared_with_the_control_of_the_gate(tmp_path):
    # `bad` has another control in its study; the table compares it with int4 all the same.
    studies = [results_of(tmp_path / "a", "a", "good"), results_of(tmp_path / "b", "b", "bad", "exact", "4.0e-4")]
    rows = rank(studies, {"int4": 2.0, "good": 3.0})
    assert [row.arm for row in rows] == ["exact", "good", "bad"]
    assert [row.effect.mean for row in rows] == [rounded(0.4), rounded(0.3), rounded(-0.2)]
    assert [row.kept for row in rows] == [rounded(1), rounded(0.75), rounded(-0.5)]
    assert [row.collapsed for row in rows] == [0, 0, 1]
    assert rows[1].seconds == 1.5
    assert list(table(rows))[3] == "| Good | +0.30 (+0.30 to +0.30) | 75% | 0 of 3 | 0.40 | 1.50 × |"
    assert list(table(rows))[4].endswith("| -50% | 1 of 3 | 0.40 | – |")
    assert list(table(rows))[2].endswith("| 0 | – |")  # no mismatch
    assert len(draw(rows).axes) == 3


def test_an_arm_of_two_studies_has_the_runs_of_both(tmp_path):
    studies = [
        results_of(tmp_path / "a", "a", "good"),
        results_of(tmp_path / "b", "b", "bad", rate="4.0e-4", seeds=(0, 1, 2, 3)),
    ]
    rows = {row.arm: row for row in rank(studies, {})}
    assert {arm: (row.collapsed, row.effect.num_seeds) for arm, row in rows.items()} == {
        "exact": (1, 4),
        "good": (0, 3),
        "bad": (2, 4),
    }


def test_two_studies_must_have_one_control(tmp_path):
    studies = [results_of(tmp_path / "a", "a", "good"), results_of(tmp_path / "b", "b", "bad", shift=0.1)]
    with pytest.raises(InputError, match=r"int4, seed 0: dose is 0\.4 in one study and 0\.5"):
        rank(studies, {})


@pytest.mark.slow
def test_the_page_has_the_table_of_the_runs():
    studies = [
        read_packed(load_study(LAB / name / "study.yaml"), DOCS / "lab" / "runs" / f"{name}.jsonl.xz")
        for name in STUDIES
    ]
    rows = rank(studies, read_costs(DOCS))
    assert "\n".join(table(rows)) in (DOCS / "lab" / "ranking.md").read_text(), "`megatron-rl lab docs` writes it"
    assert (DOCS / "images" / "lab-ranking.png").is_file()
    kept: dict[str, dict[str, float]] = {}  # read again from the kept outcomes, not from the runs
    for name in STUDIES:
        for arm, outcomes in json.loads((DOCS / "lab" / f"{name}.json").read_text())["arms"].items():
            kept.setdefault(arm, {}).update(outcomes["early reward"])
    for row in rows:
        assert f"{row.effect.mean:+.2f}" == f"{paired_effect(kept[row.arm], kept['int4']).mean:+.2f}"
