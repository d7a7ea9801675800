"""Steps that are recorded and repeated, as a CUDA graph repeats them, give the responses of steps that run."""

from __future__ import annotations

import pytest

from tests.support.repeated_steps import LENGTH, STEPS, run
from tests.support.te import MISSING

pytestmark = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))


@pytest.mark.slow
def test_repeated_steps_are_steps():
    recorded = run()
    assert recorded["times"] == STEPS - 1, "the first one runs"
    assert [len(tokens) for tokens, _ in recorded["run"]] == [LENGTH] * 4
    assert recorded["repeated"] == recorded["run"]
