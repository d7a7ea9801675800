"""A call that never returns ends its process, also where it keeps Python's lock."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.patience import PATIENCE_S
from tests.support.tiny import REPOSITORY

PROGRAM = """
import ctypes, sys, time
from megatron_rl.process import host as watchdog
watchdog._GRACE_S = 0.5
with watchdog.limited(30.0, "nothing"):
    pass
with watchdog.limited(None, "nothing"):
    pass
with watchdog.limited(0.5, "the engine"):
    {hang}
"""
HANGS = {"in Python": "time.sleep(600)", "in native code that keeps the lock": "ctypes.PyDLL(None).sleep(600)"}


@pytest.mark.parametrize("hang", HANGS)
def test_a_hang_ends_the_process(hang):
    program = PROGRAM.format(hang=HANGS[hang])
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert done.returncode == 1
    assert "most recent call first" in done.stderr
    if hang == "in Python":
        assert "run failed: the engine did not return within 0.5 s" in done.stderr
