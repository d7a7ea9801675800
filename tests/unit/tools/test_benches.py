"""Benchmarks together: each has a smoke form, figures say what they are of, and none replaces a part of the package."""

import json

import pytest

from tools.bench import __main__ as benches
from tools.bench.parts import ALL


def test_every_benchmark_has_a_smoke_form():
    assert {*ALL, "endpoint", "engines"} == benches.SMOKE.keys()


@pytest.mark.parametrize(("status", "commit"), [("", "1234567"), (" M a", "1234567 and changes that no commit has")])
def test_records_say_their_commit(tmp_path, monkeypatch, status, commit):
    answers = {"rev-parse": "1234567", "status": status}
    monkeypatch.setattr(benches, "git", lambda command, *rest: answers[command])
    file = tmp_path / "performance.json"
    file.write_text('{"about": "kept"}')
    benches.record(file, "refit", "a table\nof two lines")
    document = json.loads(file.read_text())
    made = document["records"]["refit"]
    assert document["about"] == "kept"
    assert (made["command"], made["commit"]) == ("python -m tools.bench refit", commit)
    assert made["output"] == ["a table", "of two lines"]
