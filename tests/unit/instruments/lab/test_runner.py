"""The runner of studies, with a command that stands for `train`: what is skipped, continued, reported, limited."""

from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path

import pytest
import yaml

from megatron_rl.errors import InputError
from megatron_rl.instruments.lab import load_study
from megatron_rl.instruments.lab import runner as runner_module
from megatron_rl.instruments.lab.runner import StudyRunner

LAB = Path(__file__).parents[4] / "recipes" / "lab"
# argv: run folder, what to do. Leaves a letter in "calls" per start, and marks how many run beside it. "meet 2" stays
# until two runs have started, however long that takes on a busy machine.
FAKE_RUN = """
import pathlib, signal, sys, time
folder, act = pathlib.Path(sys.argv[1]), sys.argv[2]
folder.mkdir(parents=True, exist_ok=True)
with open(folder / "calls", "a") as calls: calls.write("x")
beside = folder.parent / "beside"; beside.mkdir(exist_ok=True)
mark = beside / folder.name; mark.touch()
(folder / "most").write_text(str(len(list(beside.iterdir()))))
if act == "wait":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    time.sleep(60)
act, *number = act.split()
while act == "meet" and len(list(folder.parent.glob("*/calls"))) < int(number[0]): time.sleep(0.02)
time.sleep(0.3)
mark.unlink()
if act in ("done", "meet"): (folder / "DONE").write_text("80")
if act == "crash": print("RuntimeError: out of luck")
sys.exit({"done": 0, "meet": 0, "alarm": 3, "crash": 1, "leave": 0}[act])
"""


@pytest.fixture
def study():
    return load_study(LAB / "length_decay")


@pytest.fixture
def lab(study, tmp_path, monkeypatch):
    """A runner over one seed and three arms that do what the test says; ``said`` collects its lines."""
    monkeypatch.setattr(runner_module, "POLL_SECONDS", 0.02)

    class Lab:
        root, said, acts = tmp_path / "runs", [], {}

        def runner(self, num_parallel=3):
            def command(job):
                return [sys.executable, "-c", FAKE_RUN, str(self.root / job.name), self.acts.get(job.arm, "done")]

            return StudyRunner(study, self.root, num_parallel, command, self.said.append)

        def run(self, **kwargs):
            return self.runner(**kwargs).run(self.jobs)

        jobs = study.jobs(tmp_path / "runs", seeds=[0], arms=["constant", "auto", "small"])

        def calls(self, arm):
            return len((self.root / f"{arm}-seed0" / "calls").read_text())

    return Lab()


def test_finished_runs_are_not_repeated_and_the_others_are(lab):
    lab.acts = {"auto": "leave", "small": "crash"}  # left on request before its end; a fault
    assert lab.run() == {"constant-seed0": "done", "auto-seed0": "interrupted", "small-seed0": "failed"}
    assert any("small-seed0" in line and "exit status 1: RuntimeError: out of luck" in line for line in lab.said)
    lab.acts = {}
    assert set(lab.run().values()) == {"done"}
    assert [lab.calls(arm) for arm in ("constant", "auto", "small")] == [1, 2, 2]
    lab.run()
    assert [lab.calls(arm) for arm in ("constant", "auto", "small")] == [1, 2, 2]


def test_a_run_that_an_alarm_ends_is_a_result(lab):
    lab.acts = {"auto": "alarm"}
    assert lab.run()["auto-seed0"] == "ended"
    assert json.loads((lab.root / "auto-seed0.exit.json").read_text())["status"] == 3
    assert lab.run()["auto-seed0"] == "ended"
    assert lab.calls("auto") == 1


@pytest.mark.parametrize("num_parallel", [1, 2])
def test_no_more_runs_at_a_time_than_asked_for(lab, num_parallel):
    lab.acts = dict.fromkeys(("constant", "auto", "small"), f"meet {num_parallel}")
    lab.run(num_parallel=num_parallel)
    most = [int((lab.root / job.name / "most").read_text()) for job in lab.jobs]
    assert max(most) == num_parallel


