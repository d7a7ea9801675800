"""Weights on their way to servers: files that hold what was exported, and are there as long as they are needed."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from megatron_rl.config.rollout import RolloutConfig
from megatron_rl.errors import InputError
from megatron_rl.rollout import RolloutError
from megatron_rl.rollout.servers import weight_updates
from megatron_rl.rollout.servers.run_servers import MainRank
from megatron_rl.rollout.servers.weight_updates import WeightFolder, WeightUpdates


def exported(number: int):
    """Tensors as an export may yield them: all views of one buffer that the next one overwrites."""
    buffer = torch.empty(16)
    for index in range(number):
        buffer.fill_(index)
        yield f"layer.{index}", buffer[:8].view(2, 4)


def test_files_hold_every_tensor_with_the_values_it_had(tmp_path, monkeypatch):
    monkeypatch.setattr(weight_updates, "FILE_BYTES", 64)  # two tensors
    weights = WeightFolder(tmp_path / "weights", tmp_path / "run").write(exported(5), version=3)
    assert weights.version == 3
    assert len(weights.files) == 3
    tensors = {name: tensor for file in weights.files for name, tensor in load_file(file).items()}
    assert {name: tensor.unique().tolist() for name, tensor in tensors.items()} == {f"layer.{i}": [i] for i in range(5)}


def test_only_older_files_go_even_where_a_version_comes_twice(tmp_path):
    folder = WeightFolder(tmp_path / "weights", tmp_path / "run")
    first, again, later = (folder.write(exported(1), version) for version in (1, 1, 2))
    folder.remove_before(again)
    assert [Path(weights.files[0]).exists() for weights in (first, again, later)] == [False, True, True]
    folder.close()
    assert not any((tmp_path / "weights").iterdir())


def test_files_of_users_in_the_folder_stay(tmp_path):
    mine = tmp_path / "shared" / "thesis.txt"
    mine.parent.mkdir()
    mine.write_text("three years of work")
    folder = WeightFolder(tmp_path / "shared", tmp_path / "run")
    folder.write(exported(1), 1)
    folder.close()
    assert [path.name for path in (tmp_path / "shared").iterdir()] == ["thesis.txt"]
    assert mine.read_text() == "three years of work"


def test_two_runs_share_a_folder(tmp_path):
    first, second = (WeightFolder(tmp_path / "weights", tmp_path / root / "run") for root in "ab")
    kept = first.write(exported(1), 1)
    second.close()
    assert Path(kept.files[0]).exists()
    first.close()
    assert not first.root.exists()


def test_what_a_killed_run_left_goes_when_it_starts_again(tmp_path):
    left = WeightFolder(tmp_path / "weights", tmp_path / "run").write(exported(1), 1)
    WeightFolder(tmp_path / "weights", tmp_path / "run")
    assert not Path(left.files[0]).exists()


def test_a_file_in_place_of_the_folder_is_an_error_that_names_the_key(tmp_path):
    (tmp_path / "weights").write_text("not a folder")
    with pytest.raises(InputError, match=r"rollout\.servers\.weights_dir: .*weights cannot be used"):
        WeightFolder(tmp_path / "weights", tmp_path / "run")
    assert (tmp_path / "weights").read_text() == "not a folder"


def test_the_recipe_says_where_files_lie(tmp_path):
    config = RolloutConfig(engine="vllm_server", servers={"weights_dir": str(tmp_path / "weights")})
    main = MainRank()
    updates = WeightUpdates(config, {}, SimpleNamespace(main=main), tmp_path / "run", print)
    updates.open_folder()
    assert updates._folder.root.parent == tmp_path / "weights"
    main.close()


def test_what_fails_on_the_main_rank_is_an_error_that_users_know():
    main = MainRank()

    async def fail(error):
        raise error

    with pytest.raises(InputError, match="as it was"):
        main.wait(main.submit(fail(InputError("as it was"))))
    with pytest.raises(RolloutError, match="rollout servers: KeyError: 'x'"):
        main.wait(main.submit(fail(KeyError("x"))))
    main.close()
    main.close()
