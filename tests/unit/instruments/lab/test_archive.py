"""Runs of a study go into one file and come out of it elsewhere: same states, outcomes, registration, and verdicts."""

from __future__ import annotations

import json
import lzma

import pytest
import yaml

from megatron_rl.errors import InputError
from megatron_rl.instruments.lab import load_study
from megatron_rl.instruments.lab.archive import adopt, metrics_of, pack, read_packed, unpack
from megatron_rl.instruments.lab.command import _sources
from megatron_rl.instruments.lab.report import render
from megatron_rl.instruments.lab.results import read_results
from megatron_rl.instruments.lab.runner import REUSED, StudyRunner, read_registration, register
from tests.unit.instruments.lab.test_study import LAB

GIT = {"commit": "a" * 40, "branch": "main", "changed": []}


@pytest.fixture
def study():
    return load_study(LAB / "servers")


def made(study, job, root, ended=False, done=True, seed=0):
    """A run's folder as `train` leaves it: metrics of which the study reads some, one of them no number."""
    folder = root / job.name
    folder.mkdir(parents=True)
    (folder / "recipe.resolved.yaml").write_text(yaml.safe_dump(study.recipe(job).model_dump(mode="json")))
    environment = {"python": "3.11.2", "arguments": ["/home/somebody/x"], "git": GIT, "hardware": {"cores": 2}}
    (folder / "environment.json").write_text(json.dumps(environment))
    names = sorted(metrics_of(study.study) - {"step"})
    records = [
        {"step": step, "time": 1.0 + step, "perf/time/step": 0.5, "left/out": 0.1 * step + seed}
        | {name: "NaN" if step == 3 else 0.1 + step / (7 + number + seed) for number, name in enumerate(names)}
        for step in range(20)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    if done:
        (folder / "DONE").write_text("60")
    if ended:
        (root / f"{job.name}.exit.json").write_text('{"status": 3}')


@pytest.fixture
def runs(study, tmp_path):
    """Two finished runs, one that an alarm ended, one unfinished."""
    root = tmp_path / "runs"
    jobs = study.jobs(root, seeds=[0])
    for number, (job, how) in enumerate(zip(jobs, ({}, {}, {"done": False, "ended": True}, {"done": False}))):
        made(study, job, root, seed=number, **how)
    register(study, root)
    return root


def test_what_comes_out_is_what_went_in(study, runs, tmp_path):
    file, again, other = tmp_path / "kept" / "runs.jsonl.xz", tmp_path / "again.jsonl.xz", tmp_path / "other"
    assert pack(study, runs, file) == 3
    text = lzma.decompress(file.read_bytes()).decode()
    assert "/" not in "".join(str(line["recipe"]["model"]["path"]) for line in map(json.loads, text.splitlines()[1:]))
    assert all(word not in text for word in (str(tmp_path), str(LAB), "somebody", "left/out", "perf/time"))
    other.mkdir()
    folders, registrations = _sources([file], tmp_path / "unpacked")
    adopt(study, other, registrations)
    runner = StudyRunner(study, other, 1, say=lambda _: None)
    jobs = study.jobs(other, seeds=[0])
    runner.reuse(jobs, folders, "a" * 40)
    assert [runner.state(job) for job in jobs] == ["done", "done", "ended", "missing"]
    assert not list(other.glob(f"*/{REUSED}"))
    assert vars(read_registration(other)) == vars(read_registration(runs))
    one, two = read_results(study, runs), read_results(study, other)
    assert one.as_json() == two.as_json()
    assert (two.ended, two.environment["hardware"]) == (one.ended, {"cores": 2})
    assert pack(study, other, again) == 3
    assert again.read_bytes() == file.read_bytes()


def test_a_run_that_other_code_continued_says_so_wherever_it_is_read(study, runs, tmp_path):
    """And it is not taken for a run of the code that began it."""
    (job, *_) = study.jobs(runs, seeds=[0])
    file = runs / job.name / "environment.json"
    other = GIT | {"commit": "b" * 40}
    starts = [{"git": GIT, "arguments": ["/home/somebody/x"]}, {"git": other}, {"git": other}]
    file.write_text(json.dumps(json.loads(file.read_text()) | {"resumed": starts}))
    packed = tmp_path / "runs.jsonl.xz"
    pack(study, runs, packed)
    assert "somebody" not in lzma.decompress(packed.read_bytes()).decode()
    results = read_packed(study, packed)
    assert results.code == {f"{'a' * 12}, continued by {'b' * 12}": 1, "a" * 12: 2} == read_results(study, runs).code
    assert f"1 of {'a' * 12}, continued by {'b' * 12}" in render(results)
    unpack(packed, tmp_path / "unpacked")
    runner = StudyRunner(study, tmp_path / "other", 1, say=lambda _: None)
    jobs = study.jobs(tmp_path / "other", seeds=[0])
    runner.reuse(jobs, [tmp_path / "unpacked"], "a" * 40)
    assert [runner.state(job) for job in jobs] == ["missing", "done", "ended", "missing"]


def test_a_recipe_s_numbers_are_those_of_yaml_1_2(study, runs, tmp_path):
    (job, *_) = study.jobs(runs, seeds=[0])
    file = runs / job.name / "recipe.resolved.yaml"
    text = file.read_text()
    assert text.count("\nnum_steps: 60\n") == 1
    file.write_text(text.replace("num_steps: 60", "num_steps: 060"))  # 48 to YAML 1.1
    pack(study, runs, tmp_path / "runs.jsonl.xz")
    assert read_packed(study, tmp_path / "runs.jsonl.xz").records[job.arm].keys() == {0}


def test_another_study_that_takes_a_run_says_where_it_came_from(study, runs, tmp_path):
    file, unpacked, other = tmp_path / "runs.jsonl.xz", tmp_path / "unpacked", tmp_path / "other"
    pack(study, runs, file)
    unpack(file, unpacked)
    for mark in unpacked.glob("*/PACKED"):
        mark.write_text(json.dumps(json.loads(mark.read_text()) | {"study": "floor"}))
    said: list[str] = []
    StudyRunner(study, other, 1, say=said.append).reuse(study.jobs(other, seeds=[0])[:1], [unpacked])
    assert said == [f"synchronous-seed0: reused {file}, synchronous-seed0"]
    assert (other / "synchronous-seed0" / REUSED).read_text() == f"{file}, synchronous-seed0\n"
    assert read_results(study, other).reused == ["synchronous-seed0"]


def test_another_study_s_registration_is_not_taken_over(study, runs, tmp_path):
    pack(study, runs, tmp_path / "runs.jsonl.xz")
    registration = unpack(tmp_path / "runs.jsonl.xz", tmp_path / "unpacked")
    adopt(load_study(LAB / "length_decay"), tmp_path / "other", [None, registration])
    assert read_registration(tmp_path / "other") is None


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"no xz",
        lzma.compress(b"no json"),
        lzma.compress(b"{}"),
        lzma.compress(b'{"format": 2}'),
        lzma.compress(b'{"format": 1, "study": "servers", "registration": null}\n{"run": "../outside"}'),
        lzma.compress(b""),
    ],
)
def test_a_file_that_holds_no_runs_is_refused(content, tmp_path):
    file = tmp_path / "runs.jsonl.xz"
    file.write_bytes(content)
    with pytest.raises(InputError, match=r"runs\.jsonl\.xz: cannot be read as runs that `lab pack` wrote"):
        unpack(file, tmp_path / "unpacked")
    assert [*tmp_path.iterdir()] == [file]  # nothing was written, least of all outside the folder


def test_nothing_finished_and_nothing_there(study, tmp_path):
    with pytest.raises(InputError, match="no finished run of study servers"):
        pack(study, tmp_path, tmp_path / "runs.jsonl.xz")
    with pytest.raises(InputError, match=r"--reuse .*nowhere: expected a folder of runs or a file of `lab pack`"):
        _sources([tmp_path / "nowhere"], tmp_path)
