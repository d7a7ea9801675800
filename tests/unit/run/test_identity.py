"""What is kept of a run's recipes and inputs, and what is noticed of their change."""

from __future__ import annotations

import json
import shutil

import pytest

from megatron_rl.errors import InputError
from megatron_rl.monitor import RunDirectory, write_environment
from megatron_rl.run import identity
from megatron_rl.types import Prompt
from tests.support.tiny import MODEL, tiny_recipe


@pytest.fixture
def directory(tmp_path) -> RunDirectory:
    directory = RunDirectory(tmp_path).create()
    directory.metrics.write_text('{"step": 0}\n')
    return directory


def prompt(**changes) -> Prompt:
    return Prompt(**{"id": "a:0", "tokens": [1, 2], "answer": "3", "data_source": "a", **changes})


def test_recipes_are_kept_once_each_and_an_old_run_s_only_one_first(directory):
    old, new = tiny_recipe(seed=1), tiny_recipe(seed=2)
    identity.keep_recipe(directory, old, 0)
    for path in directory.kept_recipes():
        path.unlink()  # a run of before recipes were kept
    for _ in range(2):
        identity.keep_recipe(directory, new, 5)
    first, second = directory.kept_recipes()
    assert first.read_text().startswith("# in force from step 0 on")
    assert second.read_text().startswith("# in force from step 5 on")
    assert identity.read_recipe(first) == old.model_dump(mode="json")
    assert identity.read_recipe(second) == identity.read_recipe(directory.recipe) == new.model_dump(mode="json")


def test_keys_that_a_recipe_is_too_old_to_have_count_as_their_defaults(directory):
    recipe = tiny_recipe()
    values = recipe.model_dump(mode="json")
    del values["recorder"]
    directory.recipe.write_text(json.dumps(values))
    assert identity.compare(directory, recipe, {}) == identity.Comparison()
    directory.recipe.write_text(json.dumps(values | {"gone": 1}))
    assert "gone: 1 → absent" in map(str, identity.compare(directory, recipe, {}).refused)


def test_a_directory_without_a_step_holds_no_run(directory):
    identity.keep_recipe(directory, tiny_recipe(seed=1), 0)
    assert identity.compare(directory, tiny_recipe(seed=2), {}).refused
    directory.metrics.write_text("")
    assert identity.compare(directory, tiny_recipe(seed=2), {}) == identity.Comparison()


def test_a_damaged_recipe_is_named(directory):
    directory.recipe.write_text("{")
    with pytest.raises(InputError, match=r"(?s)recipe.resolved.yaml: cannot be read.*recipe.resolved.<n>.yaml"):
        identity.compare(directory, tiny_recipe(), {})


@pytest.mark.parametrize(
    "change", [{"tokens": [1, 3]}, {"answer": "4"}, {"data_source": "b"}, {"extra": {"level": 1}}, {"id": "a:1"}]
)
def test_every_part_of_a_prompt_counts(change):
    assert identity.prompts_digest([prompt()]) == identity.prompts_digest([prompt()])
    assert identity.prompts_digest([prompt()]) != identity.prompts_digest([prompt(**change)])


def test_an_edited_reward_function_is_noticed(directory, tmp_path):
    file = tmp_path / "mine.py"
    recipe = tiny_recipe(reward={"name": f"{file}:score"})
    contents = []
    for body in ("1.0", "2.0"):
        file.write_text(f"def score(response, answer):\n    return {body}\n")
        contents.append(identity.contents(recipe, [prompt()], []))
    identity.keep_recipe(directory, recipe, 0)
    write_environment(directory.environment, {}, contents[0])
    assert identity.compare(directory, recipe, contents[0]) == identity.Comparison()
    (change,) = identity.compare(directory, recipe, contents[1]).refused
    assert change.key == f"reward.{file}:score"
    write_environment(directory.environment, {}, contents[1])  # a later start: its contents are the last ones
    assert identity.compare(directory, recipe, contents[1]) == identity.Comparison()


def test_a_reference_with_other_weights_is_noticed(tmp_path):
    """Wherever it lies; the weights of the policy itself do not count."""
    for name in ("moved", "trained"):
        shutil.copytree(MODEL, tmp_path / name)
    file = tmp_path / "trained" / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)

    def contents(path, **keys):
        return identity.contents(tiny_recipe(model={"path": str(path)}, **keys), [], [])

    first = contents(MODEL, reference={})
    assert contents(tmp_path / "moved", reference={}) == first
    assert contents(tmp_path / "trained", reference={"path": str(MODEL)}) == first
    other = contents(MODEL, reference={"path": str(tmp_path / "trained")})
    assert other == contents(tmp_path / "trained", reference={}) != first
    assert contents(tmp_path / "trained") == contents(MODEL) == {k: v for k, v in first.items() if k != "reference"}
    of_teacher = [contents(MODEL, teacher={"path": str(tmp_path / name)})["teacher"] for name in ("moved", "trained")]
    assert of_teacher[0] == contents(MODEL, teacher={})["teacher"] != of_teacher[1]
    served = {"engine": "vllm_server", "path": str(MODEL), "addresses": ["http://10.0.0.5:8000"]}
    assert "teacher" not in contents(MODEL, teacher=served)


@pytest.mark.parametrize("text", ["", "many", "7 steps"])
def test_a_garbage_done_is_none(directory, text):
    directory.done.write_text(text)
    assert identity.read_done(directory) is None
    assert not identity.is_complete(directory, 7)
