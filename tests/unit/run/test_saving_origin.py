"""Which run wrote a checkpoint."""

from __future__ import annotations

from megatron_rl.monitor import RunDirectory
from megatron_rl.run.saving import run_of_checkpoint


def test_a_checkpoint_is_of_the_run_whose_folder_holds_it(tmp_path):
    directory = RunDirectory(tmp_path / "run").create()
    checkpoint = directory.checkpoints / "step_00000002"
    assert run_of_checkpoint(checkpoint) is None, "no recipe there"
    directory.recipe.write_text("name: run\n")
    assert run_of_checkpoint(checkpoint) == directory
    assert run_of_checkpoint(tmp_path / "run" / "elsewhere" / "step_00000002") is None
