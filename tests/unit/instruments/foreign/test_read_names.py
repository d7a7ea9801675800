"""Names of other projects' metrics: a project is known by its marks, and docs have every name."""

from __future__ import annotations

import json
from itertools import combinations
from pathlib import Path

from megatron_rl.instruments.foreign.read import PROJECTS, project_of, read_run
from tests.support.tiny import REPOSITORY


def written(file: Path, rows: list[dict]) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def test_our_own_metrics_from_a_service_keep_their_names(tmp_path):
    row = {"step": 0, "critic/score/mean": 0.5, "timing_s/step": 1.0, "perf/time/step": 2.0, "mismatch/rho_std": 0.1}
    run = read_run(written(tmp_path / "run.jsonl", [row]))
    assert (run.project, run.records) == (None, [row])


def test_a_project_is_known_by_two_of_its_marks_and_by_none_alone():
    for project in PROJECTS:
        assert all(project_of(pair) is project for pair in combinations(project.marks, 2))
        assert all(project_of([mark]) is None for mark in project.marks)


def test_another_project_that_shares_a_name_is_not_taken_for_one():
    """OpenRLHF has slime's train/entropy_loss and train/ppo_kl, and no reward of slime."""
    assert project_of(["train/entropy_loss", "train/ppo_kl", "train/reward", "train/kl"]) is None


def test_the_record_has_every_name_and_version():
    record = json.loads((REPOSITORY / "docs/coming-from.json").read_text(encoding="utf-8"))
    for project in PROJECTS:
        version = record["versions"][project.name]
        assert all(part in version for part in (project.version, project.commit, project.date))
        for name in project.names:
            theirs = record["metrics"][name.ours][project.name]
            assert any(metric.partition(" (")[0] == name.theirs for metric in theirs)
    assert set(record["metrics"]["mismatch/rho_std"]) == {"verl"}
