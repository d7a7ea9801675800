"""Folders of models beside the policy's: they read what the policy writes, or are refused by their key."""

from __future__ import annotations

import json
import re
import shutil

import pytest

from megatron_rl.errors import InputError
from megatron_rl.run.prepare import check_recipe, prepare, report
from tests.support.tiny import MODEL, tiny_recipe


def changed(folder, file, change):
    """A copy of the tiny model whose JSON ``file`` is another."""
    shutil.copytree(MODEL, folder)
    values = json.loads((folder / file).read_text())
    change(values)
    (folder / file).write_text(json.dumps(values))
    return str(folder)


def larger(values):
    values["vocab_size"] += 64


def smaller(values):
    values["vocab_size"] -= 1


def reworded(values):
    vocabulary = values["model"]["vocab"]
    first, second, *_ = [word for word in vocabulary if len(word) == 1 and word.isdigit()]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]


def headed(values):
    values["num_key_value_heads"] = 1


SERVED = {"engine": "vllm_server", "addresses": ["http://10.0.0.5:8000"]}


@pytest.mark.parametrize(
    ("file", "change", "section", "message"),
    [
        ("config.json", larger, {"teacher": SERVED}, None),
        (
            "config.json",
            larger,
            {"teacher": {"engine": "learner"}},
            "teacher.path: .*vocab_size 192, the policy's 128.* with as many$",
        ),
        ("config.json", larger, {"reference": {}}, "reference.path: .*has vocab_size"),
        ("config.json", smaller, {"teacher": SERVED}, "with as many or more, which can read all tokens"),
        ("tokenizer.json", reworded, {"teacher": SERVED}, "teacher.path: .* another tokenizer .*: 4 entries differ"),
        ("tokenizer.json", reworded, {"reference": {}}, "reference.path: .* another tokenizer"),
    ],
)
def test_a_second_model_reads_what_the_policy_writes(tmp_path, file, change, section, message):
    path = changed(tmp_path / "second", file, change)
    ((name, fields),) = section.items()
    recipe = tiny_recipe(**{name: {**fields, "path": path}})
    if message is None:
        with prepare(recipe, 1):
            return
    with pytest.raises(InputError) as caught, prepare(recipe, 1):
        pass
    assert re.search(message, str(caught.value))


def test_a_teacher_of_no_prompt_is_named():
    recipe = tiny_recipe(teacher={"by_source": [{"data_sources": ["math"]}]})
    message = r"by_source.0.data_sources: math is of no training prompt; theirs are train"
    with pytest.raises(InputError, match=message), prepare(recipe, 1):
        pass


def test_a_folder_that_is_not_there_is_named():
    recipe = tiny_recipe(teacher={"path": "nowhere"}, reference={"path": "nor/here"})
    with pytest.raises(
        InputError, match=r"reference.path: nor/here: no such folder.*\n.*teacher.path: nowhere: no such"
    ):
        check_recipe(recipe)
    assert "teacher.path nowhere" in dict(report(recipe, None, offline=True))["not here"]


def test_a_folder_without_all_tensors_is_named_before_the_run(tmp_path):
    def deeper(values):
        values["num_hidden_layers"] += 1

    path = changed(tmp_path / "second", "config.json", deeper)
    recipe = tiny_recipe(teacher={"path": path}, reference={"path": path})
    with pytest.raises(InputError, match=r"reference.path: /.*second.*\n.*teacher.path: /"), prepare(recipe, 1):
        pass
    with prepare(tiny_recipe(teacher={**SERVED, "path": path}), 1):
        pass


def test_a_model_that_the_exact_engine_does_not_compute_is_named(tmp_path, monkeypatch):
    path = changed(tmp_path / "second", "config.json", lambda values: None)
    monkeypatch.setattr("megatron_rl.run.prepare.beyond_exact", lambda architecture, tensor: "the model (x) has sinks")
    exact = tiny_recipe(reference={"path": path}, teacher={**SERVED, "path": path}, rollout={"engine": "exact"})
    with (
        pytest.raises(InputError, match=r"reference.path: .*rollout.engine: exact, but the model \(x\) has sinks") as e,
        prepare(exact, 1),
    ):
        pass
    assert "teacher.path" not in str(e.value)
    with prepare(tiny_recipe(reference={"path": path}), 1):
        pass


def test_a_layout_that_cannot_hold_a_second_model_is_named(tmp_path):
    path = changed(tmp_path / "second", "config.json", headed)
    recipe = tiny_recipe(teacher={"engine": "learner", "path": path}, learner={"parallel": {"tensor": 2}})
    with pytest.raises(InputError, match=r"teacher.path: .*learner.parallel.tensor: 2 does not divide"):
        check_recipe(recipe)


def test_a_second_model_without_a_config_is_named_by_its_key(tmp_path):
    recipe = tiny_recipe(teacher={"engine": "learner", "path": tmp_path}, reference={"path": tmp_path})
    with pytest.raises(InputError, match=r"reference.path: /.*config.json does not .*\n.*teacher.path: /") as caught:
        check_recipe(recipe)
    assert "model.path" not in str(caught.value)
