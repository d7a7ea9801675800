"""A checkpoint of one release of megatron-core is read whole by the other one, in both directions.

Each release has a Python of its own. OTHER_PYTHON names that of the release that does not run this test; `make
test-next` names `make setup`'s, where it is there.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.tiny import REPOSITORY

OTHER = os.environ.get("OTHER_PYTHON", "")


def call(python: str, action: str, folder: Path | str, result: Path) -> dict[str, Any]:
    command = [python, "-m", "tests.parallel.programs.releases", action, str(folder), str(result)]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=REPOSITORY, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(result.read_text())


@pytest.mark.skipif(not OTHER, reason="OTHER_PYTHON does not name a Python with another release of megatron-core")
@pytest.mark.parametrize("way", ["here to there", "there to here"])
def test_a_checkpoint_crosses_releases_bit_for_bit(way, tmp_path):
    writer, reader = (sys.executable, OTHER) if way == "here to there" else (OTHER, sys.executable)
    written = call(writer, "write", tmp_path / "run", tmp_path / "written.json")
    result = call(reader, "read", written["path"], tmp_path / "read.json")
    assert written["release"] != result["release"]
    assert result["state"] == written["state"]
    assert result["updates"] == 2
    assert result["sums"] == written["sums"]
    assert result["grad_norm"] > 0
