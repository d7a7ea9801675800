"""Every benchmark runs, in its smallest form: figures are made by hand, and a program that stopped working would show
when somebody wants a figure."""

from __future__ import annotations

import pytest

from tests.support.zygote import run_command
from tools.bench.__main__ import MADE_UP_PROBLEMS, PROBLEMS, SMOKE

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", SMOKE)
def test_smoke(name, tmp_path):
    problems = tmp_path / "problems.jsonl"
    problems.write_text(MADE_UP_PROBLEMS)
    done = run_command(f"tools.bench.{name}", SMOKE[name].replace(PROBLEMS, str(problems)).split(), tmp_path)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert done.stdout.strip()
