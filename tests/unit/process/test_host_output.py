"""Programs that outlive the readers of what they print."""

from __future__ import annotations

import os
import resource
import subprocess
import sys

import pytest

from megatron_rl.errors import InputError
from megatron_rl.process import host

PRINTS = """
import os, sys
from megatron_rl.__main__ import open_missing
from megatron_rl.process.host import outlasting_readers
open_missing()
with outlasting_readers("log.txt has it"):
    for number in range(20_000):
        print(number, "." * 80)
    sys.stdout.flush()
    os.write(1, b"libraries write like this")
    print("the end", file=sys.stderr)
"""


def run(command: str) -> subprocess.CompletedProcess:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PROGRAM": PRINTS}
    return subprocess.run(["bash", "-c", command], env=environment, capture_output=True, text=True, timeout=120)


def test_a_pipe_whose_reader_leaves_is_said_once_and_costs_nothing():
    ended = run(f'set -o pipefail; {sys.executable} -c "$PROGRAM" | head -1 >&2')
    lines = ended.stderr.splitlines()
    assert ended.returncode == 0
    assert sorted(line for line in lines if not line.startswith("0 ")) == [
        "standard output cannot be written any more (Broken pipe); the run goes on: log.txt has it",
        "the end",
    ]


def test_everything_is_written_while_there_is_a_reader():
    ended = run(f'{sys.executable} -c "$PROGRAM"')
    assert (ended.returncode, ended.stderr) == (0, "the end\n")
    assert len(ended.stdout.splitlines()) == 20_001


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_descriptors_are_not_those_of_the_next_files(closed, tmp_path):
    program = f"""
from megatron_rl.__main__ import open_missing
open_missing()
import os, sys
with open({str(tmp_path / "file")!r}, "w") as file:
    print("out"); print("err", file=sys.stderr); os.write(1, b"low")
    sys.stdout.flush()
    sys.exit(file.fileno() < 3)
"""
    (tmp_path / "program.py").write_text(program)
    assert run(f"{sys.executable} {tmp_path / 'program.py'} {closed}").returncode == 0
    assert (tmp_path / "file").read_text() == ""


def test_the_limit_of_open_files_is_raised_or_refused(monkeypatch):
    limits, asked = [64, 4096], []
    monkeypatch.setattr(resource, "getrlimit", lambda _: tuple(limits))
    monkeypatch.setattr(resource, "setrlimit", lambda _, new: asked.append(new) or limits.__setitem__(0, new[0]))
    host.raise_descriptor_limit()
    assert asked == [(4096, 4096)]
    limits[:] = [64, 64]
    with pytest.raises(InputError, match="may open 64 files, and a run needs 256"):
        host.raise_descriptor_limit()
