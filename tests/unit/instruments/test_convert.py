"""What `convert to-hf` says of folders that it cannot take."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_rl.__main__ import main
from megatron_rl.checkpoint.conversion import MegatronFolder
from megatron_rl.errors import InputError
from megatron_rl.model.architecture import read_architecture
from megatron_rl.monitor import RunDirectory
from megatron_rl.run.saving import sampling_of
from tests.support.tiny import MODEL


def run_with(folder: Path, **prompt: str) -> RunDirectory:
    directory = RunDirectory(folder / "run").create()
    lines = "".join(f"    {key}: {value}\n" for key, value in prompt.items())
    directory.recipe.write_text(f"data:\n  prompt:\n    max_length: 9\n{lines}rollout: {{stop_token_ids: [5]}}\n")
    return directory


def test_a_run_without_a_checkpoint_is_told(tmp_path, capsys):
    directory = run_with(tmp_path)
    assert main(["convert", "to-hf", str(directory.root), str(tmp_path / "out")]) == 2
    assert "a run directory without a complete checkpoint" in capsys.readouterr().err


def test_without_the_models_folder_the_option_is_named(tmp_path, capsys):
    checkpoint = run_with(tmp_path).checkpoints / "step_00000002"
    checkpoint.mkdir()
    assert main(["convert", "to-hf", str(checkpoint), str(tmp_path / "out")]) == 2
    assert "has no config.json; --model names the folder" in capsys.readouterr().err


def test_adapters_are_told_from_another_models_weights():
    folder = MegatronFolder.__new__(MegatronFolder)
    folder.path, folder.tensors = Path("step_1"), {"decoder.layers.0.mlp.linear_fc1.lora_A": None}
    with pytest.raises(InputError, match=r"holds adapters \(learner\.lora\).*checkpoints/hf"):
        folder.check(read_architecture(MODEL))


def test_how_a_run_sampled_is_read_from_its_recipe(tmp_path):
    template = tmp_path / "own.jinja"
    directory = run_with(tmp_path, chat_template=str(template))
    with pytest.raises(InputError, match=r"own\.jinja is gone"):
        sampling_of(directory)
    template.write_text("x")
    assert (sampling_of(directory).chat_template, sampling_of(directory).stop_token_ids) == (template, [5])
    assert sampling_of(run_with(tmp_path)).chat_template is None
