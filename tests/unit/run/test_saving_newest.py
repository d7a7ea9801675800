"""`eval --checkpoint RUN`: which checkpoint of a run is meant."""

from __future__ import annotations

import pytest

from megatron_rl.__main__ import main
from megatron_rl.checkpoint import manifest
from megatron_rl.errors import InputError
from megatron_rl.run.saving import newest_checkpoint


def test_the_newest_whole_checkpoint_of_a_run(tmp_path):
    assert newest_checkpoint(tmp_path) == tmp_path, "a folder without checkpoints/ is no run"
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    with pytest.raises(InputError, match="a run directory without a complete checkpoint in checkpoints/"):
        newest_checkpoint(tmp_path)
    for step in (2, 10, 30):
        path = folder / manifest.checkpoint_name(step)
        path.mkdir()
        (path / "trainer.json").write_text("{}")
        if step < 30:  # the last save was cut off
            manifest.write_manifest(path, manifest.hash_files(path, ["trainer.json"]))
    assert newest_checkpoint(tmp_path) == folder / "step_00000010"
    assert newest_checkpoint(folder / "step_00000002") == folder / "step_00000002"


def test_convert_takes_a_run_and_names_the_option_that_it_lacks(tmp_path, capsys):
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    assert main(["convert", "to-hf", str(tmp_path / "run"), str(tmp_path / "out")]) == 2
    assert "a run directory without a complete checkpoint" in capsys.readouterr().err
    (tmp_path / "step").mkdir()
    assert main(["convert", "to-hf", str(tmp_path / "step"), str(tmp_path / "out")]) == 2
    assert "--model names the folder that the run started from" in capsys.readouterr().err
