"""Two records of a run are compared bit for bit; a study is submitted run by run."""

from __future__ import annotations

import pytest

from megatron_rl.errors import InputError
from megatron_rl.instruments.lab import load_study
from megatron_rl.instruments.lab import runner as running
from megatron_rl.instruments.lab.archive import first_difference
from megatron_rl.instruments.lab.runner import StudyRunner
from tests.unit.instruments.lab.test_study import LAB

RECORDS = [{"step": 0, "time": 1.0, "perf/time/step": 2.0, "a": 0.1}, {"step": 1, "time": 2.0, "a": float("nan")}]


def changed(**values):
    return [RECORDS[0] | values, RECORDS[1]]


def test_times_may_differ_and_nothing_else():
    assert first_difference(RECORDS, changed(**{"time": 9.0, "perf/time/step": 9.0})) is None
    told = first_difference(RECORDS, changed(a=0.10000000000000002))
    assert told == "step 0: a is 0.1 in the first run and 0.10000000000000002 in the second"
    assert "b is None" in first_difference(RECORDS, changed(b=1.0))
    assert first_difference(RECORDS, RECORDS[:1]) == "2 records in the first run and 1 in the second"
    assert first_difference([{"step": 0, "a": 0.0}], [{"step": 0, "a": -0.0}]) is not None


@pytest.fixture
def study():
    return load_study(LAB / "servers")


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """squeue and submit.sh as programs that note what they were called with."""
    scripts, programs = tmp_path / "checkout" / "slurm", tmp_path / "bin"
    for folder in (scripts, programs):
        folder.mkdir(parents=True)
    for file, text in [
        (scripts / "submit.sh", f'printf "%s\\n" "$*" >>{tmp_path}/calls; echo "Submitted batch job 7"'),
        (programs / "squeue", f"cat {tmp_path}/queue"),
    ]:
        file.write_text(f"#!/bin/sh\n{text}\n")
        file.chmod(0o755)
    (tmp_path / "queue").write_text("")
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
    monkeypatch.setattr(running, "checkout", lambda: tmp_path / "checkout")
    return tmp_path


def test_what_is_missing_is_submitted_once(study, slurm):
    root = slurm / "runs"
    runner = StudyRunner(study, root, 1, say=lambda _: None)
    jobs = study.jobs(root, seeds=[0])[:4]
    (root / jobs[0].name).mkdir(parents=True)
    (root / jobs[0].name / "DONE").write_text("60")
    status = root / jobs[1].name / "slurm" / "latest" / "status"
    status.mkdir(parents=True)
    (status / "0").write_text("3")  # an alarm ended it
    (slurm / "queue").write_text(f"servers-{jobs[2].name}\n")
    states = running.submit(runner, jobs, ["--nodes=4"])
    assert list(states.values()) == ["done", "ended", "in the queue", "in the queue"]
    (call,) = (slurm / "calls").read_text().splitlines()
    assert call.startswith(f"--job-name=servers-{jobs[3].name} --nodes=4 {slurm}/checkout/slurm/train.sbatch {LAB}")
    assert f'--set name="{jobs[3].name}"' in call
    (status / "0").write_text("1")
    assert runner.state(jobs[1]) == "failed"
    (status / "0").write_text("0")  # stopped on request
    assert runner.state(jobs[1]) == "interrupted"


def test_a_refused_run_and_an_absent_cluster_are_said(study, slurm, monkeypatch):
    runner = StudyRunner(study, slurm / "runs", 1)
    jobs = study.jobs(slurm / "runs", seeds=[0])[:1]
    submit = slurm / "checkout" / "slurm" / "submit.sh"
    submit.write_text("#!/bin/sh\necho 'no such partition' >&2; exit 1\n")
    with pytest.raises(InputError, match=r"(?s)submit\.sh .* status 1:.*no such partition"):
        running.submit(runner, jobs, ["--partition=nowhere"])
    (slurm / "bin" / "squeue").unlink()
    monkeypatch.setenv("PATH", str(slurm / "bin"))
    with pytest.raises(InputError, match=r"--slurm: squeue: no such program here"):
        running.submit(runner, jobs, [])
    monkeypatch.setattr(running, "checkout", lambda: None)
    with pytest.raises(InputError, match="installed package"):
        running.submit(runner, jobs, [])
