"""What can be said of the scripts without a cluster."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.tiny import REPOSITORY

FOLDER = REPOSITORY / "slurm"
BATCH = sorted(FOLDER.glob("*.sbatch"))
SCRIPTS = sorted([*BATCH, *FOLDER.rglob("*.sh")])


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: str(path.relative_to(FOLDER)))
def test_bash_can_read_it(script):
    done = subprocess.run(["bash", "-n", str(script)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_shellcheck_has_no_complaint():
    command = ["shellcheck", "--external-sources", "--source-path", str(REPOSITORY), *map(str, SCRIPTS)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("script", BATCH, ids=lambda path: path.name)
def test_the_header_leaves_to_the_user_what_is_the_users(script):
    """Size, time, account and partition belong on the command line; a message must not hang on another run's log."""
    options = re.findall(r"^#SBATCH --([a-z-]+)", script.read_text(), re.MULTILINE)
    assert not {"account", "partition", "qos", "time", "nodes", "gpus-per-node", "gres", "mail-user"} & set(options)
    assert {"exclusive", "mem", "requeue", "open-mode", "output"} <= set(options)


def test_every_variable_is_documented():
    used = {name for script in SCRIPTS for name in re.findall(r"\bMRL_[A-Z_]+", script.read_text())}
    documented = set(re.findall(r"\bMRL_[A-Z_]+", (FOLDER / "README.md").read_text()))
    assert used == documented


def test_site_samples_load_in_strict_mode():
    for sample in sorted((FOLDER / "env").iterdir()):
        done = subprocess.run(["bash", "-euo", "pipefail", "-c", f"source '{sample}'"], capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, ""), Path(sample).name
