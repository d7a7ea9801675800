"""Names of other projects' metrics: a project is known by its marks, and docs have every name."""

from __future__ import annotations

import json
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


def test_a_project_is_known_by_each_of_its_marks():
    for project in PROJECTS:
        assert all(project_of([mark]) is project for mark in project.marks)


def test_the_document_has_every_name_and_version():
    text = (REPOSITORY / "docs/coming-from.md").read_text()
    for project in PROJECTS:
        assert f"{project.name} {project.version} (`{project.commit}`, {project.date})" in " ".join(text.split())
        for name in project.names:
            if name.ours == name.theirs:
                continue
            row = next(line for line in text.splitlines() if line.startswith(f"| `{name.ours}` |"))
            theirs = name.theirs.removeprefix("train/") if project.name == "TRL" else name.theirs
            assert f"`{theirs}`" in row
