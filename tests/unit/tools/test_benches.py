"""Benchmarks together: each has a smoke form, figures say what they are of, and none replaces a part of the package."""

from __future__ import annotations

import ast
import json

import pytest

from tools.bench import __main__ as benches

FILES = sorted(benches.FOLDER.rglob("*.py"))
# Public names that are exchanged, and why an argument would not do.
EXCHANGED = {
    "generation.py": ["engine_arguments.CPU_BLOCK_TOKENS"],  # vLLM's block size: no key, ours is right on every CPU
    "scale_ranks.py": ["ranks_module.dist"],  # torch.distributed with the bytes counted that arrive
}


def test_every_program_has_a_smoke_form():
    assert benches.programs() == sorted(benches.SMOKE)
    assert set(benches.ASKED_FOR) < set(benches.SMOKE)


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


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(benches.FOLDER)))
def test_a_benchmark_replaces_nothing_of_the_package(path):
    assert replaced(path.read_text()) == EXCHANGED.get(path.name, [])


def test_what_is_replaced_is_found():
    program = "from megatron_rl.monitor import Monitor\nimport vllm\nMonitor.record = 1\nrun.timer._clock = 2\n"
    program += "vllm.x._y = 3\nself._z = 4\nrun.timer.clock = 5\n"
    assert replaced(program) == ["Monitor.record", "run.timer._clock"]


def test_a_benchmark_measures_the_rooms_that_it_imports():
    paths = set(benches.imported(benches.FOLDER / "engines.py", set()))
    assert {
        "tools/bench/engines.py",
        "tools/bench/lib/timing.py",
        "megatron_rl/learner",
        "megatron_rl/batch.py",
    } <= paths


def test_records_say_their_commit_and_are_judged_by_later_ones(tmp_path, monkeypatch, capsys):
    answers = {"rev-parse": "1234567", "status": "", "log": "abcdef0\nabcdef1"}
    monkeypatch.setattr(benches, "git", lambda command, *rest: answers[command])
    file = tmp_path / "performance.json"
    file.write_text('{"about": "kept"}')
    benches.record(file, "packing", ["--rounds", "1"], "a table\nof two lines")
    record = json.loads(file.read_text())
    assert record["about"] == "kept"
    assert record["records"]["packing"]["command"] == "python -m tools.bench.packing --rounds 1"
    assert record["records"]["packing"]["commit"] == "1234567"
    assert record["records"]["packing"]["output"] == ["a table", "of two lines"]
    assert benches.age(file) == 0
    said = dict(line.split(": ", 1) for line in capsys.readouterr().out.splitlines())
    assert said["packing"].endswith("older than what it measures: 2 later commits, the last abcdef0")
    assert said["learner"] == "no record"
    answers |= {"log": "", "status": " M a"}
    benches.record(file, "packing", [], "")
    benches.age(file)
    assert "1234567 and changes that no commit has: current" in capsys.readouterr().out
