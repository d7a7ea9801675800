"""Every benchmark runs, in its smallest form: figures are made by hand, and a program that stopped working would show
when somebody wants a figure."""

import pytest

from tests.support.zygote import run_command
from tools.bench.__main__ import SMOKE

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("program", "arguments"),
    [
        *(("tools.bench", [name, "--smoke"]) for name in SMOKE),
        ("tools.bench.compare", ["HEAD", "HEAD", "--only", "objective", "--rounds", "1", "--allow", "1000"]),
    ],
)
def test_smoke(program, arguments, tmp_path):
    done = run_command(program, arguments, tmp_path)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert done.stdout.strip()
