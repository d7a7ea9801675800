"""The real client of `monitor.sinks.wandb`, in a folder of its own, and a reader of what it wrote without a network."""

import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.support.patience import PATIENCE_S

ROOT = Path(__file__).parents[3]
_BLOCK, _HEADER = 32768, 7  # LevelDB's log: checksum, length, type; a record's parts are whole, first, middle, last


def run(code: str, *arguments: str) -> str:
    """What ``code`` prints in a Python that has the client beside the environment. No key."""
    client = ROOT / ".cache" / "sinks" / "wandb"
    assert (client / ".ready").is_file(), "run tools/setup_tests.sh, as `make test` does"
    silent = {name: value for name, value in os.environ.items() if not name.startswith("WANDB")}
    environment = silent | {"PYTHONPATH": f"{client}{os.pathsep}{ROOT}", "HOME": arguments[0]}
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def records(file: Path) -> Iterator[bytes]:
    """The records of a file in the format of LevelDB's log, as Weights & Biases writes it."""
    data, at, whole = file.read_bytes(), _HEADER, b""  # seven bytes name the writer
    while at + _HEADER <= len(data):
        left = _BLOCK - at % _BLOCK
        if left < _HEADER:
            at += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        part = data[at + _HEADER : at + _HEADER + length]
        at += _HEADER + length
        whole = part if kind in (1, 2) else whole + part
        if kind in (1, 4):
            yield whole