def test_stop_ends_what_runs_in_order_and_starts_nothing_more(lab):
    lab.acts = dict.fromkeys(("constant", "auto", "small"), "wait")
    runner = lab.runner(num_parallel=2)
    states = {}
    thread = threading.Thread(target=lambda: states.update(runner.run(lab.jobs)))
    thread.start()
    deadline = time.monotonic() + 30
    while not all((lab.root / "beside" / f"{arm}-seed0").exists() for arm in ("constant", "auto")):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    with pytest.raises(InputError, match=r"another `lab run` works here"):
        lab.run()
    runner.stop()
    thread.join(30)
    assert not thread.is_alive()
    assert states == {"constant-seed0": "interrupted", "auto-seed0": "interrupted", "small-seed0": "missing"}


def test_runs_of_another_recipe_are_refused(lab, study):
    lab.run()
    folder = lab.root / "auto-seed0"
    values = study.recipe(lab.jobs[1]).model_dump(mode="json")
    (folder / "recipe.resolved.yaml").write_text(yaml.safe_dump(values))
    lab.run()  # the study's own: fine
    moved = json.loads(json.dumps(values).replace(str(LAB.parents[1]), "/elsewhere"))
    assert moved != values
    (folder / "recipe.resolved.yaml").write_text(yaml.safe_dump(moved))
    lab.run()  # the same, from a checkout that lay elsewhere
    values["learner"]["optimizer"]["lr"] = 5e-4
    (folder / "recipe.resolved.yaml").write_text(yaml.safe_dump(values))
    with pytest.raises(InputError, match=r"auto-seed0: was run with another learner\.optimizer\.lr"):
        lab.run()


def test_a_complete_run_of_the_same_recipe_is_reused_and_no_other(lab, study, tmp_path):
    others = tmp_path / "others"
    for name, job, changes in [
        ("twin", lab.jobs[0], {}),
        ("other-seed", study.jobs(tmp_path, seeds=[1])[1], {}),
        ("other-rate", lab.jobs[1], {"num_steps": 81}),
        ("unfinished", lab.jobs[2], {}),
    ]:
        folder = others / name
        (folder / "checkpoints").mkdir(parents=True)
        values = study.recipe(job).model_dump(mode="json") | {"name": name} | changes
        (folder / "recipe.resolved.yaml").write_text(yaml.safe_dump(values))
        (folder / "metrics.jsonl").write_text(f'{{"from": "{name}"}}\n')
        if name != "unfinished":
            (folder / "DONE").write_text("80")
    lab.runner().reuse(lab.jobs, [others])
    assert [lab.runner().state(job) for job in lab.jobs] == ["done", "missing", "missing"]
    reused = lab.root / "constant-seed0"
    assert "twin" in (reused / "metrics.jsonl").read_text()
    assert (reused / "REUSED").read_text() == f"{others / 'twin'}\n"
    assert not (reused / "checkpoints").exists()
    lab.run()
    assert not (reused / "calls").exists()


def test_a_run_of_other_code_is_not_reused(lab, study, tmp_path):
    twin = tmp_path / "others" / "twin"
    twin.mkdir(parents=True)
    (twin / "recipe.resolved.yaml").write_text(yaml.safe_dump(study.recipe(lab.jobs[0]).model_dump(mode="json")))
    (twin / "DONE").write_text("80")
    (twin / "environment.json").write_text(json.dumps({"git": {"commit": "a" * 40, "changed": ["a.py"]}}))
    for code, state in [("a" * 40, "missing"), ("b" * 40, "missing"), ("a" * 40 + "+changes", "done")]:
        lab.runner().reuse(lab.jobs, [twin.parent], code)
        assert lab.runner().state(lab.jobs[0]) == state


def test_the_command_is_the_ordinary_train(study, tmp_path):
    (job,) = study.jobs(tmp_path, seeds=[0], arms=["auto"])
    command = StudyRunner(study, tmp_path, 1).command(job)
    assert command[:4] == [sys.executable, "-m", "megatron_rl", "train"]
    assert command[4] == str(LAB / "length_decay" / "base.yaml")
    assert 'schedule.mode="auto"' in command
    assert command[-2:] == ["--resume", "auto"]
