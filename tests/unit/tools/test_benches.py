"""Benchmarks together: each has a smoke form, figures say what they are of, and none replaces a part of the package."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest

from tools.bench import __main__ as benches
from tools.bench.parts import ALL

FOLDER = Path(benches.__file__).parent


def test_every_benchmark_has_a_smoke_form():
    assert {*ALL, "engines"} == benches.SMOKE.keys()


def replaced(program: str) -> list[str]:
    """Attributes that a program sets on what it imports of the package, and private ones that it sets on anything but
    itself and what it imports of others."""
    tree = ast.parse(program)
    ours, others = set(), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = getattr(node, "module", None)
            for alias in node.names:
                is_ours = (module or alias.name).split(".")[0] == "megatron_rl"
                (ours if is_ours else others).add((alias.asname or alias.name).split(".")[0])
    targets = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            root = node.value
            while isinstance(root, ast.Attribute):
                root = root.value
            name = getattr(root, "id", "")
            if name in ours or (node.attr.startswith("_") and name != "self" and name not in others):
                targets.append(ast.unparse(node))
    return targets


@pytest.mark.parametrize("path", sorted(FOLDER.rglob("*.py")), ids=lambda path: str(path.relative_to(FOLDER)))
def test_a_benchmark_replaces_nothing_of_the_package(path):
    assert replaced(path.read_text()) == []


def test_what_is_replaced_is_found():
    program = "from megatron_rl.monitor import Monitor\nimport vllm\nMonitor.record = 1\nrun.timer._clock = 2\n"
    program += "vllm.x._y = 3\nself._z = 4\nrun.timer.clock = 5\n"
    assert replaced(program) == ["Monitor.record", "run.timer._clock"]


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
