"""The model card of an export: what the hub's own reader finds in it, and what it must not tell."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import yaml
from huggingface_hub import ModelCard

from megatron_rl.config.base import name_of_cached
from megatron_rl.monitor import RunDirectory
from megatron_rl.monitor.run_directory import encode_line
from megatron_rl.run.saving import model_card, run_of_checkpoint, write_model_card
from tests.support.tiny import tiny_recipe

SNAPSHOT = "/home/someone/.cache/huggingface/hub/models--Qwen--Qwen3-30B-A3B/snapshots/0123abc"
ENVIRONMENT = {"python": "3.11.2", "versions": {"torch": "2.9.1"}, "git": {"commit": "abcd", "changed": ["x.py"]}}
VALIDATION = {
    "val/gsm8k/avg@4": 0.5,
    "val/gsm8k/avg@4_ci95_low": 0.4,
    "val/gsm8k/avg@4_ci95_high": 0.6,
    "val/gsm8k/pass@1": 0.5,
    "val/gsm8k/pass@4": 0.75,
    "val/gsm8k/num_problems": 20.0,
    "val/gsm8k/response_length/mean": 100.0,
    "val/reward/mean": 0.5,
}


@pytest.fixture(scope="module")
def recipe() -> dict:
    values = tiny_recipe().model_dump(mode="json")
    values["model"]["path"] = SNAPSHOT
    values["data"]["train"][0]["path"] = SNAPSHOT.replace("models--", "datasets--") + "/train.parquet"
    values["data"]["validation"] = [{"path": "/home/someone/data/held-out.jsonl"}]
    return values


def card(recipe: dict, records: list[dict], step: int = 10) -> ModelCard:
    return ModelCard(model_card(recipe, ENVIRONMENT, records, step))


def test_the_hubs_reader_finds_base_model_data_and_results(recipe):
    data = card(recipe, [{"step": 10, **VALIDATION}]).data
    assert (data.base_model, data.datasets) == ("Qwen/Qwen3-30B-A3B", ["Qwen/Qwen3-30B-A3B"])
    assert (data.library_name, data.pipeline_tag, data.license) == ("transformers", "text-generation", None)
    results = {(result.dataset_name, result.metric_type): result.metric_value for result in data.eval_results}
    assert results == {("gsm8k", "pass@1"): 0.5, ("gsm8k", "pass@4"): 0.75}


def test_the_text_names_what_it_was_trained_with_and_no_folder(recipe):
    text = model_card(recipe, ENVIRONMENT, [{"step": 10, **VALIDATION}], 10)
    for told in ("torch 2.9.1", "abcd with changes", "Qwen/Qwen3-30B-A3B@0123abc/train.parquet", "# license: name it"):
        assert told in text
    assert "| gsm8k | 20 | 0.5000 [0.4000, 0.6000] | 0.5000 | 0.7500 |" in text
    assert "Of these weights" in text
    assert "/home/someone" not in text
    assert str(Path.cwd()) not in text


def test_the_recipe_in_the_card_is_the_one_in_force(recipe):
    block = str(card(recipe, [])).partition("```yaml\n")[2].partition("```")[0]
    fields = yaml.safe_load(block)
    assert fields["batch"] == recipe["batch"]
    assert fields["model"]["path"] == "Qwen/Qwen3-30B-A3B@0123abc"


def test_the_latest_validation_up_to_the_checkpoint_counts(recipe):
    records = [
        {"step": 0, **VALIDATION, "val/gsm8k/pass@1": 0.1},
        {"step": 5, **VALIDATION, "val/gsm8k/pass@1": 0.2},
        {"step": 7, "actor/lr": 1.0},
        {"step": 11, **VALIDATION, "val/gsm8k/pass@1": 0.9},
    ]
    text = card(recipe, records)
    assert {result.metric_value for result in text.data.eval_results} == {0.2, 0.75}
    assert "Of the weights after 5 steps" in str(text)


def test_a_run_without_validation_and_with_a_model_of_its_own(recipe):
    own = copy.deepcopy(recipe)
    own["model"]["path"] = "/models/mine"
    written = card(own, [{"step": 1, "actor/lr": 1.0}])
    assert (written.data.base_model, written.data.eval_results) == (None, None)
    assert "None were measured in the run." in str(written)
    assert "The model of the folder `mine`, trained by reinforcement learning" in str(written)
    text = model_card(own, ENVIRONMENT, [], 1)
    assert "\n# base_model: OWNER/NAME of the model that training began with" in text
    assert text.index("<details>") < text.index("```yaml") < text.index("</details>")


def test_a_card_is_written_of_what_a_run_directory_holds(recipe, tmp_path):
    directory = RunDirectory(tmp_path / "run").create()
    checkpoint = directory.checkpoints / "step_00000002"
    assert run_of_checkpoint(checkpoint) is None, "no recipe there"
    directory.recipe.write_text(yaml.safe_dump(recipe))
    directory.metrics.write_text(encode_line(2, VALIDATION))
    assert run_of_checkpoint(checkpoint) == directory
    assert run_of_checkpoint(tmp_path / "run" / "elsewhere" / "step_00000002") is None
    write_model_card(tmp_path, directory, 2)
    assert ModelCard.load(tmp_path / "README.md").data.base_model == "Qwen/Qwen3-30B-A3B"


def test_paths_of_the_hubs_cache_have_names():
    assert name_of_cached(Path(SNAPSHOT)) == "Qwen/Qwen3-30B-A3B@0123abc"
    assert name_of_cached(Path("/models/Qwen3")) is None
