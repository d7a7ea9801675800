"""Arguments that several commands share."""

from __future__ import annotations

import pytest

from megatron_rl.__main__ import main
from megatron_rl.commands import GPU_NAMES
from megatron_rl.instruments.plan import GPUS
from tests.support.tiny import REPOSITORY


def test_command_line_names_the_gpus():
    assert tuple(GPUS) == GPU_NAMES


RECIPE = REPOSITORY / "recipes/router_replay/grpo-qwen3-30b-a3b-4n8g-tp4ep8-r3.yaml"


def test_a_name_that_is_neither_a_gpu_nor_a_file(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["plan", str(RECIPE), "--gpu", "b300"])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert "'b300' is neither a GPU (choose from a100-40" in said
    assert "gb200-186" in said
