"""The start of a run."""

from __future__ import annotations

import pytest

from megatron_rl.config.sections import CheckpointConfig
from megatron_rl.run.start import best_steps


@pytest.mark.parametrize(("mode", "n", "expected"), [("max", 1, [4]), ("max", 2, [2, 4]), ("min", 1, [6])])
def test_best_steps(mode, n, expected):
    config = CheckpointConfig.model_validate({"keep_best": {"metric": "m", "n": n, "mode": mode}})
    assert sorted(best_steps({2: 0.5, 3: 0.3, 4: 0.5, 5: 0.1, 6: 0.1}, config)) == expected
