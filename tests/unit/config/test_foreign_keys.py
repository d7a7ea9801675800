"""Keys of other projects: a message names ours; the table is read as it is written."""

import re

import pytest
import yaml

from megatron_rl.config import foreign_keys, load_recipe
from megatron_rl.errors import InputError
from megatron_rl.instruments.translate.translation import CONVERSIONS
from tests.support.tiny import DATA, MODEL, REPOSITORY

SOUND = {
    "name": "x",
    "num_steps": 1,
    "model": {"path": str(MODEL)},
    "data": {"train": [{"path": str(DATA / "train.jsonl")}]},
}


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"rollout": {"n": 4}}, "rollout.n: unknown key; it is a key of verl; here it is rollout.num_samples"),
        (
            {"data": {"train_batch_size": 4}},
            "data.train_batch_size: unknown key; it is a key of verl; here it is batch",
        ),
        ({"rollout_batch_size": 4}, "rollout_batch_size: unknown key; it is a key of slime; here it is batch.prompts"),
        ({"actor_rollout_ref": {}}, "a section of verl; `megatron-rl recipe from-verl FILE` translates"),
    ],
)
def test_a_key_of_another_project_is_told_ours(tmp_path, values, said):
    merged = {**SOUND, **values, **({"data": {**SOUND["data"], **values["data"]}} if "data" in values else {})}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(merged))
    with pytest.raises(InputError, match=re.escape(said)):
        load_recipe(tmp_path / "recipe.yaml")


def test_a_row_has_a_known_way_to_convert_or_a_name_of_its_own():
    ways = [row.how for row in foreign_keys.rows()]
    assert {how for how in ways if not how.startswith("@")} <= set(CONVERSIONS)
    rules = [how for how in ways if how.startswith("@")]
    assert len(set(rules)) == len(rules) > 50
    folder = REPOSITORY / "megatron_rl/instruments/translate"
    code = "".join((folder / f"{name}.py").read_text() for name in ("rules", "objective_rules"))
    assert [rule for rule in rules if not re.search(rf"['\"]{rule[1:].removeprefix('val_')}['\"]", code)] == []


@pytest.mark.parametrize("project", foreign_keys.PROJECTS)
def test_cells_are_read(project):
    assert sum(bool(row.keys[project]) for row in foreign_keys.rows()) > 70
    assert all(effect or neutral is None for _, neutral, effect in foreign_keys.without(project))
    first = {row.ours: row.keys["verl"] for row in foreign_keys.rows()}
    assert first["rollout.temperature"] == (("actor_rollout_ref.rollout.temperature", 1.0),)
    assert first["learner.optimizer.beta2"] == (("actor_rollout_ref.actor.optim.betas", [0.9, 0.999]),)
