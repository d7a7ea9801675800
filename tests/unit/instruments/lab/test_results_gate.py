"""The two arms of a gate run first; the others run if it passes."""

from __future__ import annotations

import json

import pytest

from megatron_rl.__main__ import main
from megatron_rl.instruments.lab import load_study, runner
from megatron_rl.instruments.lab.report import write_report
from megatron_rl.instruments.lab.results import stage
from megatron_rl.instruments.lab.runner import StudyRunner
from tests.unit.instruments.lab.test_report import LAB, STUDY

GATE = "gate: {arm: one, outcome: reward}\n"
REWARD = {"none": 0.4, "one": 0.6, "two": 0.4, "later": 0.4}


@pytest.fixture
def study(tmp_path):
    file = tmp_path / "study.yaml"
    file.write_text(STUDY.format(base=LAB / "base.yaml").replace("  - {arm: one, outcome: reward}\n", "") + GATE)
    return load_study(file)


def finish(root, job, reward):
    """A made-up finished run of two records."""
    folder = root / job.name
    folder.mkdir(parents=True, exist_ok=True)
    values = {"critic/rewards/mean": 0.5, "mismatch/rho_std": 0.01, "val/reward/mean": reward + 0.001 * job.seed**2}
    values["val/reward/mean"] += 0.001 * (job.seed - 1) * (job.arm == "one")
    (folder / "metrics.jsonl").write_text("".join(json.dumps({"step": step} | values) + "\n" for step in (0, 1)))
    (folder / "DONE").write_text("2")


@pytest.fixture
def runs(study, tmp_path, monkeypatch):
    """Runs that end at once with the arm's `REWARD`; what was started, in order."""
    started = []

    def start(self, job):
        started.append(job.name)
        finish(self.root, job, REWARD[job.arm])

    monkeypatch.setattr(StudyRunner, "_start", start)
    monkeypatch.setattr(runner, "POLL_SECONDS", 0)
    return started


def complete(study, root, arms, reward, seeds=(0, 1, 2)):
    for job in study.jobs(root, seeds, arms):
        finish(root, job, reward[job.arm])


def parts(study, root):
    reached = stage(study, root)
    return [{job.arm for job in jobs} for jobs in (reached.jobs, reached.waiting, reached.ruled_out)]


def test_other_arms_wait_until_the_gate_is_decided_in_every_seed(study, tmp_path):
    root = tmp_path / "runs"
    own, others = {"none", "one"}, {"two", "later"}
    assert parts(study, root) == [own, others, set()]
    complete(study, root, ["none", "one"], REWARD, seeds=(0, 1))
    assert parts(study, root) == [own, others, set()]  # as predicted so far, and not looked at
    complete(study, root, ["none", "one"], REWARD)
    assert parts(study, root) == [own | others, set(), set()]
    complete(study, root, ["one"], {"one": 0.4})
    assert parts(study, root) == [own, set(), others]


def test_without_a_gate_nothing_waits(tmp_path):
    study = load_study(LAB / "mismatch")
    assert stage(study, tmp_path).jobs == study.jobs(tmp_path)


def test_a_gate_that_passes_lets_the_others_run(study, runs, tmp_path, capsys):
    root = tmp_path / "runs"
    command = ["lab", "run", str(study.path), "--jobs", "1", "--other-code", "--out", str(root)]
    assert main(command) == 0
    arms = [name.split("-")[0] for name in runs]
    assert arms[:6] == ["none", "one"] * 3
    assert sorted(arms[6:]) == ["later"] * 3 + ["two"] * 3
    assert main(command) == 0
    assert len(runs) == 12
    assert "gate failed" not in capsys.readouterr().out


def test_a_gate_that_fails_ends_the_study_and_the_report_says_so(study, runs, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(REWARD, "one", 0.4)
    root = tmp_path / "runs"
    command = ["lab", "run", str(study.path), "--jobs", "1", "--other-code", "--out", str(root)]
    assert main(command) == 0
    assert len(runs) == 6
    assert "the gate failed: 6 runs of other arms are skipped" in capsys.readouterr().out
    text = write_report(study, root)[1].read_text()
    assert "The gate failed, so that 6 runs of the other arms were not made." in text
    assert text.count("not testable") == 3  # two primaries and a trend
    assert "Among 3 primaries and trends behind the gate, one or more" in text
    assert main([*command, "--arms", "two"]) == 0  # who asks for them has them
    assert len(runs) == 9
