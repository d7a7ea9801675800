"""Shapes that are known by the name of a checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_rl.errors import InputError
from megatron_rl.model.architecture import shape_of
from tests.support.tiny import MODEL


def test_a_model_of_unknown_shape_is_refused():
    with pytest.raises(InputError, match="shapes known by folder name: Qwen3-30B-A3B"):
        shape_of(Path("models/nobody-knows"))
    assert shape_of(MODEL)[1] is False
    assert shape_of(Path("anywhere/Qwen3-8B-Base"))[1] is True
