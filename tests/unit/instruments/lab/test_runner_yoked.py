"""A yoked run waits for the run that its values are outcomes of, and takes them from it wherever it is made."""

from __future__ import annotations

import json

import pytest

from megatron_rl.__main__ import main
from megatron_rl.errors import InputError
from megatron_rl.instruments.lab import load_study, runner
from megatron_rl.instruments.lab.archive import pack, read_packed
from megatron_rl.instruments.lab.report import render
from megatron_rl.instruments.lab.results import read_results, stage
from megatron_rl.instruments.lab.runner import StudyRunner
from tests.unit.instruments.lab.test_archive import made
from tests.unit.instruments.lab.test_study import LAB, arm, write

__all__ = ["write"]  # a fixture

RATES = {0: 3e-5, 1: 7.1e-5, 2: 1e-4}  # of the arm plain, by seed
YOKE = {"arm": "plain", "outcome": "rate"}
KEY = "learner.optimizer.lr"


@pytest.fixture
def study(write):
    """`own` has the rate that `plain` had in the same seed."""
    return load_study(
        write(
            outcomes={
                "reward": {"metric": "val/reward/mean", "statistic": "last"},
                "rate": {"metric": "actor/lr", "statistic": "mean"},
                "collapse": {"metric": "critic/rewards/mean", "statistic": "collapse_step"},
            },
            arms={"plain": {}, "own": arm({KEY: 1e-3}, [KEY], yoked={KEY: YOKE})},
            figure=[{"title": "rate", "arms": ["plain", "own"]}],
        )
    )


