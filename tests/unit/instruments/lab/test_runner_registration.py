"""What a study fixed before its runs: another file or other code is refused unless allowed, and reports say so."""

from __future__ import annotations

import json

import pytest

from megatron_rl.errors import InputError
from megatron_rl.instruments.lab import load_study, runner
from megatron_rl.instruments.lab.runner import changed_keys, code_version, read_registration, register
from tests.unit.instruments.lab.test_study import arm, write

__all__ = ["write"]  # a fixture

OUTCOME = {"metric": "val/reward/mean", "statistic": "last"}


def test_words_may_change_and_what_decides_may_not(write, tmp_path):
    root = tmp_path / "runs"
    first = register(load_study(write()), root)
    assert json.loads((root / "registered.json").read_text())["sha256"] == first.sha256
    assert register(load_study(write(title="Another", claim="the same", pilots=["one"])), root).sha256 == first.sha256
    for changes, key in [
        ({"seeds": [0, 1, 2, 3]}, "seeds"),  # more seeds after a look are another test
        ({"level": 0.1}, "level"),
        ({"outcomes": {"reward": OUTCOME | {"margin": 0.1}}}, "outcomes.reward"),
        ({"arms": {"plain": {}, "large": arm({"learner.optimizer.lr": 3e-3}, ["learner.optimizer.lr"])}}, "arms.large"),
    ]:
        with pytest.raises(InputError, match=f"{key}.* changed since the first run.*another folder with --out"):
            register(load_study(write(**changes)), root)
    assert read_registration(root) == first


def test_an_amended_registration_is_refused_by_name(write, tmp_path):
    register(load_study(write()), tmp_path)
    file = tmp_path / "registered.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"num_finished": 0, "amendments": []}))
    assert read_registration(tmp_path) == register(load_study(write()), tmp_path)
    file.write_text(json.dumps(json.loads(file.read_text()) | {"amendments": [{"reason": "why not"}]}))
    with pytest.raises(InputError, match=r"registered\.json: the study was amended after its first run"):
        register(load_study(write()), tmp_path)


def test_other_code_is_refused_unless_allowed(write, tmp_path, monkeypatch):
    root = tmp_path / "runs"
    register(load_study(write()), root)
    monkeypatch.setattr(runner, "git_state", lambda _: {"commit": "b" * 40, "changed": []})
    with pytest.raises(InputError, match=f"this is {'b' * 40}; .*--other-code"):
        register(load_study(write()), root)
    register(load_study(write()), root, other_code=True)
    monkeypatch.setattr(runner, "git_state", lambda _: {"commit": "b" * 40, "changed": ["a.py"]})
    assert code_version() == "b" * 40 + "+changes"
    monkeypatch.setattr(runner, "git_state", lambda _: None)
    assert code_version() == __import__("megatron_rl").__version__


def test_changed_keys_are_named_down_to_the_second_level():
    before = {"a": 1, "b": {"c": {"d": 1}, "e": 2}}
    after = {"a": 1, "b": {"c": {"d": 2}, "e": 2}, "f": 3}
    assert changed_keys(before, after) == ["b.c.d", "f"]
    assert changed_keys(before, before) == []
