"""Keys of other projects: a message names ours, and the page of docs is the same table."""

from __future__ import annotations

import re

import pytest
import yaml

from megatron_rl.config import foreign_keys, load_recipe
from megatron_rl.errors import InputError
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


DOCS = REPOSITORY / "docs"


def test_the_table_of_keys_is_the_one_that_messages_are_made_from():
    text = (DOCS / "coming-from.md").read_text()
    table = text.split("## Keys\n\n")[1].split("\n\n")[0]
    assert table == foreign_keys.markdown()
    for version, commit, _ in foreign_keys.READ_FROM.values():
        assert f"{version} (`{commit}`)" in text.split("## Keys")[0].replace("\n", " ")
