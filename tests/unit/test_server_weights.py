"""Weights on their way to servers: files that hold what was exported, and are there as long as they are needed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megatron_rl.errors import InputError
from megatron_rl.rollout import RolloutError
from megatron_rl.rollout.servers import weight_files
from megatron_rl.rollout.servers.main_rank import MainRank
from megatron_rl.rollout.servers.weight_files import WeightFolder


def exported(number: int):
    """Tensors as an export may yield them: all views of one buffer that the next one overwrites."""
    buffer = torch.empty(16)
    for index in range(number):
        buffer.fill_(index)
        yield f"layer.{index}", buffer[:8].view(2, 4)


def test_files_hold_every_tensor_with_the_values_it_had(tmp_path, monkeypatch):
    monkeypatch.setattr(weight_files, "FILE_BYTES", 64)  # two tensors
    weights = WeightFolder(tmp_path / "weights").write(exported(5), version=3)
    assert weights.version == 3
    assert len(weights.files) == 3
    found = {name: tensor for file in weights.files for name, tensor in load_file(file).items()}
    assert {name: tensor.unique().tolist() for name, tensor in found.items()} == {f"layer.{i}": [i] for i in range(5)}


def test_only_older_files_go_even_where_a_version_comes_twice(tmp_path):
    folder = WeightFolder(tmp_path / "weights")
    first, again, later = (folder.write(exported(1), version) for version in (1, 1, 2))
    folder.remove_before(again)
    assert [Path(weights.files[0]).exists() for weights in (first, again, later)] == [False, True, True]
    folder.close()
    assert not (tmp_path / "weights").exists()


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