def finish(study, root, job):
    """A finished run whose rate averages to that of `RATES`, for arm plain, over steps that have one."""
    made(study, job, root)
    rates = [None, RATES[job.seed] * 0.5, RATES[job.seed] * 1.5]
    records = [{"step": step, "critic/rewards/mean": 0.5, "val/reward/mean": 0.5} for step in range(3)]
    for record, rate in zip(records, rates, strict=True):
        record |= {} if rate is None else {"actor/lr": rate}
    (root / job.name / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


def rate_of(study, job):
    return study.recipe(job).learner.optimizer.lr


def test_a_yoked_run_waits_for_its_seed_s_run_and_has_its_value(study, tmp_path):
    study.check(offline=True)
    assert [(job.name, job.waits_for) for job in study.jobs(tmp_path, [1])] == [
        ("plain-seed1", ()),
        ("own-seed1", ("plain-seed1",)),
    ]
    (plain,) = study.jobs(tmp_path, [1], ["plain"])
    finish(study, tmp_path, plain)
    own = {job.seed: job for job in study.jobs(tmp_path, arms=["own"])}
    assert {seed for seed, job in own.items() if job.waits_for} == {0, 2}
    assert rate_of(study, own[1]) == (RATES[1] * 0.5 + RATES[1] * 1.5) / 2
    assert rate_of(study, own[0]) == 1e-3  # what `check` takes
    now = stage(study, tmp_path)
    assert [job.name for job in now.jobs] == ["plain-seed0", "plain-seed1", "own-seed1", "plain-seed2"]
    assert [job.name for job in now.waiting] == ["own-seed0", "own-seed2"]
    assert stage(study, tmp_path, [0], ["own"]).jobs == []  # whoever asks


@pytest.fixture
def runs(study, monkeypatch):
    """Runs that end at once; what was started, in order, with its rate."""
    started = []

    def start(self, job):
        started.append((job.name, rate_of(study, job)))
        finish(study, self.root, job)

    monkeypatch.setattr(StudyRunner, "_start", start)
    monkeypatch.setattr(runner, "POLL_SECONDS", 0)
    return started


def test_one_command_runs_both_and_the_same_command_has_nothing_left(study, runs, tmp_path, capsys):
    root = tmp_path / "runs"
    command = ["lab", "run", str(study.path), "--jobs", "1", "--other-code", "--out", str(root)]
    assert main(command) == 0
    assert runs[:3] == [(f"plain-seed{seed}", 1e-4) for seed in RATES]
    assert dict(runs[3:]) == {f"own-seed{seed}": (0.5 * rate + 1.5 * rate) / 2 for seed, rate in RATES.items()}
    assert main(command) == 0
    assert len(runs) == 6
    assert "wait" not in capsys.readouterr().out


def test_what_waits_is_said(study, runs, tmp_path, capsys):
    command = ["lab", "run", str(study.path), "--other-code", "--out", str(tmp_path / "runs"), "--arms", "own"]
    assert main(command) == 0
    assert runs == []
    assert "3 runs wait for the runs that they depend on" in capsys.readouterr().out


def test_packed_runs_are_read_and_reused_with_their_values(study, runs, tmp_path, capsys):
    root, file = tmp_path / "runs", tmp_path / "runs.jsonl.xz"
    command = ["lab", "run", str(study.path), "--other-code", "--out"]
    main([*command, str(root)])
    assert pack(study, root, file) == 6
    assert read_packed(study, file).as_json() == read_results(study, root).as_json()
    assert "own: learner.optimizer.lr is, in each seed, the rate of plain." in render(read_packed(study, file))
    assert main([*command, str(tmp_path / "elsewhere"), "--reuse", str(file)]) == 0
    assert len(runs) == 6
    assert capsys.readouterr().out.count(": reused ") == 6


def test_a_run_without_the_outcome_is_said(study, tmp_path):
    (plain,) = study.jobs(tmp_path, [0], ["plain"])
    finish(study, tmp_path, plain)
    file = tmp_path / plain.name / "metrics.jsonl"
    file.write_text(file.read_text().replace("actor/lr", "actor/rate"))
    with pytest.raises(InputError, match=r"plain-seed0 has no 'rate' \(actor/lr\), to which another run is yoked"):
        study.jobs(tmp_path)


def test_what_is_registered_of_a_study_without_yoked_arms_stays(study):
    arms = study.study.commitment()["arms"]
    assert arms["own"]["yoked"] == {KEY: YOKE}
    assert "yoked" not in arms["plain"]


@pytest.mark.parametrize(
    ("yoke", "words"),
    [
        ({"arm": "plane", "outcome": "rate"}, ["arms.own.yoked.learner.optimizer.lr.arm", "'plane'", "'plain'"]),
        ({"arm": "plain", "outcome": "rat"}, [".outcome", "'rat'", "'rate'"]),
        ({"arm": "own", "outcome": "rate"}, ["is yoked itself"]),
        ({"arm": "plain", "outcome": "collapse"}, ["which one run alone does not have"]),
    ],
)
def test_a_yoke_that_cannot_hold_is_refused(study, write, yoke, words):
    values = study.study.model_dump(mode="json", exclude_defaults=True)
    values["arms"]["own"]["yoked"] = {KEY: yoke}
    with pytest.raises(InputError) as error:
        load_study(write(**values))
    assert all(word in str(error.value) for word in words), error.value


def test_a_yoked_key_has_a_value_for_check(study, write):
    values = study.study.model_dump(mode="json", exclude_defaults=True)
    values["arms"]["own"]["yoked"] = {"schedule.min_lr": YOKE}
    with pytest.raises(InputError, match=r"arms\.own\.set has no 'schedule\.min_lr'; give the value that `check`"):
        load_study(write(**values))


def test_the_clock_s_constant_is_its_own_mean(tmp_path):
    clock = load_study(LAB / "clock").study
    assert {key: vars(yoke) for key, yoke in clock.arms["own-mean"].yoked.items()} == {
        "schedule.min_lr": {"arm": "auto", "outcome": "mean rate"}
    }
    assert (clock.outcomes["mean rate"].metric, clock.outcomes["mean rate"].statistic) == ("actor/lr", "mean")
    assert not set(clock.seeds) & set(load_study(LAB / "length_decay").study.seeds)
